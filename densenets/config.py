"""What a training run can be told: the fields of a config, and how a config file chooses a network."""

import ast

import ml_collections

from densenets import data, memory, zoo
from densenets.dense_block import STRATEGIES

MODES = ("auto", "eager", "graph", "xla")
OPTIMIZERS = ("sgd", "adam")
SCHEDULES = ("steps", "cosine")
PRECISIONS = ("float32", "float64", "mixed_bfloat16", "mixed_float16")
DISTRIBUTIONS = ("none", "mirrored", "multi_worker")


class ConfigError(ValueError):
    """A config that cannot be run; the message names the key, its value and what is allowed."""


# === Fields ===


def default_config():
    """Every field of a config, with the papers' recipe for CIFAR (arXiv:1608.06993, section 4.2) where it has a say."""
    config = ml_collections.ConfigDict()

    # Data
    config.dataset = "cifar10"  # one of densenets.data.DATASETS
    config.data_dir = ""  # of tensorflow-datasets; by default $TFDS_DATA_DIR or ~/tensorflow_datasets
    config.fallback_dataset = ""  # what serves where `dataset` can neither be found nor downloaded; "" for an error
    config.augment = True  # zero padding, random crop, horizontal flip; on ImageNet that of fb.resnet.torch

    # Model: a name of densenets.list_models(), or the arguments of DenseNetCifar (with `depth`) or DenseNet (with `blocks`)
    config.model = ml_collections.ConfigDict(
        {"depth": 100, "growth_rate": 12, "bottleneck": True, "compression": 0.5, "dropout_rate": 0.0}
    )
    config.memory = "shared"  # the strategy, where there is nothing to compare
    config.compare = ("naive", "checkpoint", "shared")  # strategies to hold against the first of them; () to train with one
    config.accuracy_margin = 0.02  # the difference in test accuracy that still counts as equal

    # Recipe
    config.seeds = (0,)
    config.optimizer = "sgd"  # the papers', by Torch's rule; or adam, which takes the learning rate alone
    config.epochs = 300
    config.steps_per_epoch = 0  # 0 for all of the training data
    config.batch_size = 64  # of all devices together
    config.learning_rate = 0.1
    config.schedule = "steps"  # divided by 10 at each milestone; or cosine, down to zero
    config.milestones = (0.5, 0.75)  # as shares of all epochs
    config.momentum = 0.9
    config.weight_decay = 1e-4

    # Execution
    config.mode = "auto"  # auto, eager, graph, xla
    config.precision = "float32"  # or mixed_bfloat16, mixed_float16, float64
    config.distribute = "none"  # mirrored: all GPUs of this machine; multi_worker: the machines that TF_CONFIG names
    config.memory_budget = ""  # such as "12GiB": warns of steps that take more; "" for all of the device, "off" for no warning
    return config


def config_keys():
    """The names of all fields, those of the model with a dot."""
    config = default_config()
    return sorted([*config, *(f"model.{key}" for key in [*config.model, "blocks", "stem"])])


# === A config file's argument ===


def parse_variant(text, **defaults):
    """What follows a config file's name: `cifar10.py:densenet_bc_190_40,augment=False`.

    Args:
        text: a name of `densenets.list_models()`, which is `model=name`, and `key=value` pairs, by commas; or `None`.
        **defaults: the keys that the file knows, with their values.

    Returns:
        A `ConfigDict` of the defaults with what `text` sets.

    Raises:
        ConfigError: for what the file does not know.
    """
    chosen = ml_collections.ConfigDict(defaults)
    for part in filter(None, (text or "").split(",")):
        key, _, value = part.rpartition("=")
        key = key or "model"
        if key not in chosen:
            raise ConfigError(f"This config takes {', '.join(defaults)}; got {part!r}.")
        try:
            chosen[key] = value if isinstance(chosen[key], str) else ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError) as error:
            raise ConfigError(f"{part!r} is no value for {key}, which is {chosen[key]!r} by default.") from error
    return chosen


def model_arguments(name, augment):
    """The arguments of the named network, as a part of a config that single fields can be set in.

    Without augmentation there is dropout of 0.2 (arXiv:1608.06993, section 4.2).

    Raises:
        ConfigError: for an unknown name, with the nearest ones.
    """
    try:
        arguments = zoo.arguments(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    defaults = {"bottleneck": True, "compression": 0.5, "dropout_rate": 0.0 if augment else 0.2}
    return ml_collections.ConfigDict(defaults | arguments)


# === Checking ===


def check_values(config):
    """Raises `ConfigError` for the first field whose value alone cannot work."""
    known = {*default_config(), "recompute"}
    for key in config:
        if key not in known:
            raise ConfigError(f"config.{key} is unknown; the keys are {', '.join(sorted(known))}.")
    for key, allowed in (
        ("fallback_dataset", ("", *data.DATASETS)),
        ("optimizer", OPTIMIZERS),
        ("schedule", SCHEDULES),
        ("dataset", data.DATASETS),
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
    if config.memory_budget not in ("", "off"):
        try:
            memory.parse_bytes(config.memory_budget)
        except ValueError as error:
            allowed = "a size such as '12GiB', '' for all of the device, or 'off'"
            raise ConfigError(f"config.memory_budget must be {allowed}; got {config.memory_budget!r}.") from error
    if not config.seeds or not all(isinstance(seed, int) and seed >= 0 for seed in config.seeds):
        raise ConfigError(f"config.seeds must be one or more whole numbers, none negative; got {config.seeds}.")
    if len(set(config.seeds)) < len(config.seeds):
        raise ConfigError(f"config.seeds names a seed twice: {tuple(config.seeds)}.")
    if not all(0 < share < 1 for share in config.milestones):
        raise ConfigError(f"config.milestones must be shares between 0 and 1; got {config.milestones}.")
    if config.distribute != "none" and config.mode not in ("auto", "graph"):
        raise ConfigError(f"config.mode must be auto or graph with config.distribute={config.distribute}; got {config.mode!r}.")


def strategies(config):
    """The strategies that a config runs, the reference first. A field `recompute`, where there is one, chooses one of two."""
    if "recompute" in config:
        return ("checkpoint" if config.recompute else "naive",)
    return tuple(config.compare) or (config.memory,)


def differences(config, other):
    """Where two configs, as dictionaries, differ: a line for each field, but `memory_budget`, which changes no result."""
    flat = [_flat({key: value for key, value in c.items() if key != "memory_budget"}) for c in (config, other)]
    keys = sorted({*flat[0], *flat[1]})
    absent = "absent"
    return [
        f"{k}: {flat[0].get(k, absent)!r}, was {flat[1].get(k, absent)!r}" for k in keys if flat[0].get(k) != flat[1].get(k)
    ]


def _flat(values, prefix=""):
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = list(value) if isinstance(value, tuple) else value  # as JSON has it
    return found
