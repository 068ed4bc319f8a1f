"""`Features`: all features of a dense block in one buffer, feature by feature, with their statistics.

Kept as [channels, pixels], a layer's input (the first c channels) is one contiguous piece, the 1x1 convolution is one matrix
product, and only the few new channels of each layer are ever transposed. Where the batch is taken in chunks, each chunk has a
matrix of its own.
"""

import dataclasses
import itertools

import tensorflow as tf

from densenets import backend

CHUNKS = 4  # of the batch, where tensors are large; more cost time


@dataclasses.dataclass(frozen=True)
class Features:
    """What a dense block hands to the layer behind it, beside its output.

    Attributes:
        chunks: one matrix [C, pixels] for each chunk of the batch.
        mean, variance: [C], over all pixels of the batch, in float32 or float64; `None` where nobody reads them.
        grid: the layout of the pixels.
    """

    chunks: list
    mean: tf.Tensor | None
    variance: tf.Tensor | None
    grid: "Grid"


@dataclasses.dataclass(frozen=True)
class Grid:
    """How pixels lie in a matrix: images of `height` x `width`, one after another, in chunks of `batches` images each.

    The sizes are numbers where they are known, else scalar tensors.
    """

    batches: list
    height: int | tf.Tensor
    width: int | tf.Tensor

    @classmethod
    def of(cls, images, num_chunks):
        """The grid of `images` [N, H, W, c] in `num_chunks` chunks, equal as far as N goes."""
        n, height, width, _ = _sizes(images)
        ends = [n * i // num_chunks for i in range(num_chunks + 1)]
        return cls([end - start for start, end in itertools.pairwise(ends)], height, width)

    @property
    def count(self):
        """The number of pixels in the whole batch, as a scalar."""
        return sum(self.batches) * self.height * self.width

    def split(self, images):
        """`images` [N, ...] by chunk."""
        if len(self.batches) == 1:
            return [images]
        starts = [sum(self.batches[:i]) for i in range(len(self.batches))]
        return [images[start : start + n] for start, n in zip(starts, self.batches, strict=True)]

    def rows(self, images):
        """[n, H, W, c] -> [c, pixels]."""
        return tf.transpose(tf.reshape(images, [-1, images.shape[-1]]))

    def images(self, matrix, chunk):
        """[pixels, c] -> [n, H, W, c], of one chunk."""
        return tf.reshape(matrix, [self.batches[chunk], self.height, self.width, matrix.shape[-1]])

    def planes(self, rows, chunk):
        """[c, pixels] -> [c, n, H, W], of one chunk."""
        return tf.reshape(rows, [rows.shape[0], self.batches[chunk], self.height, self.width])


def _sizes(images):
    dynamic = tf.shape(images)
    return [dynamic[i] if size is None else size for i, size in enumerate(images.shape)]


def relu_affine(rows, s, t):
    """relu(s*x + t) of rows [c, pixels], in their dtype."""
    return tf.cast(tf.nn.relu(backend.widened(rows) * s[:, None] + t[:, None]), rows.dtype)


def moments(matrices, axis, count):
    """Mean and variance along the pixels (`axis`) of matrices that are chunks of one, in at least float32."""
    matrices = [backend.widened(m) for m in matrices]
    count = tf.cast(count, matrices[0].dtype)
    mean = tf.add_n([tf.reduce_sum(m, axis) for m in matrices]) / count
    centre = mean[:, None] if axis == 1 else mean
    return mean, tf.add_n([tf.reduce_sum(tf.math.squared_difference(m, centre), axis) for m in matrices]) / count


class Norm:
    """A batch norm as a scale and a shift: by the batch's statistics, or, frozen, by its moving averages."""

    def __init__(self, norm, training):
        self.keras = norm
        self.by_batch = bool(training and norm.trainable)
        self.gamma, self.beta, self.moving_mean, self.moving_variance = (
            backend.widened(tf.convert_to_tensor(w)) for w in (norm.gamma, norm.beta, norm.moving_mean, norm.moving_variance)
        )

    def affine(self, mean, variance, gamma=None, beta=None):
        """(s, t, mean, rstd) of s*x + t, each [c], by the norm's own gamma and beta where none are given."""
        if not self.by_batch:
            mean, variance = self.moving_mean, self.moving_variance
        rstd = tf.math.rsqrt(variance + self.keras.epsilon)
        s = (self.gamma if gamma is None else gamma) * rstd
        return s, (self.beta if beta is None else beta) - mean * s, mean, rstd

    def update(self, mean, variance):
        """Moves the moving averages, as Keras does."""
        if self.by_batch:
            keep = self.keras.momentum
            mean, variance = tf.stop_gradient(mean), tf.stop_gradient(variance)
            self.keras.moving_mean.assign(self.moving_mean * keep + mean * (1 - keep))
            self.keras.moving_variance.assign(self.moving_variance * keep + variance * (1 - keep))


class Sums:
    """Gradients added up over the chunks."""

    def __init__(self):
        self.total = None

    def add(self, *grads):
        self.total = grads if self.total is None else [a + b for a, b in zip(self.total, grads, strict=True)]


def consume(fn, features, norm, *weights):
    """`fn(rows, s, t, *weights, i)` for each chunk i, concatenated: what the layer behind a block makes of its features.

    s and t are the scale and the shift of that layer's batch norm; `fn` returns [n, ...] for the n images of the chunk. Only the
    features are kept for the backward pass, in which `fn` runs again, chunk by chunk.
    """
    mean, variance = features.mean, features.variance
    with backend.stop_recording():
        s, t, _, _ = norm.affine(mean, variance)
        outputs, last = [], None
        for i, rows in enumerate(features.chunks):
            last = fn(backend.after(rows, last), s, t, *weights, i)
            outputs.append(last)

    def gradients(upstream):
        drows, sums, last = [], Sums(), None
        for i, (rows, dy) in enumerate(zip(features.chunks, features.grid.split(upstream), strict=True)):
            with tf.GradientTape() as tape:
                rows = tf.identity(backend.after(rows, dy, last))
                vectors = (backend.after_in_xla(mean, dy), variance, norm.gamma, norm.beta, *weights)
                sources = [rows, *map(tf.identity, vectors)]
                tape.watch(sources)
                s, t, _, _ = norm.affine(*sources[1:5])
                y = fn(rows, s, t, *sources[5:], i)
            last, *others = tape.gradient(y, sources, output_gradients=dy, unconnected_gradients="zero")
            drows.append(last)
            sums.add(*others)
        return [*drows, *sums.total]

    sources = [*features.chunks, mean, variance, norm.gamma, norm.beta, *weights]
    [output] = backend.attach_gradient([outputs[0] if len(outputs) == 1 else tf.concat(outputs, 0)], sources, gradients)
    norm.update(mean, variance)
    return output


# === On a tensor ===

ATTRIBUTE = "_densenets_features"


def attach(output, features):
    """Lets the layer behind a block find its `features` on the block's output, as Keras' masks travel."""
    setattr(output, ATTRIBUTE, features)
    return output


def attached(tensor):
    """The `Features` behind a block's output, or `None` for any other tensor."""
    return getattr(tensor, ATTRIBUTE, None)
