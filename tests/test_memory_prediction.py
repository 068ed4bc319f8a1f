import json
import subprocess
import sys

import keras
import matplotlib.figure
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import densenets
from densenets import benchmark_prediction, config, fitting, memory, training, zoo
from densenets.memory.__main__ import main as command
from densenets.memory.architecture import parts_from, parts_of
from densenets.memory.pictures import draw_scaling, draw_timeline
from densenets.memory.planning import HEADROOM, parse_bytes
from densenets.memory.prediction import predict_parts

GIB = 2**30


@pytest.mark.parametrize("name", ["densenet_40_12", "densenet_bc_100_12", "densenet_121", "densenet_161"])
def test_parts_of_a_built_network_are_those_of_its_arguments(name):
    model = zoo.create_model(name, dropout_rate=0.2)
    parts = parts_of(model)
    assert parts == parts_from(model.input_shape[1:3], dropout_rate=0.2, **zoo.arguments(name))
    assert sum(part.trained + part.state for part in parts) == model.count_params()


@pytest.mark.parametrize("strategy", ["naive", "checkpoint", "shared"])
def test_prediction_holds_against_a_measured_step(strategy):
    case = benchmark_prediction.case("40x12", 64, 32, memory=strategy)
    measured = benchmark_prediction.measure(case)["measured"]
    assert 0.93 * measured < benchmark_prediction.predict(case) < 1.2 * measured


def test_memory_is_linear_in_the_depth_when_shared_and_quadratic_when_not():
    def kept(depth, strategy):
        prediction = predict_parts(parts_from((32, 32), depth=depth, growth_rate=12), 16, strategy)
        return sum(prediction.kept_by_part.values())

    assert kept(400, "shared") / kept(200, "shared") < 2.1
    assert kept(400, "naive") / kept(200, "naive") > 3.2


def test_a_prediction_is_a_number_with_its_reasons():
    model = densenets.DenseNetCifar(22, 12)
    prediction = memory.predict(model, 8)
    assert sum(prediction.breakdown().values()) == pytest.approx(prediction, abs=4)
    assert prediction.peak.total == max(moment.total for moment in prediction.moments)
    assert set(prediction.kept_by_part) == {part.name for part in parts_of(model)}
    assert prediction.baseline < prediction


def test_the_way_is_the_models_own_by_default():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = densenets.DenseNetCifar(22, 12, memory="naive")
    assert memory.predict(model, 8) == memory.predict(model, 8, memory="naive", precision="mixed_bfloat16")
    assert memory.predict(model, 8) != memory.predict(model, 8, memory="shared")
    assert memory.predict(model, 8) != memory.predict(model, 8, precision="float32")


def test_frozen_features_keep_nothing():
    features = densenets.DenseNet121(weights=None, include_top=False, pooling="avg", input_shape=(64, 64, 3), memory="naive")
    model = keras.Sequential([features, keras.layers.Dense(5)])
    trained = memory.predict(model, 16)
    features.trainable = False
    frozen = memory.predict(model, 16)
    assert frozen.peak.kept < 2**20 < trained.peak.kept
    assert frozen < trained / 4


def test_open_sizes_must_be_given():
    model = densenets.DenseNet121(weights=None, include_top=False)
    with pytest.raises(ValueError, match="`image_size` must be given"):
        memory.predict(model, 4)
    assert memory.predict(model, 4, image_size=(64, 64)) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be a positive integer, got 0"),
        ({"memory": "share"}, "`memory` must be one of 'naive', 'checkpoint', 'shared'; got 'share'"),
        ({"mode": "eager"}, "`mode` must be one of 'graph', 'xla'"),
        ({"precision": "float16"}, "`precision` must be one of"),
        ({"optimizer": "lion"}, "`optimizer` must be one of"),
    ],
)
def test_what_cannot_be_predicted_is_told(arguments, message):
    with pytest.raises(ValueError, match=message):
        memory.predict(densenets.DenseNetCifar(10, 4), **({"batch_size": 1} | arguments))
    with pytest.raises(ValueError, match="`model` must be a built Functional"):
        memory.predict("densenet_121", 1)


# === Plans ===


@settings(max_examples=30, deadline=None)
@given(budget=st.floats(0.02, 64), mode=st.sampled_from(["graph", "xla"]), model=st.sampled_from(densenets.list_models()))
def test_the_largest_batch_fits_and_the_next_does_not(budget, mode, model):
    size = (224, 224) if "blocks" in zoo.arguments(model) else (32, 32)
    for fit in memory.plan(model, budget * GIB, mode=mode).fits:
        parts = parts_from(size, **zoo.arguments(model))
        if fit.largest_batch:
            assert predict_parts(parts, fit.largest_batch, fit.memory, mode) <= (1 - HEADROOM) * budget * GIB
        assert predict_parts(parts, fit.largest_batch + 1, fit.memory, mode) > (1 - HEADROOM) * budget * GIB - 1


def test_the_fastest_that_holds_a_batch():
    assert memory.plan("densenet_121", "16GiB", batch_size=256).fastest == "shared"
    assert memory.plan("densenet_121", "1GiB", batch_size=256).fastest is None
    # A shallow network on few pixels is faster in plain layers, as long as they fit.
    small = {"depth": 40, "growth_rate": 12}
    assert memory.plan(small, "4GiB", batch_size=16).fastest == "naive"
    assert memory.plan(small, "60MiB", batch_size=16).fastest == "shared"


def test_the_deepest_network_for_a_budget():
    depths = memory.deepest("1GiB", 64)
    assert depths["naive"] < depths["checkpoint"] < depths["shared"]
    for strategy, depth in depths.items():
        assert (depth - 4) % 6 == 0
        assert predict_parts(parts_from((32, 32), depth=depth, growth_rate=12), 64, strategy) <= (1 - HEADROOM) * GIB
        assert predict_parts(parts_from((32, 32), depth=depth + 6, growth_rate=12), 64, strategy) > (1 - HEADROOM) * GIB
    assert memory.deepest("1MiB", 64) == {"naive": None, "checkpoint": None, "shared": None}


@pytest.mark.parametrize(
    ("text", "size"), [("16GiB", 16 * GIB), ("500 MB", 500_000_000), ("1.5gib", 3 * GIB // 2), ("2e9", 2 * 10**9), (7, 7)]
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["densenet_121", "--budget=-1GiB"], "`budget` must be a positive number of bytes.*got '-1GiB'"),
        (["densenet_121", "--budget=16 parsecs"], "`budget` must be.*got '16 parsecs'"),
        (["densenet_122", "--budget=1GiB"], "such as densenet_121.*got 'densenet_122'"),
        (["densenet_121", "--budget=1GiB", "--image-size=16"], "`image_size` must be at least 32 by 32.*got \\(16, 16\\)"),
        (["densenet_121", "--budget=1GiB", "--image-size=-16"], "`image_size` must be a positive number of pixels"),
        (["densenet_121", "--budget=1GiB", "--batch-size=0"], "`batch_size` must be a positive integer, got 0"),
        (["--budget=1GiB"], "`--batch-size` must be given"),
        (["--budget=1GiB", "--batch-size=8", "--image-size=0"], "`image_size` must be a positive number of pixels.*got 0"),
        (["--budget=1GiB", "--batch-size=8", "--growth-rate=0"], "`growth_rate` must be a positive integer, got 0"),
    ],
    ids=str,
)
def test_the_command_tells_bad_input_in_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message) as told:
        command(arguments)
    assert "\n" not in told.value.code


def test_the_command_prints_a_table_or_json(capsys):
    command(["densenet_121", "--image-size=224", "--budget=16GiB", "--batch-size=256"])
    table = capsys.readouterr().out
    assert "| shared " in table
    assert "Fastest that holds a batch of 256: shared" in table
    command(["densenet_121", "--budget=16GiB", "--json"])
    assert [fit["memory"] for fit in json.loads(capsys.readouterr().out)["fits"]] == ["naive", "checkpoint", "shared"]
    command(["--budget=1GiB", "--batch-size=64", "--json"])
    assert json.loads(capsys.readouterr().out)["depths"] == memory.deepest("1GiB", 64)


def test_the_command_runs_as_it_is_written():
    line = [sys.executable, "-m", "densenets.memory", "densenet_40_12", "--budget=100MiB"]
    assert "| naive " in subprocess.run(line, capture_output=True, text=True, check=True).stdout


# === The warning of train.py ===


def _warnings(**changes):
    chosen = config.default_config()
    chosen.update(changes)
    return fitting.warnings(chosen, training.check_config(chosen), num_replicas=1)


def test_a_config_that_does_not_fit_is_told_what_would():
    [naive] = _warnings(memory_budget="2GiB")
    assert "memory='naive' on 64 images takes about 2." in naive
    assert "config.batch_size=" in naive
    assert "config.memory=shared" in naive
    assert "checkpoint" in naive


def test_a_config_that_fits_or_has_the_warning_off_says_nothing():
    assert _warnings(memory_budget="8GiB") == []
    assert _warnings(memory_budget="off", batch_size=10**6) == []
    assert _warnings(batch_size=10**6) != []


def test_a_budget_that_is_no_size_is_refused():
    with pytest.raises(config.ConfigError, match=r"config\.memory_budget must be.*got '12 parsecs'"):
        _warnings(memory_budget="12 parsecs")


# === Pictures ===


def test_the_exponent_of_a_power_law_is_found():
    axes = matplotlib.figure.Figure().subplots()
    depths = (10, 20, 40)
    laws = {"naive": [2**20 * n**2 for n in depths], "shared": [2**20 * n for n in depths]}
    assert draw_scaling(axes, "depth", depths, laws, laws) == pytest.approx({"naive": 2, "shared": 1})


def test_a_timeline_shows_every_moment():
    axes = matplotlib.figure.Figure().subplots()
    prediction = predict_parts(parts_from((32, 32), depth=22, growth_rate=12), 8)
    draw_timeline(axes, prediction)
    tops = [collection.get_paths()[0].vertices[:, 1].max() for collection in axes.collections]
    assert max(tops) == pytest.approx(prediction.peak.total / 2**20)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["conv2", "conv3", "conv4", "conv4", "conv3", "conv2"]
