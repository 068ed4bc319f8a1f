"""`Features`: all features of a dense block in one buffer, feature by feature, with their statistics.

Kept as [channels, pixels], a layer's input (the first c channels) is one contiguous piece, the 1x1 convolution is one matrix
product, and only the few new channels of each layer are ever transposed. Where the batch is taken in chunks, each chunk has a
matrix of its own.
"""

import dataclasses

import tensorflow as tf

from densenets import backend

CHUNKS = 4  # of the batch, where tensors are large; more save little and cost tracing time


@dataclasses.dataclass(frozen=True)
class Features:
    """What a dense block hands to the layer behind it.

    Attributes:
        chunks: one matrix [C, pixels] for each chunk of the batch.
        mean, variance: [C], over all pixels of the batch, in float32 or float64.
        grid: the layout of the pixels.
    """

    chunks: list
    mean: tf.Tensor
    variance: tf.Tensor
    grid: "Grid"


@dataclasses.dataclass(frozen=True)
class Grid:
    """How pixels lie in a matrix: images of `height` x `width`, one after another, in chunks of the batch.

    Sizes are numbers where they are known, else scalar tensors. A batch of unknown size may have fewer images than chunks, and
    TensorFlow's convolutions fail on none. So no chunk is empty: one without an image of its own takes another's, with the
    weight 0 in every sum and in every gradient.

    Attributes:
        batches: the number of images in each chunk, at least 1.
        starts: where in the batch each begins.
        own: how many images of each are its own; all, but for a chunk of weight 0.
        weights: 1.0 or 0.0 for each; plain numbers where the batch's size is known.
    """

    batches: list
    starts: list
    own: list
    weights: list
    height: int | tf.Tensor
    width: int | tf.Tensor

    @classmethod
    def of(cls, images, num_chunks):
        """The grid of `images` [N, H, W, c] in `num_chunks` chunks at most, equal as far as N goes."""
        n, height, width, _ = _sizes(images)
        if isinstance(n, int):
            num_chunks = max(1, min(n, num_chunks))
        starts = [n * i // num_chunks for i in range(num_chunks)]
        own = [stop - start for start, stop in zip(starts, [*starts[1:], n], strict=True)]
        if isinstance(n, int) or num_chunks == 1:
            return cls(own, starts, own, [1.0] * num_chunks, height, width)
        starts = [tf.minimum(start, n - 1) for start in starts]
        weights = [tf.cast(size > 0, tf.float32) for size in own]
        return cls([tf.maximum(size, 1) for size in own], starts, own, weights, height, width)

    def halved(self):
        """The grid of images half as high and wide, rounded up."""
        return dataclasses.replace(self, height=(self.height + 1) // 2, width=(self.width + 1) // 2)

    def share(self, dtype):
        """One over the number of pixels in the whole batch: a number where that is known, else a scalar tensor."""
        count = sum(self.own) * self.height * self.width
        return 1 / count if isinstance(count, int) else 1 / tf.cast(count, dtype)

    def split(self, images):
        """`images` [N, ...] by chunk."""
        if len(self.batches) == 1:
            return [images]
        return [images[start : start + size] for start, size in zip(self.starts, self.batches, strict=True)]

    def split_gradient(self, images):
        """The gradient of what `join` returns, by chunk."""
        return [self.weighted(i, part) for i, part in enumerate(self.split(images))]

    def join(self, parts):
        """Chunks of images [n, ...] as one batch [N, ...]."""
        return parts[0] if len(parts) == 1 else tf.concat([p[:n] for p, n in zip(parts, self.own, strict=True)], 0)

    def rows(self, images):
        """[n, H, W, c] -> [c, pixels]."""
        return tf.transpose(tf.reshape(images, [-1, images.shape[-1]]))

    def images(self, matrix, chunk):
        """[pixels, c] -> [n, H, W, c], of one chunk."""
        return tf.reshape(matrix, [self.batches[chunk], self.height, self.width, matrix.shape[-1]])

    def moments(self, matrices, axis):
        """Mean and variance along the pixels (`axis`) of the chunks' matrices, in at least float32.

        Around a mean that is held constant, as `tf.nn.moments` has it, here and wherever the gradient of the variance is taken.
        One derivative is the same either way. The second is then that of Keras' batch norm, and not quite the true one.
        """
        matrices = [backend.widened(m) for m in matrices]
        share = self.share(matrices[0].dtype)
        mean = tf.add_n([self.weighted(i, tf.reduce_sum(m, axis)) for i, m in enumerate(matrices)]) * share
        centre = tf.stop_gradient(column(mean) if axis == 1 else mean)
        squares = [tf.reduce_sum(tf.math.squared_difference(m, centre), axis) for m in matrices]
        return mean, tf.add_n([self.weighted(i, square) for i, square in enumerate(squares)]) * share

    def weighted(self, i, part):
        """`part`, of chunk i, times the chunk's weight."""
        weight = self.weights[i]
        return part if isinstance(weight, float) else part * tf.cast(weight, part.dtype)


def _sizes(images):
    dynamic = tf.shape(images)
    return [dynamic[i] if size is None else size for i, size in enumerate(images.shape)]


def relu_affine(x, s, t):
    """relu(s*x + t), in the dtype of x."""
    return tf.cast(tf.nn.relu(backend.widened(x) * s + t), x.dtype)


def column(vector):
    """[c] -> [c, 1]."""
    return tf.reshape(vector, backend.constant(-1, 1))


def first(tensor, c):
    """The first c rows, or entries. (All of them need no operation: a trace holds thousands of these.)"""
    return tensor if tensor.shape[0] == c else piece(tensor, 0, c)


def piece(tensor, start, c):
    """c rows, or entries, from `start` on."""
    rest = tensor.shape.rank - 1
    return tf.slice(tensor, backend.constant(start, *[0] * rest), backend.constant(c, *[-1] * rest))


def zeros_for(gradient, tensor):
    """The `gradient` of `tensor`, or zeros where it is `None`."""
    return tf.zeros_like(tensor) if gradient is None else gradient


class Norm:
    """A batch norm as a scale and a shift: by the batch's statistics, or, frozen, by its moving averages."""

    def __init__(self, norm, training):
        if training and norm.synchronized:
            raise ValueError(f"`memory='shared'` takes no synchronized batch norm, as {norm.path!r} is; use 'checkpoint'.")
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

    def input_gradient(self, affine, dgamma, dbeta, grid, upstream=(None, None)):
        """The function (dp, z, i) -> dz for chunk i, of a norm over the columns of z; dp is the gradient of s*z + t.

        Its vectors are made here, once for all chunks. `upstream` has the gradients of the statistics of z themselves, where
        somebody asks for one by the moving averages (as `stateless_call` returns them).
        """
        s, _, mean, rstd = affine
        if not self.by_batch:
            return lambda dp, z, i: tf.cast(backend.widened(dp) * s, z.dtype)
        share = grid.share(s.dtype)
        by_mean, by_variance = s * dbeta * share, s * rstd * dgamma * share
        centre = tf.stop_gradient(mean)
        dmean, dvariance = upstream
        if dmean is not None:
            by_mean -= dmean * share
        if dvariance is not None:
            by_variance -= 2 * dvariance * share

        def dz(dp, z, i):
            wide = backend.widened(dp) * s - by_mean - (backend.widened(z) - centre) * by_variance
            return tf.cast(grid.weighted(i, wide), z.dtype)

        return dz

    def update(self, mean, variance):
        """Moves the moving averages, as Keras does."""
        if self.by_batch:
            keep = self.keras.momentum
            self.keras.moving_mean.assign(self.moving_mean * keep + mean * (1 - keep))
            self.keras.moving_variance.assign(self.moving_variance * keep + variance * (1 - keep))


class Sums:
    """Gradients added up over the chunks.

    Attributes:
        total: the sums so far. What comes next is ordered after them: the executor would put off what only the optimizer
            waits for, such as a kernel's gradient, and keep the large tensors that it is made from.
    """

    def __init__(self):
        self.total = []

    def add(self, *grads):
        self.total = [a + b for a, b in zip(self.total, grads, strict=True)] if self.total else list(grads)


def dropout_masks(seed, rate, grid, channels, dtype, event):
    """The mask that `keras.layers.Dropout` draws for images [N, H, W, channels], as [pixels, channels] for each chunk.

    It needs nothing but its seed, so it would be drawn, and kept, long before its turn: here no sooner than `event`.
    """
    seed = backend.after_in_xla(backend.after(seed, event), event)
    ones = tf.ones([sum(grid.own), grid.height, grid.width, channels], dtype)
    mask = tf.nn.experimental.stateless_dropout(ones, rate, seed=tf.cast(seed, tf.int32))
    return [tf.reshape(part, [-1, channels]) for part in grid.split(mask)]


def consume(make_fn, features, norm, *weights):
    """`fn(rows, s, t, *weights, i)` of each chunk i, concatenated: what the layer behind a block makes of its features.

    s and t are the scale and the shift of that layer's batch norm; `fn` returns [n, ...] for the n images of the chunk.
    Only the features are kept for the backward pass, in which `fn` runs again, chunk by chunk. `make_fn(event)` gives it,
    once for each pass, after `event`: what its chunks share, such as a dropout mask, is made in that pass and not kept.
    """
    mean, variance = features.mean, features.variance

    def forward():
        s, t, _, _ = norm.affine(mean, variance)
        fn, outputs, last = make_fn(features.chunks[0]), [], None
        for i, rows in enumerate(features.chunks):
            last = fn(backend.after(rows, last), s, t, *weights, i)
            outputs.append(last)
        return features.grid.join(outputs), None

    def backward(_, upstream):
        fn, drows, sums = make_fn(upstream), [], Sums()
        for i, (rows, dy) in enumerate(zip(features.chunks, features.grid.split_gradient(upstream), strict=True)):
            with tf.GradientTape() as tape:
                rows = tf.identity(backend.after(rows, dy, *sums.total))
                vectors = (backend.after_in_xla(mean, dy), variance, norm.gamma, norm.beta, *weights)
                sources = [rows, *map(tf.identity, vectors)]
                tape.watch(sources)
                s, t, _, _ = norm.affine(*sources[1:5])
                y = fn(rows, s, t, *sources[5:], i)
            drow, *others = tape.gradient(y, sources, output_gradients=dy, unconnected_gradients="zero")
            sums.add(*others)
            drows.append(backend.after(drow, *sums.total))
        return [*drows, *sums.total]

    output = backend.with_gradient(forward, [*features.chunks, mean, variance, norm.gamma, norm.beta, *weights], backward)
    norm.update(mean, variance)
    return output


# === As images, and back ===
#
# Between layers a block's features are a tensor of images like any other: whoever taps it has its gradient. The matrices
# travel beside it, as Keras' masks do, both ways: forwards beside the images, backwards beside their gradient. Where a tensor
# arrives as it was handed over, what stands beside it serves, and in a graph the tensor itself is never computed.

BESIDE = "_densenets_features"


def as_images(features):
    """The block's output [N, H, W, C] made of its `features`, which `features_of` finds again."""
    grid = features.grid

    def forward():
        return grid.join([grid.images(tf.transpose(rows), i) for i, rows in enumerate(features.chunks)]), None

    def backward(_, upstream):
        beside = getattr(upstream, BESIDE, None)
        return beside or [*(grid.rows(part) for part in grid.split_gradient(upstream)), None, None]

    images = backend.with_gradient(forward, [*features.chunks, features.mean, features.variance], backward)
    setattr(images, BESIDE, features)
    return images


def features_of(images):
    """The `Features` of a block's output, computed from it as far as gradients can tell; `None` for any other tensor."""
    features = getattr(images, BESIDE, None)
    if features is None or backend.has_tangents([images]):  # a tangent may arrive at the images alone
        return None
    grid = features.grid

    def forward():
        return (features.chunks, features.mean, features.variance), None

    def backward(_, upstream):
        """The features' gradients with those of their statistics, as images (see `shared.py`, deferred statistics gradient)."""
        drows = [zeros_for(drow, rows) for drow, rows in zip(upstream[0], chunks, strict=True)]
        dmean, dvariance = zeros_for(upstream[1], mean), zeros_for(upstream[2], variance)
        gradient = grid.join([grid.images(tf.transpose(rows), i) for i, rows in enumerate(drows)])
        share = grid.share(mean.dtype)
        by_statistics = (dmean + 2 * dvariance * (backend.widened(images) - tf.stop_gradient(mean))) * share
        gradient = tf.cast(backend.widened(gradient) + by_statistics, images.dtype)
        setattr(gradient, BESIDE, [*drows, dmean, dvariance])
        return [gradient]

    chunks, mean, variance = backend.with_gradient(forward, [images], backward)
    return Features(chunks, mean, variance, grid)
