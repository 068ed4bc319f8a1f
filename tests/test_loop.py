"""The training loop, held against Keras' own `fit`, and its ways to fail."""

import json
import os
import re
import resource
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import train

from densenets import compare, config, data, memory, training
from densenets.loop import DivergedError, Loop, PreemptedError


def classifier(mode):
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], **training.MODES[mode])
    return model


def test_curves_and_weights_are_those_of_fit(mode, float64):
    digits = data.load("digits")
    keras.utils.set_random_seed(1)
    ours, theirs = classifier(mode), classifier(mode)
    theirs.set_weights(ours.get_weights())
    steps = digits.num_steps(100)  # the last batch has 37 images

    def double(images, *rest):
        return tf.cast(images, tf.float64), *rest

    def batches(step):
        for epoch in range(2):
            yield from digits.train_epoch(100, epoch=epoch).map(double)

    test = digits.test_batches(100).map(double)
    history = Loop(ours).fit(batches, epochs=2, steps_per_epoch=steps, evaluate=lambda loop: loop.evaluate(test))
    for epoch in range(2):
        expected = theirs.fit(digits.train_epoch(100, epoch=epoch).map(double), validation_data=test, verbose=0, shuffle=False)
        for name in ("accuracy", "val_loss", "val_accuracy", "loss"):
            assert history[name][epoch] == pytest.approx(expected.history[name][0], rel=1e-6), name
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_keras_callbacks_run_on_it():
    digits = data.load("digits")
    seen = []

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append((epoch, sorted(logs)))), Stop()]
    loop = Loop(classifier("eager"))
    history = loop.fit(
        lambda step: iter(digits.train_epoch(64).repeat()),
        epochs=5,
        steps_per_epoch=3,
        evaluate=lambda loop: loop.evaluate(digits.test_batches(100)),
        callbacks=callbacks,
    )
    names = ["accuracy", "data_wait", "images_per_second", "learning_rate", "loss", "val_accuracy", "val_loss"]
    assert seen == [(0, names), (1, names)]
    assert len(history["loss"]) == 2


@pytest.mark.parametrize("told_at", [2, 4, 5, 8])
def test_told_to_end_at_any_step_it_goes_on_to_the_same_history(told_at, tmp_path):
    """The last step of an epoch and of the training among them."""
    digits = data.load("digits")
    keras.utils.set_random_seed(1)
    start = classifier("eager").get_weights()

    class Told(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if self.steps == told_at:
                os.kill(os.getpid(), signal.SIGTERM)

    def fit(*callbacks, checkpoint=None):
        model = classifier("eager")
        model.set_weights(start)
        return Loop(model).fit(
            lambda step: iter(digits.train_epoch(64).take(8).skip(step)),
            epochs=2,
            steps_per_epoch=4,
            evaluate=lambda loop: loop.evaluate(digits.test_batches(180)),
            callbacks=callbacks,
            checkpoint=checkpoint,
        )

    whole = fit()
    with pytest.raises(PreemptedError, match=f"saved at step {told_at}"):
        fit(Told(), checkpoint=tmp_path / "checkpoint.npz")
    again = fit(checkpoint=tmp_path / "checkpoint.npz")
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert again[name] == pytest.approx(whole[name], rel=1e-6)


def test_a_loss_that_is_no_number_stops_with_its_step_and_keeps_the_checkpoint_from_before(tmp_path):
    settings = config.default_config()
    settings.update_from_flattened_dict({"dataset": "digits", "model.depth": 10, "model.growth_rate": 4, "compare": ()})
    settings.update_from_flattened_dict({"mode": "eager", "epochs": 3, "steps_per_epoch": 4, "memory": "naive"})
    digits = data.load("digits")
    model = training.build_model(settings, "naive")
    training.compile_model(model, settings, 4)
    loop = Loop(model)

    def batches(step):
        for number, (images, labels) in enumerate(digits.train_epoch(32).repeat(), start=1):
            yield (images * np.nan if number == 7 else images), labels

    with pytest.raises(DivergedError, match="The loss is nan at step 7"):
        loop.fit(
            batches,
            epochs=3,
            steps_per_epoch=4,
            evaluate=lambda loop: {"accuracy": 0.0},
            checkpoint=tmp_path / "checkpoint.npz",
        )
    with np.load(tmp_path / "checkpoint.npz") as saved:
        assert json.loads(str(saved["progress"]))["step"] == 4
        assert all(np.all(np.isfinite(saved[name])) for name in saved.files if name != "progress")
    settings.learning_rate = 1e30
    with pytest.raises(DivergedError, match=r"at step \d+. Likely, the learning rate, 1e\+30 at the start .* is too high; or"):
        compare.run(settings, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "report.json").read_text())["status"] == "failed"


SMALL = [
    "--config=configs/quickstart.py",
    "--config.model.depth=10",
    "--config.epochs=1",
    "--config.steps_per_epoch=2",
    "--config.compare=()",
]


def test_out_of_memory_is_told_with_what_would_fit(tmp_path, monkeypatch):
    settings = config.default_config()
    settings.update_from_flattened_dict(
        {"dataset": "digits", "model.depth": 22, "compare": ("naive", "shared"), "augment": False}
    )
    settings.update_from_flattened_dict({"mode": "graph", "batch_size": 256, "epochs": 1})
    measure, taken = memory.measure, 30 * 2**20

    def exhausted(step):  # (TensorFlow's own failure on a CPU is at times a crash; on a GPU it is this error)
        if step.args[0][0].shape[0] == 256:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
        return measure(step)

    monkeypatch.setattr(memory, "measure", exhausted)
    monkeypatch.setattr(memory, "allocated_peak", lambda: taken)
    with pytest.raises(compare.OutOfMemoryError) as caught:
        compare.run(settings, tmp_path)
    message = str(caught.value)
    assert "Out of memory: a step of memory='naive' on 256 images, with 30 MiB taken." in message
    fits = re.findall(r"config.memory=(\w+) would take about (\d+) MiB; .*? config.batch_size=(\d+) would fit", message)
    assert [name for name, _, _ in fits] == ["naive", "shared"]
    assert int(fits[0][1]) > int(fits[1][1])
    assert int(fits[0][2]) < int(fits[1][2])


def test_what_fits_is_told_from_smaller_batches_that_do(monkeypatch):
    settings = config.default_config()
    settings.batch_size = 256
    each, fixed, mib = {"naive": 4, "shared": 1}, 10, 2**20

    def whole_memory(config, strategy, data, batch_size):
        if each[strategy] * batch_size > 100:  # more than there is
            raise tf.errors.ResourceExhaustedError(None, None, "OOM")
        return (fixed + each[strategy] * batch_size) * mib

    monkeypatch.setattr(compare, "_whole_memory", whole_memory)
    naive, shared = compare._what_fits(settings, "naive", None, 110 * mib).split("fit. ")
    assert naive == "config.memory=naive would take about 1034 MiB; in what there was, config.batch_size=25 would "
    assert shared == "config.memory=shared would take about 266 MiB; in what there was, config.batch_size=100 would fit."
    each["shared"] = 1000
    assert "config.batch_size=0 would" not in compare._what_fits(settings, "shared", None, 110 * mib)
    assert compare._what_fits(settings, "shared", None, 110 * mib) == "Even a few images do not fit."


def test_a_full_disk_is_told_and_leaves_no_half_file(tmp_path):
    def limit():  # no file above 100 KB: what a write to a full disk meets
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = train(f"--workdir={tmp_path}", *SMALL, before=limit)
    assert done.returncode == 1, done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("**/partial-*"))
    assert json.loads((tmp_path / "report.json").read_text())["status"] == "failed"
    again = train(f"--workdir={tmp_path}", *SMALL)  # with room, the same command goes on
    assert again.returncode == 0, again.stderr
