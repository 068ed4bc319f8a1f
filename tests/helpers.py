"""What several test files share: running in a mode, comparing, and the plain network that every fast path is held against."""

import pathlib
import re

import conftest
import keras
import numpy as np
import tensorflow as tf

from densenets import memory


def in_mode(fn, mode):
    return fn if mode == "eager" else tf.function(fn, jit_compile=mode == "xla")


def relative_error(ours, plain):
    """The largest error over the largest value; both may be structures, equal in shape, `None` where `None`."""
    ours, plain = tf.nest.flatten(ours), tf.nest.flatten(plain)
    assert len(ours) == len(plain)
    errors = [0.0]
    for a, b in zip(ours, plain, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            a, b = np.asarray(a), np.asarray(b)
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            if a.size:
                a, b = a.astype("complex128"), b.astype("complex128")
                assert np.all(np.isfinite(b))
                errors.append(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-300))
    return max(errors)


def training_step(model, images, mode="graph", loss=None):
    """Outputs, input gradients and weight gradients of one training step; the moving averages move."""
    loss = loss or (lambda y: tf.reduce_sum(tf.cast(y, tf.float64) ** 2))

    def step(images):
        with tf.GradientTape() as tape:
            tape.watch(images)
            outputs = model(images, training=True)
            value = loss(outputs)
        gradients = tape.gradient(value, [images] + [v.value for v in model.trainable_variables])
        return outputs, gradients

    return in_mode(step, mode)(images)


def images(batch=2, size=8, channels=3, dtype="float64", seed=0):
    return tf.constant(np.random.default_rng(seed).normal(size=(batch, size, size, channels)), dtype)


def plain_dense_block(x, num_layers, growth_rate, bottleneck=True, dropout_rate=0.0, epsilon=1e-5, momentum=0.9):
    """A dense block of Keras layers alone, written after arXiv:1608.06993, section 3: the reference."""
    layers = keras.layers
    for _ in range(num_layers):
        y = x
        for channels, size in [(4 * growth_rate, 1), (growth_rate, 3)] if bottleneck else [(growth_rate, 3)]:
            y = layers.BatchNormalization(epsilon=epsilon, momentum=momentum)(y)
            y = layers.ReLU()(y)
            y = layers.Conv2D(channels, size, padding="same", use_bias=False)(y)
            if dropout_rate:
                y = layers.Dropout(dropout_rate)(y)
        x = layers.Concatenate()([x, y])
    return x


def peak_bytes(step, mode, *args):
    """What `step` needs at its peak, above what lives before it: the allocator's figure, and in XLA the compiler's own."""
    if mode != "xla":
        return memory.measure(in_mode(step, mode), *args).peak

    def xla_measured(*args):
        return step(*args)

    reports = pathlib.Path(conftest.XLA_DUMP.name)
    before = set(reports.glob("*memory-usage-report.txt"))
    tf.function(xla_measured, jit_compile=True)(*args)
    new = set(reports.glob("*memory-usage-report.txt")) - before
    return max(int(re.search(r"Total bytes used: (\d+)", path.read_text())[1]) for path in new)
