"""The case of tensorflow #36981, in every mode."""

import functools
import gc

import keras
import pytest
import tensorflow as tf
from helpers import images, in_mode, peak_bytes, relative_error

from densenets import compare, data, issue_36981
from densenets import config as config_module


def step(model, x):
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = tf.reduce_sum(outputs[:, :3] ** 2)
    grads = tape.gradient(loss, [v.value for v in model.trainable_variables])
    assert all(grad is not None for grad in grads)
    return outputs, grads


def build(memory, size=28):
    keras.utils.set_random_seed(0)
    return issue_36981.build((size, size, 1), 10, memory)


def test_recompute_needs_at_most_half(mode):
    peaks = {}
    for memory in ("naive", "checkpoint"):
        gc.collect()
        peaks[memory] = peak_bytes(functools.partial(step, build(memory)), mode, images(64, 28, 1, "float32"))
    assert peaks["checkpoint"] <= 0.5 * peaks["naive"]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_every_variable_has_its_gradient(mode, float64):
    results = []
    for memory in ("naive", "checkpoint"):
        model = build(memory, 12)
        outputs, grads = in_mode(functools.partial(step, model), mode)(images(4, 12, 1))
        results.append((outputs, grads, model.get_weights()))
    assert relative_error(*results) < 1e-10


def test_bundled_data_serves_where_fashion_mnist_cannot_be_had(monkeypatch, tmp_path):
    def load(name, data_dir):
        if name == "fashion_mnist":
            raise data.DataError("no network")
        return data._load_digits()

    monkeypatch.setattr(data, "load", load)
    config = config_module.default_config()
    config.dataset, config.fallback_dataset, config.augment = "fashion_mnist", "digits", False
    config.recompute = True
    config.epochs = config.steps_per_epoch = 1
    with config.ignore_type():
        config.model = "issue_36981"
    result = compare.run(config, tmp_path)
    assert [run["memory"] for run in result["runs"]] == ["checkpoint"]
    assert "since fashion_mnist was neither found nor could be downloaded" in (tmp_path / "report.md").read_text()
    assert config.dataset == "fashion_mnist"  # the caller's config is untouched
