"""The strategies side by side, on one machine, from one config: are they the same, and what does each cost?

In this order, so that what can fail fails early:

1. parity: the gradients and the moving averages of one step in float64, against the first strategy's;
2. cost: the peak memory of a training step, and step times taken in turns, since a machine's speed drifts;
3. training: each strategy from the same weights on the same batches, for every seed.
"""

import contextlib
import copy
import dataclasses
import math
import os
import platform
import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from densenets import data as data_module
from densenets import memory, report, training

GRADIENT_TOLERANCE = 1e-10  # relative, in float64: rounding of two orders of summation stays far below it
PARITY_BATCH = 16  # images; batch statistics of more are no more exact
TIMED_STEPS = 11


class ParityError(RuntimeError):
    """A strategy so wrong that there is nothing to compare."""


def run(config, workdir):
    """Compares the strategies of a config and writes the report into `workdir`.

    The report is written anew after every part, so that an interrupted comparison leaves what it has found.

    Returns:
        The report, as `report.json` holds it.

    Raises:
        training.ConfigError, data.DataNotFoundError, OSError: before any work is done.
        ParityError: for a strategy that leaves out a gradient.
    """
    training.check_config(config)
    if config.mode == "xla":
        memory.watch_xla()
    workdir = report.make_workdir(workdir)
    config, data = _load(config)
    strategies = training.strategies(config)
    result = {
        "status": "running",
        "config": config.to_dict(),
        "environment": _environment(data),
        "parity": None,
        "runs": [],
    }
    try:
        keras.config.set_dtype_policy(config.precision)
        if len(strategies) > 1:
            result["parity"] = _gradient_parity(config, strategies, data)
            report.write(result, workdir)
        contenders = [_Contender(config, strategy, data) for strategy in strategies]
        _time_in_turns(contenders)
        for seed in config.seeds:
            for contender in contenders:
                logging.info("training %s, seed %d", contender.memory, seed)
                contender.restart(config, seed)
                directory = workdir / f"{contender.memory}-seed{seed}"
                trained = training.train(contender.model, config, data, seed, directory)
                result["runs"].append(contender.row(seed, trained))
                report.write(result, workdir)
        if len(strategies) > 1:
            result["parity"] |= _accuracy_parity(config, result["runs"], strategies, data.num_test)
            result["parity"]["passed"] = result["parity"]["gradients_passed"] and result["parity"]["accuracy_passed"]
        result["status"] = "complete"
    except KeyboardInterrupt:
        result["status"] = "interrupted"
        raise
    except Exception:
        result["status"] = "failed"
        raise
    finally:
        report.write(result, workdir)
    return result


def _load(config):
    """The data set of a config, or its fallback, and the config that names the one that was found."""
    try:
        return config, data_module.load(config.dataset, config.data_dir or None)
    except data_module.DataNotFoundError as error:
        if not config.fallback_dataset:
            raise
        logging.warning("%s Instead %s serves.", error, config.fallback_dataset)
        data = data_module.load(config.fallback_dataset, config.data_dir or None)
        source = f"{data.source}, since {config.dataset} was neither found nor could be downloaded"
        config = copy.deepcopy(config)
        config.dataset = data.name
        return config, dataclasses.replace(data, source=source)


# === Parity ===


@contextlib.contextmanager
def _float64():
    policy, floatx = keras.config.dtype_policy(), keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def _gradient_parity(config, strategies, data):
    """The largest relative errors, over all weights, of each strategy's gradients and moving averages in float64."""
    images, labels = next(iter(data.train_batches(PARITY_BATCH, seed=config.seeds[0], augment=config.augment)))
    reference, errors = None, {}
    for strategy in strategies:
        with _float64():
            step = _float64_step(config, strategy, images, labels)
        if reference is None:
            reference = step
        else:
            errors[strategy] = [_largest_relative_error(ours, plain) for ours, plain in zip(step, reference, strict=True)]
    gradient_error = max(gradient for gradient, _ in errors.values())
    moving_error = max(moving for _, moving in errors.values())
    return {
        "max_gradient_error": gradient_error,
        "max_moving_average_error": moving_error,
        "gradients_passed": bool(gradient_error < GRADIENT_TOLERANCE and moving_error < GRADIENT_TOLERANCE),
        "gradients_judged": (
            f"one step in float64 on {PARITY_BATCH} images, against {strategies[0]!r}: for every weight the largest error over "
            f"the largest value, which counts as at least a thousandth of that of all weights; below {GRADIENT_TOLERANCE:g}"
        ),
        "passed": None,
    }


def _float64_step(config, strategy, images, labels):
    """The gradients of all trainable weights and, after the step, the other ones, from the initial weights."""
    model = training.build_model(config, strategy, config.seeds[0])
    training.compile_model(model, config, steps_per_epoch=1)
    loss = training.make_loss()

    def gradients(images, labels):
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        return tape.gradient(value, [v.value for v in model.trainable_variables])

    mode = training.mode_of(model)
    step = gradients if mode == "eager" else tf.function(gradients, jit_compile=mode == "xla")
    result = step(tf.cast(images, tf.float64), labels)
    missing = [v.path for v, g in zip(model.trainable_variables, result, strict=True) if g is None]
    if missing:
        raise ParityError(f"The strategy {strategy!r} gives no gradient to {', '.join(missing)}.")
    return [g.numpy() for g in result], [v.numpy() for v in model.non_trainable_variables if "float" in v.dtype]


def _largest_relative_error(ours, plain):
    """Over all arrays, the largest of max |ours - plain| / max |plain|; infinite where something is not finite.

    An array that is smaller than a thousandth of the largest is held against that: such as the gradient of a scale that a later
    batch norm undoes, which is a difference of large numbers and has their rounding.
    """
    sizes = [np.max(np.abs(b)) for b in plain]
    floor = max(1e-3 * max(sizes), np.finfo(np.float64).tiny)
    errors = [np.max(np.abs(a - b)) / max(size, floor) for a, b, size in zip(ours, plain, sizes, strict=True)]
    return float(max(errors)) if np.all(np.isfinite(errors)) else math.inf


def _accuracy_parity(config, runs, strategies, num_test):
    """Holds the accuracies, averaged over the seeds, against the first strategy's."""
    accuracy = {s: statistics.fmean(r["accuracy"] for r in runs if r["memory"] == s) for s in strategies}
    gap = max(abs(accuracy[s] - accuracy[strategies[0]]) for s in strategies)
    images = num_test * sum(r["memory"] == strategies[0] for r in runs)
    # Two successes and two failures are added, so that accuracies near 1 keep an error (Agresti and Caffo, 2000).
    share = (statistics.fmean(accuracy.values()) * 2 * images + 2) / (2 * images + 4)
    allowed = config.accuracy_margin + 3 * math.sqrt(2 * share * (1 - share) / images)
    return {
        "accuracy_gap": gap,
        "accuracy_gap_allowed": allowed,
        "accuracy_passed": bool(gap <= allowed),
        "accuracy_judged": (
            f"mean test accuracy against {strategies[0]!r}: at most {config.accuracy_margin:g} (config.accuracy_margin), for "
            "rounding makes any two trainings part ways, and three standard errors of the difference between two "
            f"accuracies over {images} test images"
        ),
    }


# === Cost ===


class _Contender:
    """One strategy's network, compiled once: measured when made, then timed, then trained for each seed."""

    def __init__(self, config, strategy, data):
        before = memory.allocated()
        self.memory = strategy
        self.model = training.build_model(config, strategy, config.seeds[0])
        training.compile_model(self.model, config, training.steps_per_epoch(config, data))
        self.model.optimizer.build(self.model.trainable_variables)
        self._fresh_optimizer = [v.numpy() for v in self.model.optimizer.variables]
        batches = data.train_batches(config.batch_size, seed=config.seeds[0], augment=config.augment)
        self._batch = iter(batches.take(1).cache().repeat())  # of the type that `fit` passes, so nothing is traced twice
        self.model.make_train_function()
        logging.info("measuring %s", strategy)
        measured = memory.measure(self.step)
        self.peak, self.baseline = measured.peak, measured.baseline - before
        self.seconds = []

    def step(self):
        return self.model.train_function(self._batch)

    def time(self):
        start = time.perf_counter()
        float(self.step()["loss"])  # waits for the device
        self.seconds.append(time.perf_counter() - start)

    def restart(self, config, seed):
        """The initial weights of `seed`, the same for every strategy, and an optimizer without a past."""
        initial = training.build_model(config, self.memory, seed)
        for variable, fresh in zip(self.model.variables, initial.variables, strict=True):
            variable.assign(fresh)
        for variable, value in zip(self.model.optimizer.variables, self._fresh_optimizer, strict=True):
            variable.assign(value)

    def row(self, seed, trained):
        return {
            "memory": self.memory,
            "seed": seed,
            "mode": training.mode_of(self.model),
            "accuracy": trained.accuracy,
            "peak_bytes": self.peak,
            "baseline_bytes": self.baseline,
            "step_seconds": statistics.median(self.seconds),
            "step_seconds_range": [min(self.seconds), max(self.seconds)],
            "params": self.model.count_params(),
            "history": trained.history,
        }


def _time_in_turns(contenders):
    for _ in range(TIMED_STEPS):
        for contender in contenders:
            contender.time()


# === Environment ===


def _environment(data):
    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.get_visible_devices("GPU")]
    return {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
        "device": ", ".join(str(gpu.get("device_name", "GPU")) for gpu in gpus)
        or f"CPU ({platform.machine()}, {os.cpu_count()} cores)",
        "dataset": data.name,
        "source": data.source,
        "train_images": data.num_train,
        "test_images": data.num_test,
    }
