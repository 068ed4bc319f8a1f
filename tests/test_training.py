import math
import pathlib
import runpy

import keras
import ml_collections
import numpy as np
import pytest
import tensorflow as tf

from densenets import compare, training, zoo
from densenets import config as config_module

CONFIGS = sorted((pathlib.Path(__file__).parent.parent / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_makes_a_network_and_says_how_to_run_it(path):
    module = runpy.run_path(str(path))
    training.check_config(module["get_config"]())
    assert f"python train.py --config=configs/{path.name} --workdir=" in module["__doc__"]


def rows(path):
    """The network, what was chosen and the number of every cell of the tables in a config's docstring."""
    lines = [line.strip("| ").split("|") for line in runpy.run_path(str(path))["__doc__"].splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line] for line in lines if not line[0].startswith("--")]
    return [(row[0], key, cell) for row in table[1:] for key, cell in zip(table[0][1:], row[1:], strict=True) if cell != "-"]


ROWS = [(path, *row) for path in CONFIGS for row in rows(path)]


def test_every_published_row_has_its_config():
    names = {("cifar10", "True"): "C10+", ("cifar10", "False"): "C10", ("cifar100", "True"): "C100+"}
    names |= {("cifar100", "False"): "C100", ("svhn", "False"): "SVHN", ("imagenet", "True"): "ImageNet top-1"}
    stated = {(name, names[path.stem, key.partition("=")[2]]): float(number) for path, name, key, number in ROWS}
    published = {(name, data): error for name in zoo.VARIANTS for data, error in zoo.published(name).errors.items()}
    assert stated == {key: error for key, error in published.items() if key[1] != "ImageNet top-5"}


@pytest.mark.parametrize(("path", "name", "key", "number"), ROWS, ids=lambda v: getattr(v, "stem", v))
def test_the_variant_of_a_row_is_the_run_whose_number_it_states(path, name, key, number):
    get_config = runpy.run_path(str(path))["get_config"]
    config = get_config(f"{name},{key}" if path.stem.startswith("cifar") else name)
    found = compare._published(config)
    assert found["model"] == name
    assert found["error"] == float(number)
    assert config.model.dropout_rate == (0.0 if config.augment else 0.2)  # section 4.2
    assert config.epochs == {"cifar10": 300, "cifar100": 300, "svhn": 40, "imagenet": 90}[path.stem]
    assert config.batch_size == (256 if path.stem == "imagenet" else 64)


def test_a_wrong_variant_is_told():
    get_config = runpy.run_path(str(CONFIGS[0]))["get_config"]
    with pytest.raises(config_module.ConfigError, match=r"densenet_bc_100_12.*got 'densenet_bc_100'"):
        get_config("densenet_bc_100")
    with pytest.raises(config_module.ConfigError, match="This config takes model, augment; got 'depth=40'"):
        get_config("densenet_bc_100_12,depth=40")
    with pytest.raises(config_module.ConfigError, match="'augment=no' is no value for augment, which is True by default"):
        get_config("augment=no")


@pytest.fixture
def config():
    config = config_module.default_config()
    config.dataset = "digits"
    config.model.depth = 10
    return config


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dataset", "mnist", "config.dataset must be one of digits, .*; got 'mnist'"),
        ("memory", "big", "config.memory must be one of naive, checkpoint, shared; got 'big'"),
        ("mode", "jit", "config.mode must be one of auto, eager, graph, xla; got 'jit'"),
        ("precision", "float8", "config.precision must be one of .*; got 'float8'"),
        ("distribute", "tpu", "config.distribute must be one of none, mirrored, multi_worker; got 'tpu'"),
        ("schedule", "linear", "config.schedule must be one of steps, cosine; got 'linear'"),
        ("seeds", (1, 1), "config.seeds names a seed twice"),
        ("compare", ("naive", "big"), "config.compare must name strategies of naive, checkpoint, shared; got 'big'"),
        ("compare", ("naive", "naive"), "config.compare names a strategy twice"),
        ("epochs", 0, "config.epochs must be at least 1; got 0"),
        ("batch_size", -3, "config.batch_size must be at least 1; got -3"),
        ("learning_rate", -0.1, "config.learning_rate must not be negative; got -0.1"),
        ("seeds", (), "config.seeds must be one or more whole numbers"),
        ("milestones", (0.5, 1.0), "config.milestones must be shares between 0 and 1"),
        ("model.depth", 41, "config.model does not make a network: `depth` must be 6n \\+ 4 .* got 41"),
        ("model.growth_rate", 0, "config.model does not make a network: `growth_rate` must be a positive integer"),
    ],
)
def test_refuses_what_cannot_run(config, key, value, message):
    config.update_from_flattened_dict({key: value})
    with pytest.raises(config_module.ConfigError, match=message):
        training.check_config(config)


def test_refuses_unknown_keys_and_model_names(config):
    unknown = ml_collections.ConfigDict(config.to_dict() | {"batchsize": 3})
    with pytest.raises(config_module.ConfigError, match="config.batchsize is unknown; the keys are accuracy_margin, augment"):
        training.check_config(unknown)
    with config.ignore_type():
        config.model = "densenet_bc_100"
    with pytest.raises(config_module.ConfigError, match="densenet_bc_100_12"):
        training.check_config(config)


@pytest.mark.parametrize(
    "model",
    ["densenet_bc_100_12", {"depth": 10, "growth_rate": 4}, {"blocks": (1, 2), "growth_rate": 4, "stem": "cifar"}],
)
def test_model_is_a_name_or_a_builders_arguments(config, model):
    with config.ignore_type():
        config.model = ml_collections.ConfigDict(model) if isinstance(model, dict) else model
    training.check_config(config)
    assert training.build_model(config, "naive").output_shape == (None, 10)


def test_learning_rate_falls_by_ten_with_the_first_step_of_each_milestone(config):
    config.epochs = 8
    schedule = training.make_schedule(config, steps_per_epoch=10)
    rates = [float(schedule(step)) for step in (0, 39, 40, 59, 60, 80)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_the_cosine_schedule_falls_to_nothing_by_step(config):
    config.epochs, config.schedule = 8, "cosine"
    schedule = training.make_schedule(config, steps_per_epoch=10)
    for step in (0, 20, 40, 60, 80):
        assert float(schedule(step)) == pytest.approx(0.05 * (1 + math.cos(math.pi * step / 80)), abs=1e-8)


def test_the_weights_of_the_recipe(config):
    """He initialisation by fan-out, batch norms by the paper's constants, decay on every trainable weight."""
    config.model.depth, config.model.growth_rate = 40, 24
    model = training.build_model(config, "naive")
    training.compile_model(model, config, 1)
    kernels = [v for v in model.trainable_variables if "conv" in v.path and v.ndim == 4]
    for kernel in kernels:
        fan_out = kernel.shape[0] * kernel.shape[1] * kernel.shape[3]
        assert np.std(kernel.numpy()) == pytest.approx(math.sqrt(2 / fan_out), rel=0.15)
    norms = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    assert len(norms) == 2 * 18 + 3
    assert {(norm.epsilon, norm.momentum) for norm in norms} == {(1e-5, 0.9)}
    before = [v.numpy() for v in model.trainable_variables]
    model.optimizer.apply([tf.zeros(v.shape) for v in model.trainable_variables], model.trainable_variables)
    for variable, value in zip(model.trainable_variables, before, strict=True):  # v = 1e-4 w; w - 0.1 (1 + 0.9) v
        np.testing.assert_allclose(variable.numpy(), value * (1 - 0.1 * 1.9 * 1e-4), rtol=1e-6, atol=1e-12)


def test_a_seed_gives_every_strategy_the_same_weights(config):
    naive, checkpoint, other = (training.build_model(config, *a) for a in (("naive", 1), ("checkpoint", 1), ("naive", 2)))
    assert all((a == b).all() for a, b in zip(naive.get_weights(), checkpoint.get_weights(), strict=True))
    assert not all((a == b).all() for a, b in zip(naive.get_weights(), other.get_weights(), strict=True))
