"""What several test files share: running in a mode, comparing, and the plain network that every fast path is held against."""

import os
import pathlib
import re
import subprocess
import sys

import conftest
import keras
import numpy as np
import tensorflow as tf

from densenets import memory

ROOT = pathlib.Path(__file__).parent.parent


def train(*arguments, before=None, **environment):
    """`train.py` as its user runs it, in a process of its own; `before` runs in that process first."""
    command = [sys.executable, "train.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment, preexec_fn=before)


def in_mode(fn, mode):
    return fn if mode == "eager" else tf.function(fn, jit_compile=mode == "xla")


def relative_error(ours, plain):
    """The largest error over the largest value of an array; both may be structures, equal in shape, `None` where `None`.

    An array smaller than a thousandth of the largest is held against that: such as the gradient of a scale that a later batch
    norm undoes, which is a difference of large numbers and has their rounding.
    """
    ours, plain = tf.nest.flatten(ours), tf.nest.flatten(plain)
    assert [a is None for a in ours] == [b is None for b in plain]
    ours, plain = ([np.asarray(a) for a in arrays if a is not None] for arrays in (ours, plain))
    assert [(a.shape, a.dtype) for a in ours] == [(b.shape, b.dtype) for b in plain]
    pairs = [(a.astype("complex128"), b.astype("complex128")) for a, b in zip(ours, plain, strict=True) if a.size]
    assert all(np.all(np.isfinite(b)) for _, b in pairs)
    sizes = [np.max(np.abs(b)) for _, b in pairs]
    floor = max([1e-3 * size for size in sizes] + [1e-300])
    return max([0.0, *(np.max(np.abs(a - b)) / max(size, floor) for (a, b), size in zip(pairs, sizes, strict=True))])


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
        step = in_mode(step, mode)
        # The least of three: what other threads of the test process allocate meanwhile is not the step's.
        return min(memory.measure(step, *args).peak for _ in range(3))

    def xla_measured(*args):
        return step(*args)

    reports = pathlib.Path(conftest.XLA_DUMP.name)
    before = set(reports.glob("*memory-usage-report.txt"))
    tf.function(xla_measured, jit_compile=True)(*args)
    new = set(reports.glob("*memory-usage-report.txt")) - before
    return max(int(re.search(r"Total bytes used: (\d+)", path.read_text())[1]) for path in new)
