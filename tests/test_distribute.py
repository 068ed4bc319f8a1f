"""One training on many devices: the same batches, the same losses, one writer."""

import json
import os
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import ROOT

from densenets import compare, config, data, devices, training
from densenets.devices import Share
from densenets.loop import Loop
from densenets.optimizer import TorchSGD


def settings(**fields):
    found = config.default_config()
    found.update_from_flattened_dict({"dataset": "digits", "model.depth": 10, "model.growth_rate": 4, "precision": "float64"})
    found.update_from_flattened_dict({"epochs": 2, "steps_per_epoch": 3, "batch_size": 32, "compare": ()} | fields)
    return found


def losses(result):
    return np.array([result["runs"][0]["history"][name] for name in ("loss", "val_loss", "val_accuracy")])


@pytest.mark.parametrize("share", [Share(0, 2, 1), Share(0, 1, 2), Share(0, 2, 2), Share(0, 3, 1)])
@pytest.mark.parametrize("part", ["train", "test"])
def test_shares_together_are_the_batches_of_one_device(share, part):
    digits = data.load("digits")
    batch_size = 12 * 9
    n = share.num_replicas

    def batches(share):
        if part == "train":
            found = digits.train_epoch(batch_size, seed=3, epoch=2, augment=True, share=share, skip=1)
        else:
            found = digits.test_batches(batch_size, share)
        return [tuple(tensor.numpy() for tensor in batch) for batch in found]

    whole = batches(Share())
    shares = [batches(Share(worker, share.num_workers, n)) for worker in range(share.num_workers)]
    for number, expected in enumerate(whole):
        pieces = [piece for own in shares for piece in own[number * n : (number + 1) * n]]
        assert all(len(piece[1]) for piece in pieces)
        together = [np.concatenate(tensors) for tensors in zip(*pieces, strict=True)]
        if part == "test":  # what is there twice, that no device be without, has the weight 0
            together = [tensor[together[2] > 0] for tensor in together]
        for ours, one in zip(together, expected, strict=True):
            np.testing.assert_array_equal(ours, one)
    assert all(len(own) == n * len(whole) for own in shares)


@pytest.mark.parametrize("memory", ["naive", "shared"])
def test_two_replicas_reach_the_weights_that_the_mean_gradient_gives(memory, float64):
    """Two steps by hand: each replica's batch norms see its half, the gradient is that of the whole batch's mean loss."""
    strategy = devices.make_strategy("mirrored")
    assert strategy.num_replicas_in_sync == 2
    digits = data.load("digits")
    options = settings(memory=memory, distribute="mirrored", learning_rate=0.125)

    with strategy.scope():
        model = training.build_model(options, memory)
        training.compile_model(model, options, 3)
        model.optimizer.build(model.trainable_variables)
    alone = training.build_model(options, memory)
    optimizer = TorchSGD(0.125)
    loop, stream = Loop(model, strategy), training.train_batches(options, digits, strategy, 0)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    whole = iter(digits.train_epoch(32, augment=True))
    for _ in range(2):
        images, labels = next(whole)
        loss, _, count = loop.train_step(next(stream))
        with tf.GradientTape() as tape:
            start = [v.numpy() for v in alone.non_trainable_variables]
            halves, averages = [], []
            for half in (slice(0, 16), slice(16, 32)):
                for variable, value in zip(alone.non_trainable_variables, start, strict=True):
                    variable.assign(value)
                halves.append(loss_of(labels[half], alone(tf.cast(images[half], tf.float64), training=True)))
                averages.append([v.numpy() for v in alone.non_trainable_variables])
            value = tf.add_n(halves) / 32
        optimizer.apply(tape.gradient(value, [v.value for v in alone.trainable_variables]), alone.trainable_variables)
        for variable, first, second in zip(alone.non_trainable_variables, *averages, strict=True):
            variable.assign((first + second) / 2)
        assert int(count) == 32
        np.testing.assert_allclose(float(loss), float(value), rtol=1e-10)
    loop.share_averages()
    for ours, expected in zip(model.variables, alone.variables, strict=True):
        if "seed" not in ours.path:
            np.testing.assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-7, atol=1e-10)


def test_replicas_agree_on_which_float16_gradients_are_finite():
    """The loss is scaled so far that gradients overflow on the first steps: all replicas must skip those, and then go on."""
    options = settings(memory="naive", distribute="mirrored", precision="mixed_float16", learning_rate=0.125)
    strategy = devices.make_strategy("mirrored")
    keras.config.set_dtype_policy("mixed_float16")
    with strategy.scope():
        model = training.build_model(options, "naive")
        training.compile_model(model, options, 3)
        model.optimizer.build(model.trainable_variables)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    model.optimizer.dynamic_scale.assign(2.0**40)
    start = [v.numpy() for v in model.trainable_variables]
    loop, stream = Loop(model, strategy), training.train_batches(options, data.load("digits"), strategy, 0)
    for _ in range(30):
        loss, _, _ = loop.train_step(next(stream))
    assert float(model.optimizer.dynamic_scale.numpy()) < 2.0**40
    assert np.isfinite(float(loss))
    for variable, before in zip(model.trainable_variables, start, strict=True):
        first, second = (copy.numpy() for copy in strategy.experimental_local_results(variable.value))
        np.testing.assert_array_equal(first, second)
        assert np.all(np.isfinite(first))
        assert not np.array_equal(first, before)


def run_workers(workdir, *arguments):
    """Two processes of train.py on the loopback."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(2)]
    workers = [f"localhost:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    command = [sys.executable, "train.py", "--config=configs/quickstart.py", f"--workdir={workdir}", *arguments]
    processes = []
    for index in range(2):
        place = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environment = os.environ | {"TF_CONFIG": json.dumps(place), "CUDA_VISIBLE_DEVICES": "-1"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, **streams))
    ends = [(process, *process.communicate(timeout=300)) for process in processes]
    return [(process.returncode, output, errors) for process, output, errors in ends]


def test_two_worker_processes_train_as_two_replicas_of_one_do(tmp_path):
    mirrored = compare.run(settings(distribute="mirrored"), tmp_path / "mirrored")
    fields = settings(distribute="multi_worker").to_dict()
    fields |= {f"model.{key}": value for key, value in fields.pop("model").items()}
    del fields["seeds"], fields["milestones"], fields["compare"]
    arguments = [f"--config.{key}={value}" for key, value in fields.items()]
    ends = run_workers(tmp_path / "workers", "--config.compare=()", *arguments)
    assert [code for code, _, _ in ends] == [0, 0], ends[0][2][-2000:] + ends[1][2][-2000:]
    result = json.loads((tmp_path / "workers" / "report.json").read_text())
    assert result["environment"]["replicas"] == 2
    np.testing.assert_allclose(losses(result), losses(mirrored), rtol=1e-9)


def test_workers_that_nobody_names_are_an_error(monkeypatch):
    for value in (
        None,
        "no json",
        '{"cluster": {"worker": ["a:1"]}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"index": 3}}',
    ):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        if value:
            monkeypatch.setenv("TF_CONFIG", value)
        with pytest.raises(devices.DeviceError, match="config.distribute=multi_worker needs the workers in the environment"):
            devices.make_strategy("multi_worker")


def test_a_batch_that_devices_cannot_share_is_refused(tmp_path):
    with pytest.raises(config.ConfigError, match="config.batch_size must be a multiple of the 2 devices; got 33"):
        compare.run(settings(distribute="mirrored", batch_size=33), tmp_path)
