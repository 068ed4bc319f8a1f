import json

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from densenets import compare, dense_block, report
from densenets import config as config_module
from densenets.recompute import recompute


@pytest.fixture
def config():
    config = config_module.default_config()
    config.dataset = "digits"
    config.augment = False
    config.model.depth = 10
    config.model.growth_rate = 4
    config.compare = ("naive", "checkpoint")
    config.epochs = 2
    config.steps_per_epoch = 3
    config.batch_size = 32
    config.accuracy_margin = 1.0  # three steps train nothing
    return config


def test_report_holds_runs_parity_and_environment(config, tmp_path, mode):
    config.mode = mode
    config.seeds = (0, 1)
    result = compare.run(config, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(result))
    assert result["status"] == "complete"
    assert [(run["memory"], run["seed"]) for run in result["runs"]] == [
        ("naive", 0), ("checkpoint", 0), ("naive", 1), ("checkpoint", 1),
    ]  # fmt: skip
    for run in result["runs"]:
        assert run["mode"] == mode
        assert 0 <= run["accuracy"] <= 1
        assert run["peak_bytes"] > 0
        assert run["baseline_bytes"] >= 4 * run["params"]
        assert run["step_seconds"] > 0
        assert len(run["history"]["loss"]) == 2
        directory = tmp_path / f"{run['memory']}-seed{run['seed']}"
        assert (directory / "history.csv").read_text().count("\n") == 3
        assert keras.models.load_model(directory / "model.keras").count_params() == run["params"]
        events = [e for path in directory.glob("tensorboard/events*") for e in tf.compat.v1.train.summary_iterator(str(path))]
        shown = {(value.tag, event.step) for event in events for value in event.summary.value}
        assert {("learning_rate", 1), ("val_accuracy", 2), ("images_per_second", 2)} <= shown
        assert any(tag.startswith("training images") for tag, _ in shown)
    parity = result["parity"]
    assert parity["passed"] is True
    assert parity["max_gradient_error"] < 1e-12
    assert parity["max_moving_average_error"] < 1e-12
    assert result["environment"]["test_images"] == 360
    page = (tmp_path / "report.md").read_text()
    assert "| checkpoint | 1 " in page
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("**/*partial*"))


def test_strategies_start_alike_and_see_the_same_batches(config, tmp_path):
    config.precision = "float64"
    config.compare = ("naive", "checkpoint", "shared")
    config.model.dropout_rate = 0.2
    naive, *others = compare.run(config, tmp_path)["runs"]
    # In float64 rounding has not grown to anything after six steps: the losses agree unless weights, batches or masks differ.
    assert [run["memory"] for run in others] == ["checkpoint", "shared"]
    for run in others:
        assert run["history"]["loss"] == pytest.approx(naive["history"]["loss"], rel=1e-8)


def wrong_gradient(dense_layers, x, training):
    """A strategy with the right outputs and an input gradient that is one in a million off."""

    @tf.custom_gradient
    def off(x):
        return tf.identity(x), lambda dy: dy * (1 + 1e-6)

    return dense_block.naive.naive(dense_layers, off(x), training)


def moving_twice(dense_layers, x, training):
    """What `tf.recompute_grad` does: the recomputation moves the moving averages again."""
    for dense_layer in dense_layers:
        step = tf.recompute_grad(lambda x, layer=dense_layer: layer.narrow(x, training=training))
        x = keras.ops.concatenate([x, dense_layer.grow(step(x), training=training)], axis=-1)
    return x


def no_gradient(dense_layers, x, training):
    step = recompute(lambda x: tf.stop_gradient(dense_layers[0].narrow(x, training=training)))
    new = dense_layers[0].grow(step(x), training=training)
    return keras.ops.concatenate([x, new], axis=-1)


@pytest.mark.parametrize("wrong", [wrong_gradient, moving_twice])
def test_a_wrong_backward_is_caught(config, tmp_path, monkeypatch, wrong):
    monkeypatch.setitem(dense_block.STRATEGIES, "checkpoint", wrong)
    result = compare.run(config, tmp_path)
    assert result["parity"]["gradients_passed"] is False
    assert result["parity"]["passed"] is False
    assert "Gradients: FAILED" in (tmp_path / "report.md").read_text()


def test_a_missing_gradient_is_caught(config, tmp_path, monkeypatch):
    monkeypatch.setitem(dense_block.STRATEGIES, "checkpoint", no_gradient)
    with pytest.raises(compare.ParityError, match="'checkpoint' gives no gradient to .*conv2/block1"):
        compare.run(config, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["status"] == "failed"


def judged(config, *accuracies, num_test=10_000):
    """The verdict on the accuracies of naive, checkpoint, ..., each a list by seed."""
    names = ("naive", "checkpoint", "shared")[: len(accuracies)]
    runs = [{"memory": n, "accuracy": a} for n, own in zip(names, accuracies, strict=True) for a in own]
    return compare._accuracy_parity(config, runs, names, num_test)


def test_worse_accuracy_is_caught_with_one_seed(config):
    config.accuracy_margin = 0.02
    parity = judged(config, [0.95], [0.90])
    assert parity["accuracy_gap"] == pytest.approx(0.05)
    # 0.02 and three standard errors of a difference: 3 * sqrt(2 * 0.925 * 0.075 / 10000)
    assert parity["accuracy_gap_allowed"] == pytest.approx(0.02 + 0.01118, abs=1e-4)
    assert parity["accuracy_passed"] is False
    assert judged(config, [0.95], [0.90], num_test=100)["accuracy_passed"] is True


def test_equivalence_is_the_two_one_sided_tests_of_a_paired_difference(config):
    config.accuracy_margin = 0.02
    naive, other = [0.90, 0.91, 0.93, 0.92], [0.905, 0.912, 0.926, 0.921]
    difference = np.subtract(other, naive)
    for margin, passed in ((0.02, True), (0.004, False)):
        config.accuracy_margin = margin
        parity = judged(config, naive, other)
        low, high = parity["accuracy_intervals"]["checkpoint"]
        half = scipy.stats.t.ppf(0.95, 3) * difference.std(ddof=1) / 2
        assert (low, high) == pytest.approx((difference.mean() - half, difference.mean() + half))
        tests = [
            scipy.stats.ttest_1samp(difference, -margin, alternative="greater").pvalue < 0.05,
            scipy.stats.ttest_1samp(difference, margin, alternative="less").pvalue < 0.05,
        ]
        assert parity["accuracy_passed"] is all(tests) is passed


def test_equivalence_is_not_shown_by_noise_or_by_a_gap(config):
    config.accuracy_margin = 0.02
    assert judged(config, [0.90, 0.91], [0.90, 0.91], [0.90, 0.91])["accuracy_passed"] is True
    assert judged(config, [0.90, 0.95], [0.95, 0.90], [0.93, 0.92])["accuracy_passed"] is False  # equal means, but noise
    assert judged(config, [0.90, 0.91], [0.90, 0.91], [0.87, 0.88])["accuracy_passed"] is False


def test_several_workdirs_make_one_table(config, tmp_path):
    config.mode = "eager"
    config.seeds = (0, 1)
    compare.run(config, tmp_path / "a")
    config.compare, config.memory = (), "naive"
    compare.run(config, tmp_path / "b")
    lines = report.summary([tmp_path / "a", tmp_path / "b"]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    found = [(row[0][-1], row[2], row[4]) for row in cells]
    assert found == [("a", "naive", "0, 1"), ("a", "checkpoint", "0, 1"), ("b", "naive", "0, 1")]
    with pytest.raises(FileNotFoundError, match="report.json"):
        report.summary([tmp_path / "c"])


def test_one_strategy_alone_is_trained_without_a_verdict(config, tmp_path):
    config.compare = ()
    config.memory = "checkpoint"
    result = compare.run(config, tmp_path)
    assert result["parity"] is None
    assert [run["memory"] for run in result["runs"]] == ["checkpoint"]
    assert "not judged" in (tmp_path / "report.md").read_text()
