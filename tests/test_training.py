import pathlib
import runpy

import ml_collections
import pytest

from densenets import training

CONFIGS = sorted((pathlib.Path(__file__).parent.parent / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_makes_a_network_and_says_how_to_run_it(path):
    module = runpy.run_path(str(path))
    training.check_config(module["get_config"]())
    assert f"python train.py --config=configs/{path.name} --workdir=" in module["__doc__"]


@pytest.fixture
def config():
    config = training.default_config()
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
        ("distribute", "mirrored", "config.distribute must be one of none; got 'mirrored'"),
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
    with pytest.raises(training.ConfigError, match=message):
        training.check_config(config)


def test_refuses_unknown_keys_and_model_names(config):
    unknown = ml_collections.ConfigDict(config.to_dict() | {"batchsize": 3})
    with pytest.raises(training.ConfigError, match="config.batchsize is unknown; the keys are accuracy_margin, augment"):
        training.check_config(unknown)
    with config.ignore_type():
        config.model = "densenet_bc_100"
    with pytest.raises(training.ConfigError, match="densenet_bc_100_12"):
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


def test_learning_rate_falls_by_ten_at_the_milestones(config):
    config.epochs = 8
    model = training.build_model(config, "naive")
    training.compile_model(model, config, steps_per_epoch=10)
    schedule = model.optimizer._learning_rate
    rates = [float(schedule(step)) for step in (0, 40, 41, 60, 61, 80)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_a_seed_gives_every_strategy_the_same_weights(config):
    naive, checkpoint, other = (training.build_model(config, *a) for a in (("naive", 1), ("checkpoint", 1), ("naive", 2)))
    assert all((a == b).all() for a, b in zip(naive.get_weights(), checkpoint.get_weights(), strict=True))
    assert not all((a == b).all() for a, b in zip(naive.get_weights(), other.get_weights(), strict=True))
