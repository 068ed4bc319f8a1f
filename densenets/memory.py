"""Memory, measured: what a step needs, by the allocator of the device that runs it."""

import dataclasses
import os
import warnings

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one step needed, in bytes.

    Attributes:
        peak: the most that lived at once during the step, above `baseline`.
        baseline: what lives between steps: weights, optimizer slots, data held on the device.
        device: the device whose allocator was asked, such as `"GPU:0"`.
    """

    peak: int
    baseline: int
    device: str


def measure(step, *args):
    """Runs `step(*args)` twice, first to trace and compile it, and measures the second run.

    The figures are the allocator's own, so they hold in eager execution, in graphs and in XLA, and repeat. They contain
    what TensorFlow allocates, its padding included; they do not contain the program's code, the CUDA context, or memory
    that libraries take elsewhere. On a CPU start the program with `TF_CPU_ALLOCATOR_USE_BFC=1` in the environment:
    TensorFlow then uses the allocator that GPUs use; without it sizes are rounded up to powers of two.

    Args:
        step: a function that does one training step, or anything else. What it returns counts as long as it lives.
        *args: its arguments.

    Returns:
        A `Measurement`.

    Raises:
        RuntimeError: where the device keeps no statistics.
    """
    device = _device()
    if device == "CPU:0" and os.environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() not in ("1", "true"):
        warnings.warn(
            "TF_CPU_ALLOCATOR_USE_BFC=1 was not set before TensorFlow started: measured sizes are rounded up.",
            stacklevel=2,
        )
    step(*args)
    tf.test.experimental.sync_devices()
    baseline = _statistics(device)["current"]
    tf.config.experimental.reset_memory_stats(device)
    results = step(*args)
    tf.test.experimental.sync_devices()
    peak = _statistics(device)["peak"]
    del results
    return Measurement(peak - baseline, baseline, device)


def allocated():
    """The bytes that live now on the device that `measure` asks."""
    return _statistics(_device())["current"]


def _device():
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def _statistics(device):
    try:
        return tf.config.experimental.get_memory_info(device)
    except ValueError as error:
        raise RuntimeError(f"The allocator of {device} keeps no statistics in TensorFlow {tf.__version__}.") from error
