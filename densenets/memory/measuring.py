"""Memory, measured: what a step needs, by the allocator of the device that runs it."""

import dataclasses
import functools
import os
import pathlib
import re
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one step needed, in bytes.

    Attributes:
        peak: the most that lived at once during the step, above `baseline`.
        baseline: what lives between steps: weights, optimizer slots, data held on the device.
        device: the device whose allocator was asked, such as `"GPU:0"`.
        compiled: what XLA states that the step uses in all, its inputs included, where it was compiled in this measurement
            after `watch_xla`; else `None`.
    """

    peak: int
    baseline: int
    device: str
    compiled: int | None = None


def measure(step: Callable, *args: Any) -> Measurement:
    """Runs `step(*args)` twice, first to trace and compile it, and measures the second run.

    The figures are the allocator's own, so they hold in eager execution, in graphs and in XLA, and repeat. They contain
    what TensorFlow allocates, its padding included, and on a GPU what cuDNN takes as workspace, which TensorFlow allocates for
    it. They do not contain the program's code, the CUDA context, what libraries take elsewhere, or fragmentation: free memory
    in pieces too small to serve, for which a device can give out before the peak reaches its size.

    On a CPU start the program with `TF_CPU_ALLOCATOR_USE_BFC=1` in the environment: TensorFlow then uses the allocator that
    GPUs use; without it sizes are rounded up to powers of two.

    An allocator whose memory is in pieces, as in a process that has done much else, may hand out a free piece up to twice as
    large as asked for, and counts it whole: where single tensors matter, measure in a fresh process.

    XLA takes all that a step needs as one piece, which the allocator may round up by as much as 128 MiB. After `watch_xla`
    the compiler's own total, which contains the step's inputs too, is the peak wherever it is smaller.

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
    compiled_before = _compiled_totals()
    step(*args)
    _wait()
    compiled = [total for path, total in _compiled_totals().items() if path not in compiled_before]
    baseline = _statistics(device)["current"]
    tf.config.experimental.reset_memory_stats(device)
    results = step(*args)
    _wait()
    peak = _statistics(device)["peak"]
    del results
    total = sum(compiled) if compiled else None
    return Measurement(peak - baseline if total is None else min(peak - baseline, total), baseline, device, total)


def _wait():
    """Until every device has done what it was given. (A session of TensorFlow 1 waits by itself.)"""
    if not tf.executing_eagerly():
        return
    try:
        tf.test.experimental.sync_devices()
    except tf.errors.InternalError:  # where several processes train together, TensorFlow knows no way to ask all devices
        with tf.device(_device()):
            tf.zeros([]).numpy()  # comes behind what the device was given before


@functools.cache
def watch_xla():
    """Makes XLA write down what it allocates for Keras' training steps, for `measure` to read.

    Call it before anything is compiled in the process: XLA reads its flags (`XLA_FLAGS`) once. Flags that already make it
    write elsewhere are left alone.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "--xla_dump_to" in flags:
        return None
    directory = tempfile.TemporaryDirectory(prefix="densenets-xla-")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_dump_to={directory.name} --xla_dump_hlo_module_re=.*one_step_on_data.*"
    return directory  # lives, in the cache, as long as the process


def _compiled_totals():
    """The bytes that each compiled training step uses in all, by the path of XLA's report of it."""
    if not watch_xla.cache_info().currsize or watch_xla() is None:
        return {}
    reports = pathlib.Path(watch_xla().name).glob("*memory-usage-report.txt")
    return {path: int(re.search(r"Total bytes used: (\d+)", path.read_text())[1]) for path in reports}


def allocated() -> int:
    """The bytes that live now on the device that `measure` asks."""
    return _statistics(_device())["current"]


def allocated_peak() -> int:
    """The most bytes that have lived on that device since the last measurement."""
    return _statistics(_device())["peak"]


def _device():
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def _statistics(device):
    try:
        return tf.config.experimental.get_memory_info(device)
    except ValueError as error:
        raise RuntimeError(f"The allocator of {device} keeps no statistics in TensorFlow {tf.__version__}.") from error
