"""From a config to a trained network: the fields, their check, the model, its recipe and one run."""

import dataclasses
import os
import pathlib

import keras
import ml_collections

from densenets import data as data_module
from densenets import files, issue_36981, zoo
from densenets.dense_block import STRATEGIES
from densenets.model import DenseNet, DenseNetCifar
from densenets.optimizer import TorchSGD

MODES = {
    "auto": {"jit_compile": "auto"},  # Keras' choice: XLA on a GPU, the plain graph on a CPU
    "eager": {"run_eagerly": True, "jit_compile": False},
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
}
EXAMPLES = {"issue_36981": issue_36981.build}  # networks that a config can name and that are no published DenseNet
PRECISIONS = ("float32", "float64", "mixed_bfloat16", "mixed_float16")
DISTRIBUTIONS = ("none",)


# === Config ===


def default_config():
    """Every field of a config, with the papers' recipe for CIFAR (arXiv:1608.06993, section 4.2) where it has a say."""
    config = ml_collections.ConfigDict()

    # Data
    config.dataset = "cifar10"  # one of densenets.data.DATASETS
    config.data_dir = ""  # of tensorflow-datasets; by default $TFDS_DATA_DIR or ~/tensorflow_datasets
    config.fallback_dataset = ""  # what serves where `dataset` can neither be found nor downloaded; "" for an error
    config.augment = True  # zero padding, random crop, horizontal flip

    # Model: a name of densenets.list_models(), or the arguments of DenseNetCifar (with `depth`) or DenseNet (with `blocks`)
    config.model = ml_collections.ConfigDict(
        {"depth": 100, "growth_rate": 12, "bottleneck": True, "compression": 0.5, "dropout_rate": 0.0}
    )
    config.memory = "shared"  # the strategy, where there is nothing to compare
    config.compare = ("naive", "checkpoint", "shared")  # strategies to hold against the first of them; () to train with one
    config.accuracy_margin = 0.02  # the difference in test accuracy that still counts as equal, beside sampling error

    # Recipe
    config.seeds = (0,)
    config.optimizer = "sgd"  # the papers', by Torch's rule; or adam, which takes the learning rate alone
    config.epochs = 300
    config.steps_per_epoch = 0  # 0 for all of the training data
    config.batch_size = 64
    config.learning_rate = 0.1  # divided by 10 at each milestone
    config.milestones = (0.5, 0.75)  # as shares of all epochs
    config.momentum = 0.9
    config.weight_decay = 1e-4

    # Execution
    config.mode = "auto"  # auto, eager, graph, xla
    config.precision = "float32"  # or mixed_bfloat16, mixed_float16, float64
    config.distribute = "none"
    return config


def config_keys():
    """The names of all fields, those of the model with a dot."""
    config = default_config()
    return sorted([*config, *(f"model.{key}" for key in config.model)])


class ConfigError(ValueError):
    """A config that cannot be run; the message names the key, its value and what is allowed."""


def check_config(config):
    """Raises `ConfigError` for the first thing that cannot work, before any data is read.

    Builds the network once, since only its builder knows which arguments make one.
    """
    known = {*default_config(), "recompute"}
    for key in config:
        if key not in known:
            raise ConfigError(f"config.{key} is unknown; the keys are {', '.join(sorted(known))}.")
    for key, allowed in (
        ("fallback_dataset", ("", *data_module.DATASETS)),
        ("optimizer", OPTIMIZERS),
        ("dataset", data_module.DATASETS),
        ("memory", STRATEGIES),
        ("mode", MODES),
        ("precision", PRECISIONS),
        ("distribute", DISTRIBUTIONS),
    ):
        if config[key] not in allowed:
            raise ConfigError(f"config.{key} must be one of {', '.join(allowed)}; got {config[key]!r}.")
    for strategy in config.compare:
        if strategy not in STRATEGIES:
            raise ConfigError(f"config.compare must name strategies of {', '.join(STRATEGIES)}; got {strategy!r}.")
    if len(set(config.compare)) < len(config.compare):
        raise ConfigError(f"config.compare names a strategy twice: {tuple(config.compare)}.")
    for key in ("epochs", "batch_size"):
        if config[key] < 1:
            raise ConfigError(f"config.{key} must be at least 1; got {config[key]}.")
    for key in ("steps_per_epoch", "learning_rate", "momentum", "weight_decay", "accuracy_margin"):
        if config[key] < 0:
            raise ConfigError(f"config.{key} must not be negative; got {config[key]}.")
    if not config.seeds or not all(isinstance(seed, int) and seed >= 0 for seed in config.seeds):
        raise ConfigError(f"config.seeds must be one or more whole numbers, none negative; got {config.seeds}.")
    if not all(0 < share < 1 for share in config.milestones):
        raise ConfigError(f"config.milestones must be shares between 0 and 1; got {config.milestones}.")
    try:
        build_model(config, config.memory)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.model does not make a network: {error}") from error


def strategies(config):
    """The strategies that a config runs, the reference first. A field `recompute`, where there is one, chooses one of two."""
    if "recompute" in config:
        return ("checkpoint" if config.recompute else "naive",)
    return tuple(config.compare) or (config.memory,)


# === Model and recipe ===


OPTIMIZERS = {
    "sgd": lambda rate, config: TorchSGD(rate, momentum=config.momentum, weight_decay=config.weight_decay),
    "adam": lambda rate, config: keras.optimizers.Adam(rate),
}


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
        return example(**arguments) if example else zoo.create_model(config.model, **arguments)
    builder = DenseNet if "blocks" in config.model else DenseNetCifar
    return builder(**config.model.to_dict(), **arguments)


def make_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compile_model(model, config, steps_per_epoch):
    """Gives `model` the recipe of a config: optimizer, schedule, loss and accuracy."""
    total = config.epochs * steps_per_epoch
    boundaries = sorted(int(share * total) for share in config.milestones)
    values = [config.learning_rate / 10**i for i in range(len(boundaries) + 1)]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, values) if boundaries else values[0]
    optimizer = OPTIMIZERS[config.optimizer](schedule, config)
    model.compile(optimizer=optimizer, loss=make_loss(), metrics=["accuracy"], **MODES[config.mode])


def mode_of(model):
    """How a compiled model really runs: what `auto` came to."""
    return "eager" if model.run_eagerly else "xla" if model.jit_compile else "graph"


# === One run ===


@dataclasses.dataclass(frozen=True)
class Run:
    """What training came to: `history` holds a list of numbers by epoch for each metric."""

    history: dict
    accuracy: float


def steps_per_epoch(config, data):
    return config.steps_per_epoch or -(-data.num_train // config.batch_size)


def train(model, config, data, seed, workdir):
    """Trains a compiled model and leaves `history.csv` and `model.keras` in `workdir`.

    The order of the data and its augmentation depend on `seed` alone.
    """
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    train_batches = data.train_batches(config.batch_size, seed=seed, augment=config.augment)
    test_batches = data.test_batches(config.batch_size)
    history = model.fit(
        train_batches.repeat(),
        epochs=config.epochs,
        steps_per_epoch=steps_per_epoch(config, data),
        validation_data=test_batches,
        shuffle=False,  # the batches are shuffled already
        callbacks=[keras.callbacks.CSVLogger(workdir / "history.csv"), keras.callbacks.TerminateOnNaN()],
        verbose="auto" if os.isatty(1) else 2,
    )
    files.replace(workdir / "model.keras", model.save)
    return Run(history.history, history.history["val_accuracy"][-1])
