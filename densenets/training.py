"""From a config to a trained network: the model, its recipe and one run."""

import csv
import dataclasses
import pathlib

import keras
from absl import logging

from densenets import callbacks, devices, files, issue_36981, zoo
from densenets import config as config_module
from densenets import data as data_module
from densenets.config import ConfigError
from densenets.loop import DivergedError
from densenets.model import DenseNet, DenseNetCifar
from densenets.optimizer import TorchSGD

MODES = {
    "auto": {"jit_compile": "auto"},  # Keras' choice: XLA on a GPU, the plain graph on a CPU
    "eager": {"run_eagerly": True, "jit_compile": False},
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
}
EXAMPLES = {"issue_36981": issue_36981.build}  # networks that a config can name and that are no published DenseNet
OPTIMIZERS = {
    "sgd": lambda rate, config: TorchSGD(rate, momentum=config.momentum, weight_decay=config.weight_decay),
    "adam": lambda rate, config: keras.optimizers.Adam(rate),
}


def check_config(config, num_replicas=1):
    """Raises `ConfigError` for the first thing that cannot work on so many devices, before any data is read.

    Builds the network once, since only its builder knows which arguments make one, and returns it.
    """
    config_module.check_values(config)
    if config.batch_size % num_replicas:
        raise ConfigError(f"config.batch_size must be a multiple of the {num_replicas} devices; got {config.batch_size}.")
    try:
        return build_model(config, config.memory)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.model does not make a network: {error}") from error


# === Model and recipe ===


def build_model(config, memory, seed=0):
    """The network of a config, giving logits, with the initial weights of `seed`; the same for every strategy `memory`."""
    keras.utils.set_random_seed(seed)
    description = data_module.DATASETS[config.dataset]
    arguments = {
        "input_shape": description.shape,
        "classes": description.classes,
        "classifier_activation": None,
        "memory": memory,
    }
    if isinstance(config.model, str):
        example = EXAMPLES.get(config.model)
        return example(**arguments) if example else zoo.create_model(config.model, weights=None, **arguments)
    builder = DenseNet if "blocks" in config.model else DenseNetCifar
    return builder(**config.model.to_dict(), **arguments)


def make_loss():
    """The cross-entropy of logits, as a mean over the batch."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_schedule(config, steps_per_epoch):
    """The learning rate by step: a number, or a schedule of Keras."""
    total = config.epochs * steps_per_epoch
    if config.schedule == "cosine":
        return keras.optimizers.schedules.CosineDecay(config.learning_rate, total)
    starts = sorted(int(share * total) for share in config.milestones)
    values = [config.learning_rate / 10**i for i in range(len(starts) + 1)]
    # Keras' boundaries are the last steps of a rate, counted from 0.
    boundaries = [start - 1 for start in starts]
    return keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, values) if boundaries else values[0]


def compile_model(model, config, steps_per_epoch):
    """Gives `model` the recipe of a config: optimizer, schedule, loss and accuracy."""
    optimizer = OPTIMIZERS[config.optimizer](make_schedule(config, steps_per_epoch), config)
    mode = "graph" if config.distribute != "none" else config.mode  # XLA knows no sums over devices
    model.compile(optimizer=optimizer, loss=make_loss(), metrics=["accuracy"], **MODES[mode])


def mode_of(model):
    """How a compiled model really runs: what `auto` came to."""
    return "eager" if model.run_eagerly else "xla" if model.jit_compile else "graph"


def steps_per_epoch(config, data, num_replicas=1):
    """The steps of an epoch: those that a config sets, or all of the data."""
    return config.steps_per_epoch or data.num_steps(config.batch_size, num_replicas)


# === One run ===


@dataclasses.dataclass(frozen=True)
class Run:
    """What training came to: `history` holds a list of numbers by epoch for each metric."""

    history: dict
    accuracy: float


def train_batches(config, data, strategy, seed, start=0):
    """The batches of a config from step `start` on, endlessly, for the devices of `strategy`."""
    num_steps = data.num_steps(config.batch_size, strategy.num_replicas_in_sync)
    epoch, skip = divmod(start, num_steps)
    while True:

        def make(share, epoch=epoch, skip=skip):
            options = {"seed": seed, "epoch": epoch, "augment": config.augment, "skip": skip}
            return data.train_epoch(config.batch_size, share=share, **options)

        yield from devices.spread(strategy, make)
        epoch, skip = epoch + 1, 0


def train(loop, config, data, seed, workdir):
    """Trains the compiled model of `loop` and leaves in `workdir`: history.csv, model.keras and what TensorBoard shows.

    Goes on where an earlier call was ended. The order of the data and its augmentation depend on `seed` alone.

    Raises:
        DivergedError: where the loss is not finite, with the likely reasons.
        Others as `Loop.fit`.
    """
    workdir = pathlib.Path(workdir)
    chief = devices.is_chief(loop.strategy)
    watchers = []
    if chief:
        workdir.mkdir(parents=True, exist_ok=True)
        some = next(iter(data.train_epoch(8, seed=seed, augment=config.augment)))[0]
        watchers = [
            callbacks.Progress(config.batch_size, logging.info),
            callbacks.Summaries(workdir / "tensorboard", some),
            keras.callbacks.LambdaCallback(
                # The loop's history holds the epochs before an interruption too, each once.
                on_epoch_end=lambda *_: files.replace(workdir / "history.csv", lambda path: _write_csv(loop.history, path))
            ),
        ]
    test_batches = devices.spread(loop.strategy, lambda share: data.test_batches(config.batch_size, share))
    try:
        history = loop.fit(
            lambda step: train_batches(config, data, loop.strategy, seed, step),
            epochs=config.epochs,
            steps_per_epoch=steps_per_epoch(config, data, loop.num_replicas),
            evaluate=lambda loop: loop.evaluate(test_batches),
            checkpoint=workdir / "checkpoint.npz",
            callbacks=watchers,
        )
    except DivergedError as error:
        raise DivergedError(f"{error}. {_reasons(config, workdir)}") from error
    if chief:
        files.replace(workdir / "model.keras", loop.model.save)
    return Run(history, history["val_accuracy"][-1])


def _write_csv(history, path):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["epoch", *history])
        writer.writerows([epoch, *row] for epoch, row in enumerate(zip(*history.values(), strict=True), start=1))


def _reasons(config, workdir):
    reasons = [f"the learning rate, {config.learning_rate:g} at the start for batches of {config.batch_size}, is too high"]
    if config.precision == "mixed_float16":
        reasons.append("float16 overflows (mixed_bfloat16 does not)")
    reasons.append("an image or a label of the data set is broken")
    saved = workdir / "checkpoint.npz"
    kept = f" {saved} is from before." if saved.exists() else ""
    return f"Likely, {'; or '.join(reasons)}.{kept}"
