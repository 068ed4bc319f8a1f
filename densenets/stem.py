"""`Stem`: what stands before the first dense block on large images, without keeping its three large tensors."""

import keras
import tensorflow as tf

from densenets import backend
from densenets.dense_block import he_fan_out
from densenets.dense_block.features import CHUNKS, Grid, Norm, Sums, relu_affine, zeros_for

CONVOLUTION = {"strides": [1, 2, 2, 1], "padding": "VALID"}
MARGIN = [[0, 0], [3, 3], [3, 3], [0, 0]]  # of zeros around the image
POOLING = {"ksize": [1, 3, 3, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
BORDER = [[0, 0], [1, 1], [1, 1], [0, 0]]  # before the pooling; a ReLU makes zeros as good as none


@keras.saving.register_keras_serializable("densenets")
class Stem(keras.Layer):
    """7x7 convolution, BN, ReLU and 3x3 max pooling, stride 4 together (arXiv:1608.06993, table 1).

    Its convolution is a few percent of a network's work, and its results are the largest tensors of all. With
    `memory="shared"` they are computed again from the image in the backward pass; else automatic differentiation keeps them.

    Args:
        filters: the number of features.
        memory: as for `densenets.layers.DenseBlock`.
        epsilon, momentum: of the batch norm; the defaults are the paper's.
    """

    def __init__(self, filters, *, memory="shared", epsilon=1e-5, momentum=0.9, **kwargs):
        super().__init__(**kwargs)
        self.filters = filters
        self.memory = memory
        self.epsilon = epsilon
        self.momentum = momentum
        common = {"dtype": self.dtype_policy}
        self.conv = keras.layers.Conv2D(
            filters, 7, strides=2, use_bias=False, kernel_initializer=he_fan_out(), name="conv", **common
        )
        self.norm = keras.layers.BatchNormalization(epsilon=epsilon, momentum=momentum, name="bn", **common)

    def build(self, input_shape):
        self.conv.build(input_shape)
        self.norm.build((*input_shape[:-1], self.filters))

    def call(self, x, training=False):
        if self.memory == "shared":
            return _shared_stem(self.conv, Norm(self.norm, training), x)
        x = self.conv(keras.ops.pad(x, MARGIN))
        x = keras.ops.relu(self.norm(x, training=training))
        return keras.ops.max_pool(keras.ops.pad(x, BORDER), 3, 2)

    def compute_output_shape(self, input_shape):
        n, *sizes, _ = input_shape
        return (n, *(size and (size + 3) // 4 for size in sizes), self.filters)

    def get_config(self):
        return super().get_config() | {
            "filters": self.filters,
            "memory": self.memory,
            "epsilon": self.epsilon,
            "momentum": self.momentum,
        }


def _shared_stem(conv, norm, images):
    """z = W*x, y = maxpool(relu(s*z + t)), of which only the image x and the statistics of z are kept."""
    kernel = tf.cast(tf.convert_to_tensor(conv.kernel), images.dtype)
    filters = kernel.shape[-1]
    grid = Grid.of(images, 1 if backend.in_xla() else CHUNKS)
    half = grid.halved()  # of z
    parts = grid.split(tf.pad(images, MARGIN))

    def convolve(x):
        """z as [pixels, filters]."""
        return tf.reshape(tf.raw_ops.Conv2D(input=x, filter=kernel, **CONVOLUTION), [-1, filters])

    def pool(z, s, t, i):
        a = tf.pad(half.images(relu_affine(z, s, t), i), BORDER)
        return a, tf.raw_ops.MaxPool(input=a, **POOLING)

    def forward():
        zs, outputs, last = [], [], None
        for x in parts:
            last = convolve(backend.after(x, last))
            zs.append(last)
        statistics = half.moments(zs, 0)
        affine = norm.affine(*statistics)
        for i, z in enumerate(zs):
            _, last = pool(backend.after(z, last), *affine[:2], i)
            outputs.append(last)
        return (grid.join(outputs), *statistics), affine

    def backward(affine, upstream):
        doutput, *dstatistics = upstream
        s, t, mean, rstd = affine
        zs, dps, sums = [], [], Sums()
        for i, (x, dy) in enumerate(zip(parts, grid.split_gradient(zeros_for(doutput, output)), strict=True)):
            z = convolve(backend.after(x, dy, *sums.total))
            a, y = pool(z, s, backend.after_in_xla(t, dy), i)
            da = tf.raw_ops.MaxPoolGrad(orig_input=a, orig_output=y, grad=dy, **POOLING)
            dp = tf.reshape(tf.raw_ops.ReluGrad(gradients=da, features=a)[:, 1:-1, 1:-1], [-1, filters])
            wide = backend.widened(dp)
            sums.add(tf.reduce_sum(wide * (backend.widened(z) - mean), 0), tf.reduce_sum(wide, 0))
            zs.append(z)
            dps.append(dp)
        dgamma, dbeta = sums.total[0] * rstd, sums.total[1]
        input_gradient = norm.input_gradient(affine, dgamma, dbeta, half, dstatistics)
        dxs, sums = [], Sums()
        for i, (x, z, dp) in enumerate(zip(parts, zs, dps, strict=True)):
            dz = half.images(input_gradient(backend.after(dp, dgamma, dbeta, *sums.total), z, i), i)
            sums.add(tf.raw_ops.Conv2DBackpropFilter(input=x, filter_sizes=kernel.shape, out_backprop=dz, **CONVOLUTION))
            dxs.append(tf.raw_ops.Conv2DBackpropInput(input_sizes=tf.shape(x), filter=kernel, out_backprop=dz, **CONVOLUTION))
        return [grid.join(dxs)[:, 3:-3, 3:-3], *sums.total, dgamma, dbeta]

    output, mean, variance = backend.with_gradient(forward, [images, kernel, norm.gamma, norm.beta], backward)
    norm.update(mean, variance)
    return output
