"""The strategies side by side, on one machine, from one config: are they the same, and what does each cost?

In this order, so that what can fail fails early:

1. parity: the gradients and the moving averages of one step in float64, against the first strategy's;
2. cost: the peak memory of a training step, and step times taken in turns, since a machine's speed drifts;
3. training: each strategy from the same weights on the same batches, for every seed.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import os
import platform
import statistics
import time

import keras
import numpy as np
import scipy.stats
import tensorflow as tf
from absl import logging

from densenets import config as config_module
from densenets import data as data_module
from densenets import devices, fitting, memory, report, training, zoo
from densenets.loop import Loop, PreemptedError

GRADIENT_TOLERANCE = 1e-10  # relative, in float64: rounding of two orders of summation stays far below it
CONFIDENCE = 0.95  # of each of the two one-sided tests that accuracies are equal
PARITY_BATCH = 16  # images; batch statistics of more are no more exact
TIMED_STEPS = 11
LOST_WORKER = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError, tf.errors.InternalError)


class ParityError(RuntimeError):
    """A strategy so wrong that there is nothing to compare."""


class OutOfMemoryError(RuntimeError):
    """A step that needs more memory than its device has."""


def run(config, workdir):
    """Compares the strategies of a config and writes the report into `workdir`.

    The report is written anew after every part. A comparison that was ended goes on where it was when it is started again.

    Returns:
        The report, as `report.json` holds it.

    Raises:
        config.ConfigError, devices.DeviceError, data.DataError, OSError: before any work is done. A workdir of another config
            is refused.
        ParityError: for a strategy that leaves out a gradient.
        OutOfMemoryError, loop.DivergedError, loop.PreemptedError, checkpoints.CheckpointError: as they say.
    """
    config_module.check_values(config)
    if config.mode == "xla":
        memory.watch_xla()
    strategy = devices.make_strategy(config.distribute)
    network = training.check_config(config, strategy.num_replicas_in_sync)
    for warning in fitting.warnings(config, network, strategy.num_replicas_in_sync):
        logging.warning(warning)
    result = report.open_workdir(workdir, config.to_dict())
    devices.in_all_processes(strategy, 0)  # each has read what the chief is about to write
    keep = report.Report(result, workdir, writes=devices.is_chief(strategy))
    if result["status"] == "complete":
        logging.info("%s holds the complete report of this config", workdir)
        return result
    config, data = _load(config)
    result |= {"status": "running", "environment": _environment(data, strategy), "published": _published(config)}
    keep.write()
    try:
        keras.config.set_dtype_policy(config.precision)
        _compare(config, data, strategy, keep)
        result["status"] = "complete"
    except (KeyboardInterrupt, PreemptedError):
        result["status"] = "interrupted"
        raise
    except Exception:
        result["status"] = "failed"
        raise
    finally:
        keep.write()
    return result


def _compare(config, data, strategy, keep):
    """Fills in what the report lacks: the parity of gradients, the costs, a run for each strategy and seed, the verdict."""
    result, names = keep.result, config_module.strategies(config)
    if len(names) > 1 and result["parity"] is None:
        with _told_plainly(config, names[0], data):
            result["parity"] = _gradient_parity(config, names, data)
        keep.write()
    make = functools.cache(lambda name: _Contender(config, name, data, strategy))
    if not result["costs"]:
        _time_in_turns([make(name) for name in names])
        result["costs"] = {name: make(name).cost() for name in names}
        keep.write()
    done = {(run["memory"], run["seed"]) for run in result["runs"]}
    for seed in config.seeds:
        for name in names:
            if (name, seed) in done:
                continue
            logging.info("training %s, seed %d", name, seed)
            with _told_plainly(config, name, data):
                make(name).restart(config, seed)
                trained = training.train(make(name).loop, config, data, seed, keep.workdir / f"{name}-seed{seed}")
            row = {"memory": name, "seed": seed, "accuracy": trained.accuracy}
            result["runs"].append(row | result["costs"][name] | {"history": trained.history})
            keep.write()
    if len(names) > 1:
        result["parity"] |= _accuracy_parity(config, result["runs"], names, data.num_test)
        result["parity"]["passed"] = result["parity"]["gradients_passed"] and result["parity"]["accuracy_passed"]


@contextlib.contextmanager
def _told_plainly(config, name, data):
    """Turns what TensorFlow raises when memory, a worker or a file gives out into an error that says what to do."""
    try:
        yield
    except tf.errors.DataLossError as error:
        raise data_module.DataError(
            f"A file of {config.dataset!r} is broken: {error.message[:200]}. Prepare it anew."
        ) from error
    except tf.errors.ResourceExhaustedError as error:
        message, taken = " ".join(str(error).split())[:200], memory.allocated_peak()
    except LOST_WORKER as error:
        if config.distribute != "multi_worker":
            raise
        raise devices.DeviceError(
            f"Another worker has ended or cannot be reached. Start all again; they go on from the last checkpoint. TensorFlow "
            f"says: {' '.join(str(error).split())[:200]}"
        ) from error
    else:
        return
    # Outside of the handler: its error holds on to the tensors that took the memory.
    raise OutOfMemoryError(
        f"Out of memory: a step of memory={name!r} on {config.batch_size} images, with {taken / 2**20:.0f} MiB taken. "
        f"{_what_fits(config, name, data, taken)} TensorFlow says: {message}"
    )


def _what_fits(config, name, data, budget):
    """The batches that fit in `budget` bytes, by strategy, as steps on a few images tell: memory grows with their number."""
    found, most = [], config.batch_size
    for strategy in dict.fromkeys((name, "shared")):
        for small, large in ((most // 8, most // 4), (most // 64, most // 32)):  # the larger, the nearer
            try:
                at_small, at_large = (_whole_memory(config, strategy, data, max(1, size)) for size in (small, large))
            except tf.errors.ResourceExhaustedError:
                continue
            each = max(1.0, (at_large - at_small) / max(1, large - small))
            needed = at_large + each * (most - large)
            fitting = max(0, int((budget - at_large) / each) + large)
            found.append(
                f"config.memory={strategy} would take about {needed / 2**20:.0f} MiB; in what there was, "
                f"config.batch_size={fitting} would fit."
            )
            break
    return " ".join(found) or "Even a few images do not fit."


def _whole_memory(config, strategy, data, batch_size):
    """What weights, optimizer and a step on `batch_size` images take together, in bytes."""
    config = copy.deepcopy(config)
    config.batch_size = batch_size
    contender = _Contender(config, strategy, data, tf.distribute.get_strategy())
    measured = memory.measure(contender.step)
    return measured.baseline + measured.peak


def _load(config):
    """The data set of a config, or its fallback, and the config that names the one that was found."""
    try:
        return config, data_module.load(config.dataset, config.data_dir or None)
    except data_module.DataError as error:
        if not config.fallback_dataset:
            raise
        logging.warning("%s Instead %s serves.", error, config.fallback_dataset)
        data = data_module.load(config.fallback_dataset, config.data_dir or None)
        source = f"{data.source}, since {config.dataset} was neither found nor could be downloaded"
        config = copy.deepcopy(config)
        config.dataset = data.name
        return config, dataclasses.replace(data, source=source)


# What zoo.published calls the error on a data set, without and with augmentation.
PUBLISHED_ERRORS = {
    ("cifar10", False): "C10",
    ("cifar10", True): "C10+",
    ("cifar100", False): "C100",
    ("cifar100", True): "C100+",
    ("svhn_cropped", False): "SVHN",
    ("imagenet2012", True): "ImageNet top-1",
}


def _published(config):
    """What a paper states of this network on this data, for the report; `None` where none does."""
    if isinstance(config.model, str):
        name = config.model if config.model in zoo.VARIANTS else None
    else:
        name = zoo.identify(config.model.to_dict(), config.schedule)
    key = PUBLISHED_ERRORS.get((config.dataset, config.augment))
    published = zoo.published(name) if name else None
    if published is None or key not in published.errors:
        return None
    return {"model": name, "data": key, "error": published.errors[key], "source": published.source}


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
    images, labels = next(iter(data.train_epoch(PARITY_BATCH, seed=config.seeds[0], augment=config.augment)))
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
    """Holds the accuracies against the first strategy's: equivalence over the seeds, or with one seed the plain gap."""
    accuracy = np.array([[run["accuracy"] for run in runs if run["memory"] == name] for name in strategies])
    gaps = accuracy.mean(1)[1:] - accuracy.mean(1)[0]
    gap = float(np.max(np.abs(gaps)))
    if accuracy.shape[1] > 1:
        return {"accuracy_gap": gap} | _equivalence(config.accuracy_margin, accuracy, gaps, strategies)
    return {"accuracy_gap": gap} | _plain_gap(config.accuracy_margin, accuracy.mean(), gap, strategies[0], num_test)


def _equivalence(margin, accuracy, gaps, strategies):
    """Two one-sided tests (Schuirmann, 1987) on `accuracy` [strategies, seeds]: is each gap surely within the margin?

    A seed is a block of a randomised block design: its strategies share weights and batches. What strategies and seeds do not
    explain is the noise of training, by which rounding makes any two trainings part ways.
    """
    num_strategies, num_seeds = accuracy.shape
    freedom = (num_strategies - 1) * (num_seeds - 1)
    residual = accuracy - accuracy.mean(1, keepdims=True) - accuracy.mean(0, keepdims=True) + accuracy.mean()
    error = math.sqrt(2 * np.sum(residual**2) / freedom / num_seeds)
    half = float(scipy.stats.t.ppf(CONFIDENCE, freedom)) * error
    intervals = {name: [float(gap - half), float(gap + half)] for name, gap in zip(strategies[1:], gaps, strict=True)}
    return {
        "accuracy_gap_allowed": margin,
        "accuracy_intervals": intervals,
        "accuracy_passed": bool(all(-margin < low and high < margin for low, high in intervals.values())),
        "accuracy_judged": (
            f"two one-sided tests at {1 - CONFIDENCE:.0%} over {num_seeds} seeds, noise of training with {freedom} degrees of "
            f"freedom: the {2 * CONFIDENCE - 1:.0%} confidence interval of each difference to {strategies[0]!r} must be within "
            f"{margin:g} (config.accuracy_margin)"
        ),
    }


def _plain_gap(margin, accuracy, gap, reference, num_test):
    """Is `gap` within the margin and what two accuracies over so many images differ by chance?"""
    # Two successes and two failures are added, so that accuracies near 1 keep an error (Agresti and Caffo, 2000).
    share = (accuracy * 2 * num_test + 2) / (2 * num_test + 4)
    allowed = margin + 3 * math.sqrt(2 * share * (1 - share) / num_test)
    return {
        "accuracy_gap_allowed": allowed,
        "accuracy_passed": bool(gap <= allowed),
        "accuracy_judged": (
            f"one seed, which shows no noise of training: the gap to {reference!r} is at most {margin:g} "
            "(config.accuracy_margin) and three standard errors of the difference between two accuracies over "
            f"{num_test} test images; more seeds (config.seeds) test for equivalence"
        ),
    }


# === Cost ===


class _Contender:
    """One strategy's network, compiled once: measured and timed if need be, then trained for each seed."""

    def __init__(self, config, name, data, strategy):
        self.name, self.before = name, memory.allocated()
        with strategy.scope():
            self.model = training.build_model(config, name, config.seeds[0])
            training.compile_model(self.model, config, training.steps_per_epoch(config, data, strategy.num_replicas_in_sync))
        self.loop = Loop(self.model, strategy)
        self.fresh_optimizer = [v.numpy() for v in self.model.optimizer.variables]
        batch = next(training.train_batches(config, data, strategy, config.seeds[0]))
        self.step = functools.partial(self.loop.train_step, batch)
        self.told_plainly = functools.partial(_told_plainly, config, name, data)
        self.seconds = []

    def measure(self):
        logging.info("measuring %s", self.name)
        with self.told_plainly():
            self.measured = memory.measure(self.step)

    def time(self):
        start = time.perf_counter()
        float(self.step()[0])  # waits for the device
        self.seconds.append(time.perf_counter() - start)

    def cost(self):
        return {
            "mode": training.mode_of(self.model),
            "peak_bytes": self.measured.peak,
            "baseline_bytes": self.measured.baseline - self.before,
            "step_seconds": statistics.median(self.seconds),
            "step_seconds_range": [min(self.seconds), max(self.seconds)],
            "params": self.model.count_params(),
        }

    def restart(self, config, seed):
        """The initial weights of `seed`, the same for every strategy, and an optimizer without a past."""
        initial = training.build_model(config, self.name, seed)
        for variable, fresh in zip(self.model.variables, initial.variables, strict=True):
            variable.assign(fresh.numpy())
        for variable, value in zip(self.model.optimizer.variables, self.fresh_optimizer, strict=True):
            variable.assign(value)
        self.loop.restart()


def _time_in_turns(contenders):
    for contender in contenders:
        contender.measure()
    for _ in range(TIMED_STEPS):
        for contender in contenders:
            contender.time()


# === Environment ===


def _environment(data, strategy):
    gpus = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.get_visible_devices("GPU")]
    return {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "python": platform.python_version(),
        "device": ", ".join(str(gpu.get("device_name", "GPU")) for gpu in gpus)
        or f"CPU ({platform.machine()}, {os.cpu_count()} cores)",
        "replicas": strategy.num_replicas_in_sync,
        "dataset": data.name,
        "source": data.source,
        "train_images": data.num_train,
        "test_images": data.num_test,
    }
