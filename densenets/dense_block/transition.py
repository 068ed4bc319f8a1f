"""`Transition`: what stands between two dense blocks."""

import functools
from typing import Any

import keras
import tensorflow as tf

from densenets.dense_block.dense_layer import he_fan_out
from densenets.dense_block.features import Norm, column, consume, dropout_masks, features_of, relu_affine


@keras.saving.register_keras_serializable("densenets")
class Transition(keras.Layer):
    """BN-ReLU-conv1x1 and 2x2 average pooling: [N, H, W, C] -> [N, H/2, W/2, compression * C] (arXiv:1608.06993, section 3).

    Args:
        compression: theta, the share of the channels that goes on (1 for a plain DenseNet, 0.5 for DenseNet-C).
        dropout_rate: the share of values dropped after the convolution.
        epsilon, momentum: of the batch norm; the defaults are the paper's.
    """

    def __init__(
        self,
        compression: float = 0.5,
        *,
        dropout_rate: float = 0.0,
        epsilon: float = 1e-5,
        momentum: float = 0.9,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if not 0 < compression <= 1:
            raise ValueError(f"`compression` must be above 0 and at most 1, got {compression!r}.")
        self.compression = compression
        self.dropout_rate = dropout_rate
        self.epsilon = epsilon
        self.momentum = momentum
        self.norm = keras.layers.BatchNormalization(epsilon=epsilon, momentum=momentum, dtype=self.dtype_policy, name="bn")
        self.pool = keras.layers.AveragePooling2D(2, dtype=self.dtype_policy, name="pool")
        self.dropout = keras.layers.Dropout(dropout_rate, dtype=self.dtype_policy, name="dropout") if dropout_rate else None

    def build(self, input_shape):
        self.conv = keras.layers.Conv2D(
            int(input_shape[-1] * self.compression),
            1,
            use_bias=False,
            kernel_initializer=he_fan_out(),
            dtype=self.dtype_policy,
            name="conv",
        )
        self.norm.build(input_shape)
        self.conv.build(input_shape)

    def call(self, x, training=False):
        features = features_of(x)
        if features is not None:
            return self._from_features(features, training)
        x = self.conv(keras.ops.relu(self.norm(x, training=training)))
        if self.dropout is not None:
            x = self.dropout(x, training=training)
        return self.pool(x)

    def _from_features(self, features, training):
        """The same from the buffer of a shared block, chunk by chunk."""
        kernel = tf.cast(tf.convert_to_tensor(self.conv.kernel), features.chunks[0].dtype)
        if self.dropout is None or not training:
            make_fn = functools.partial(_pooled_convolution, features.grid)
        else:
            seed = self.dropout.seed_generator.next()
            description = (seed, self.dropout_rate, self.conv.filters, kernel.dtype)
            make_fn = functools.partial(_dropped_convolution, features.grid, *description)
        return consume(make_fn, features, Norm(self.norm, training), kernel)

    def compute_output_shape(self, input_shape):
        n, h, w, channels = input_shape
        return (n, h and h // 2, w and w // 2, int(channels * self.compression))

    def get_config(self):
        return super().get_config() | {
            "compression": self.compression,
            "dropout_rate": self.dropout_rate,
            "epsilon": self.epsilon,
            "momentum": self.momentum,
        }


def _pooled_convolution(grid, event):
    """Pooling first, which commutes with the convolution: a quarter of the pixels to convolve."""

    def fn(rows, s, t, kernel, i):
        pooled = _average_pool(relu_affine(rows, column(s), column(t)), grid)
        x = tf.matmul(pooled, kernel[0, 0], transpose_a=True)
        return tf.reshape(x, [grid.batches[i], grid.height // 2, grid.width // 2, x.shape[-1]])

    return fn


def _dropped_convolution(grid, seed, rate, channels, dtype, event):
    """In the order of the paper's code, since a mask lies between convolution and pooling."""
    masks = dropout_masks(seed, rate, grid, channels, dtype, event)

    def fn(rows, s, t, kernel, i):
        x = tf.matmul(relu_affine(rows, column(s), column(t)), kernel[0, 0], transpose_a=True)
        return tf.nn.avg_pool2d(grid.images(x * masks[i], i), 2, 2, "VALID")

    return fn


def _average_pool(rows, grid):
    """2x2 average pooling of [c, pixels], as a matrix product: two lines of an image, 2W pixels, become one of W/2.

    (TensorFlow's own gradient takes twenty times as long for images of one channel, as the rows are.)
    """
    width = 2 * (grid.width // 2)
    if not all(isinstance(size, int) and size % 2 == 0 for size in (grid.height, grid.width)):
        images = tf.reshape(rows, [-1, grid.height, grid.width])
        rows = tf.reshape(images[:, : 2 * (grid.height // 2), :width], [rows.shape[0], -1])
    pairs = tf.repeat(tf.eye(width // 2, dtype=rows.dtype), 2, axis=0)
    pooled = tf.matmul(tf.reshape(rows, [-1, 2 * width]), tf.concat([pairs, pairs], 0) / 4)
    return tf.reshape(pooled, [rows.shape[0], -1])
