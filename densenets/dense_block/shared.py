"""The dense block with one shared buffer of features: exact, in memory linear in the depth.

Let X be the buffer [C, M] of all features (C = c0 + L*k channels, M pixels), and x = X[:c] what layer l reads. With the first
batch norm as a scale and a shift for each channel, a layer is

    a = relu(s*x + t)            s = gamma/sqrt(var + eps),  t = beta - mean*s
    z = W1'a                     the 1x1 convolution, [M, 4k]
    y = relu(s2*z + t2)          the second batch norm, with statistics of z
    X[c:c+k] = W2 * y            the 3x3 convolution

**Shared statistics.** mean and var of a channel do not depend on who reads it: they are computed once, when it is made.

**The forward pass keeps** X, which is also the block's output, mean and var, and the statistics of each z. Nothing else.

**The backward pass** walks the layers in reverse with one buffer of gradients dX. Layer l takes the gradient of its new
features, g = dX[c:c+k], recomputes a, z and y (not the 3x3 convolution), and adds to dX[:c]:

    dy, dW2 = the convolution's gradients for g
    dz      = s2 * (dp2 - mean(dp2) - zhat*mean(dp2*zhat)),    dp2 = dy where y > 0,  zhat = (z - mean2)/sqrt(var2 + eps)
    dW1     = a dz
    dp      = W1 dz where a > 0,     dX[:c] += s*dp
    dbeta   = sum dp,                dgamma = sum dp*(x - mean) / sqrt(var + eps)

**Deferred statistics gradient.** mean and var have gradients too, as vectors of length C, to which every reader adds:

    dmean[:c] -= s*dbeta,            dvar[:c] -= s*dgamma / (2*sqrt(var + eps))

They reach the pixels once for each channel, when its own turn as a new feature comes: g += dmean/M + dvar*2(x - mean)/M. So the
big buffer is touched once for each layer.

The batch may be taken in chunks: with the statistics known, everything c channels wide is computed for a part of the batch at
a time. A frozen batch norm has its moving averages for mean and var, and no gradient goes through them.
"""

from typing import NamedTuple

import tensorflow as tf

from densenets import backend
from densenets.dense_block.features import (
    CHUNKS,
    Features,
    Grid,
    Norm,
    Sums,
    as_images,
    column,
    dropout_masks,
    first,
    piece,
    relu_affine,
    zeros_for,
)

CHUNKED_PIXELS = 1024  # an image this large is worth chunks: the first block's, on CIFAR as on ImageNet


def shared(dense_layers, x, training):
    """The features [N, H, W, c0 + L*k] of a block of L `dense_layers` on `x` [N, H, W, c0]; keeps no more than these.

    The result carries its `Features`, from which the layer behind the block computes.
    """
    layers, c = [], x.shape[-1]
    for dense_layer in dense_layers:
        layers.append(_Layer(dense_layer, c, x, training))
        c += dense_layer.growth_rate
    grid = Grid.of(x, 1 if backend.in_xla() or (x.shape[1] or 0) * (x.shape[2] or 0) < CHUNKED_PIXELS else CHUNKS)
    features, narrow_statistics = _block(layers, x, grid)
    for layer, statistics in zip(layers, narrow_statistics, strict=True):
        layer.update_moving_averages(features, statistics)
    output = as_images(features)
    output.set_shape([*x.shape[:-1], c])
    return output


class _Results(NamedTuple):
    """What a block makes: the buffer by chunk, [C, pixels] each; the statistics [C] of its channels; of each z, those [4k]."""

    chunks: list
    mean: tf.Tensor
    variance: tf.Tensor
    narrow_statistics: list


def _block(layers, x, grid):
    """The block as one operation with the gradient that this file's head derives: features, and the statistics of each z."""
    sources = [x, *(weight for layer in layers for weight in layer.weights)]
    results = backend.with_gradient(
        lambda: _forward(layers, x, grid), sources, lambda saved, upstream: _backward(layers, grid, saved, upstream)
    )
    return Features(results.chunks, results.mean, results.variance, grid), results.narrow_statistics


def _forward(layers, x, grid):
    """`_Results`, and with them what each layer's backward pass needs."""
    total = layers[-1].c + layers[-1].k
    parts = [grid.rows(part) for part in grid.split(x)]
    mean, variance = grid.moments(parts, 1)
    buffers = [backend.Buffer.holding(rows, total) for rows in parts]
    narrow_statistics, affines = [], []
    for layer in layers:
        new, narrow, affine = layer.forward([buffer.rows for buffer in buffers], mean, variance, grid)
        narrow_statistics.append(narrow)
        affines.append(affine)
        last = None
        for buffer, rows in zip(buffers, new, strict=True):
            last = buffer.append(rows, event=last)
        new_mean, new_variance = grid.moments(new, 1)
        mean, variance = tf.concat([mean, new_mean], 0), tf.concat([variance, new_variance], 0)
    results = _Results([buffer.rows for buffer in buffers], mean, variance, narrow_statistics)
    return results, (results, affines)


def _backward(layers, grid, saved, upstream):
    """The gradients of the block's input [N, H, W, c0] and of the layers' weights."""
    results, affines = saved
    chunks = results.chunks
    buffers = [backend.Buffer(zeros_for(d, x)) for d, x in zip(upstream.chunks, chunks, strict=True)]
    statistics = Statistics(
        results.mean, zeros_for(upstream.mean, results.mean), zeros_for(upstream.variance, results.variance)
    )
    weight_gradients = []
    for layer, affine, narrow in reversed(list(zip(layers, affines, upstream.narrow_statistics, strict=True))):
        weight_gradients = [*layer.backward(affine, chunks, buffers, statistics, narrow, grid), *weight_gradients]
    dx, complete = [], statistics.completion(0, layers[0].c, grid)
    for i, (x, buffer) in enumerate(zip(chunks, buffers, strict=True)):
        dx.append(grid.images(tf.transpose(complete(x, buffer.rows, i)), i))
    return [grid.join(dx), *weight_gradients]


class Statistics:
    """The gradients of the shared statistics, [C], to which every reader adds (see the file's head); and the mean."""

    def __init__(self, mean, dmean, dvariance):
        self.mean, self.dmean, self.dvariance = mean, dmean, dvariance

    def completion(self, start, c, grid):
        """The function (x, dx, i) -> the gradient of c channels of chunk i: their rows of dX, and what their statistics add."""
        share = grid.share(self.mean.dtype)
        mean, dmean, dvariance = (column(piece(v, start, c)) for v in (self.mean, self.dmean, self.dvariance))
        mean = tf.stop_gradient(mean)  # as `Grid.moments` holds it
        dmean, dvariance = dmean * share, dvariance * (2 * share)

        def complete(x, dx, i, after=()):
            x, dx = piece(backend.after(x, dx, *after), start, c), piece(dx, start, c)
            wide = backend.widened(dx) + dmean + dvariance * (backend.widened(x) - mean)
            return tf.cast(grid.weighted(i, wide), x.dtype)

        return complete

    def read_by(self, norm, affine, dgamma, dbeta):
        """Adds what a batch norm of the first channels passes on, given the gradients of its gamma and beta."""
        c = dgamma.shape[0]
        self.dmean, self.dvariance = first(self.dmean, c), first(self.dvariance, c)
        if norm.by_batch:
            s, _, _, rstd = affine
            self.dmean, self.dvariance = self.dmean - s * dbeta, self.dvariance - s * dgamma * rstd / 2


class _Layer:
    """Layer l of a block: the equations at the head of this file, forwards and backwards."""

    def __init__(self, dense_layer, c, x, training):
        self.c, self.k, self.bottleneck = c, dense_layer.growth_rate, dense_layer.bottleneck
        self.norms = [Norm(norm, training) for norm in dense_layer.norms]
        self.kernels = [tf.cast(tf.convert_to_tensor(conv.kernel), x.dtype) for conv in dense_layer.convs]
        self.weights = [
            weight for norm, kernel in zip(self.norms, self.kernels, strict=True) for weight in (norm.gamma, norm.beta, kernel)
        ]
        # The bottleneck's kernel as the matrix W1, [c, 4k].
        self.matrix = tf.reshape(self.kernels[0], self.kernels[0].shape[2:]) if self.bottleneck else None
        self.rate = dense_layer.dropout_rate
        # A seed for each dropout: the masks are drawn again in the backward pass.
        self.seeds = [dropout.seed_generator.next() for dropout in dense_layer.dropouts] if training else []

    def update_moving_averages(self, features, narrow_statistics):
        self.norms[0].update(first(features.mean, self.c), first(features.variance, self.c))
        if self.bottleneck:
            self.norms[1].update(*narrow_statistics)

    # --- What both passes compute ---

    def read(self, x, s, t, event=None):
        """x and a = relu(s*x + t), [c, pixels], from columns s and t; in XLA no sooner than `event`."""
        x = first(x, self.c)
        return x, relu_affine(x, s, backend.after_in_xla(t, event))

    def narrow(self, a, mask):
        """z = W1'a, dropped, [pixels, 4k]."""
        return _drop(tf.matmul(a, self.matrix, transpose_a=True), mask)

    def masks(self, which, grid, event):
        """The dropout mask of a convolution's output, [pixels, width], for each chunk; `None`s without dropout."""
        if not self.seeds:
            return [None] * len(grid.batches)
        kernel = self.kernels[which]
        return dropout_masks(self.seeds[which], self.rate, grid, kernel.shape[-1], kernel.dtype, event)

    # --- Forward ---

    def forward(self, chunks, mean, variance, grid):
        """The new features, [k, pixels] for each chunk; the mean and variance of z; what `backward` takes as `affine`."""
        affine = self.norms[0].affine(mean, variance)
        s, t = map(column, affine[:2])
        masks, outputs, last = self.masks(0, grid, chunks[0]), [], None
        for i, x in enumerate(chunks):
            _, a = self.read(backend.after(x, last), s, t)
            last = self.narrow(a, masks[i]) if self.bottleneck else self._convolve(tf.transpose(a), masks[i], grid, i)
            outputs.append(last)
        if not self.bottleneck:
            return outputs, (), (affine, None)
        narrow_statistics = grid.moments(outputs, 0)
        narrow_affine = self.norms[1].affine(*narrow_statistics)
        s, t, _, _ = narrow_affine
        masks, new, last = self.masks(1, grid, outputs[0]), [], None
        for i, z in enumerate(outputs):
            last = self._convolve(relu_affine(backend.after(z, last), s, t), masks[i], grid, i)
            new.append(last)
        return new, narrow_statistics, (affine, narrow_affine)

    def _convolve(self, y, mask, grid, i):
        """W2 * y, dropped, as rows [k, pixels]."""
        images = tf.nn.conv2d(grid.images(y, i), self.kernels[-1], 1, "SAME")
        return tf.transpose(_drop(tf.reshape(images, [-1, self.k]), mask))

    # --- Backward ---

    def backward(self, affines, chunks, buffers, statistics, narrow_upstream, grid):
        """The gradients of `weights`. Takes the new features' rows off the gradient buffers and adds to the others.

        `affines` is what `forward` returned last; `narrow_upstream` the gradients of the statistics of z, mostly `None`s.
        """
        affine, narrow_affine = affines
        if self.bottleneck:
            narrow = narrow_affine, narrow_upstream
            first_norm, others = self._backward_bottleneck(affine, narrow, chunks, buffers, statistics, grid)
        else:
            first_norm, others = self._backward_plain(affine, chunks, buffers, statistics, grid)
        dgamma, dbeta = first_norm
        statistics.read_by(self.norms[0], affine, dgamma, dbeta)
        return [dgamma, dbeta, *others]

    def _backward_plain(self, affine, chunks, buffers, statistics, grid):
        s, t, mean = map(column, affine[:3])
        complete = statistics.completion(self.c, self.k, grid)
        masks, sums = self.masks(0, grid, buffers[0].rows), Sums()
        for i, (x, buffer) in enumerate(zip(chunks, buffers, strict=True)):
            g = self._images(complete(x, buffer.rows, i, sums.total), masks[i], grid, i)
            x, a = self.read(backend.after(x, g), s, t, g)
            dkernel, dy = self._convolution_gradients(tf.transpose(a), g, grid, i)
            sums.add(*self._into_features(x, a, tf.transpose(dy), s, mean, buffer), dkernel)
        dgamma, dbeta, dkernel = sums.total
        return (backend.after(dgamma * affine[3], dkernel), dbeta), [dkernel]

    def _backward_bottleneck(self, affine, narrow, chunks, buffers, statistics, grid):
        # From the new features to the second batch norm, for the whole batch, since its statistics are the batch's ...
        s, t, mean = map(column, affine[:3])
        narrow_affine, narrow_upstream = narrow
        s2, t2, mean2, rstd2 = narrow_affine
        complete = statistics.completion(self.c, self.k, grid)
        masks, masks2 = (self.masks(i, grid, buffers[0].rows) for i in (0, 1))
        zs, dps, sums = [], [], Sums()
        for i, (x, buffer) in enumerate(zip(chunks, buffers, strict=True)):
            g = self._images(complete(x, buffer.rows, i, sums.total), masks2[i], grid, i)
            _, a = self.read(backend.after(x, g), s, t, g)
            z = self.narrow(a, masks[i])
            y = relu_affine(z, s2, t2)
            dkernel2, dy = self._convolution_gradients(y, g, grid, i)
            dp = tf.raw_ops.ReluGrad(gradients=dy, features=y)
            wide = backend.widened(dp)
            sums.add(tf.reduce_sum(wide * (backend.widened(z) - mean2), 0), tf.reduce_sum(wide, 0), dkernel2)
            zs.append(z)
            dps.append(dp)
        dgamma2, dbeta2, dkernel2 = sums.total
        dgamma2 = backend.after(dgamma2 * rstd2, dkernel2)
        # ... and on to the features.
        dz = self.norms[1].input_gradient(narrow_affine, dgamma2, dbeta2, grid, narrow_upstream)
        sums = Sums()
        for i, (x, z, dp, buffer) in enumerate(zip(chunks, zs, dps, buffers, strict=True)):
            dz_i = _drop(dz(backend.after(dp, dgamma2, dbeta2, *sums.total), z, i), masks[i])
            x, a = self.read(backend.after(x, dz_i), s, t, dz_i)
            dkernel = tf.matmul(a, dz_i)
            da = tf.matmul(self.matrix, dz_i, transpose_b=True)
            sums.add(*self._into_features(x, a, da, s, mean, buffer), dkernel)
        dgamma, dbeta, dkernel = sums.total
        return (backend.after(dgamma * affine[3], dkernel), dbeta), [dkernel[None, None], dgamma2, dbeta2, dkernel2]

    def _images(self, rows, mask, grid, i):
        """The gradient of the new features, [k, pixels], before their dropout, as images."""
        return grid.images(_drop(tf.transpose(rows), mask), i)

    def _convolution_gradients(self, y, g, grid, i):
        """The gradients of the 3x3 kernel and of y [pixels, width]."""
        images, kernel = grid.images(y, i), self.kernels[-1]
        conv = {"out_backprop": g, "strides": [1, 1, 1, 1], "padding": "SAME"}
        dkernel = tf.raw_ops.Conv2DBackpropFilter(input=images, filter_sizes=kernel.shape, **conv)
        dy = tf.raw_ops.Conv2DBackpropInput(input_sizes=tf.shape(images), filter=kernel, **conv)
        return dkernel, tf.reshape(dy, [-1, kernel.shape[2]])

    def _into_features(self, x, a, da, s, mean, buffer):
        """Takes the gradient of a on to dX[:c]; returns the sums of dp*(x - mean) and of dp, over the pixels of the chunk."""
        dp = backend.widened(tf.raw_ops.ReluGrad(gradients=da, features=a))
        dbeta = tf.reduce_sum(dp, 1)
        dgamma = tf.reduce_sum(dp * (backend.widened(x) - mean), 1)
        buffer.add_to_first(tf.cast(backend.after(dp, dbeta, dgamma) * s, x.dtype))
        return dgamma, dbeta


def _drop(x, mask):
    return x if mask is None else x * mask
