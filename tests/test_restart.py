"""A training that was ended goes on where it was, and ends as if it had never been ended."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
from helpers import ROOT

from densenets import checkpoints, compare, config, training

COMMAND = [sys.executable, "train.py", "--config=configs/quickstart.py", "--config.model.depth=10", "--config.compare=()"]
COMMAND += ["--config.memory=naive", "--config.model.dropout_rate=0.2", "--config.augment=True", "--config.precision=float64"]
COMMAND += [
    "--config.epochs=16",
    "--config.steps_per_epoch=8",
    "--config.model.growth_rate=4",
    "--config.mode=eager",
]  # nothing to trace: starts fast
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
CURVES = ("loss", "accuracy", "val_loss", "val_accuracy", "learning_rate")


def start(workdir, *arguments):
    command = [*COMMAND, f"--workdir={workdir}", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | ONE_THREAD, **streams)


def history(workdir):
    result = json.loads((workdir / "report.json").read_text())
    assert result["status"] == "complete"
    [run] = result["runs"]
    return np.array([run["history"][name] for name in CURVES])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted")
    process = start(workdir)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return workdir


def test_killed_at_random_moments_it_ends_with_the_same_result(uninterrupted, tmp_path):
    rng, reached = random.Random(0), []
    for kill in range(10):
        process = start(tmp_path)
        if kill % 2:  # anywhere, mostly before the first step
            time.sleep(rng.uniform(0.5, 4))
        else:  # soon after the next checkpoint was begun
            checkpoint = tmp_path / "naive-seed0" / "checkpoint.npz"
            before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
            while process.poll() is None and (not checkpoint.exists() or checkpoint.stat().st_mtime_ns == before):
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL  # not done before its turn
        checkpoint = tmp_path / "naive-seed0" / "checkpoint.npz"
        reached.append(json.loads(str(np.load(checkpoint)["progress"]))["step"] if checkpoint.exists() else 0)
    process = start(tmp_path)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert reached == sorted(reached)
    assert len(set(reached)) > 4
    np.testing.assert_allclose(history(tmp_path), history(uninterrupted), rtol=1e-9)
    assert not list(tmp_path.glob("**/partial-*.npz"))
    lines = (tmp_path / "naive-seed0" / "history.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", *map(str, range(1, 17))]


def test_told_to_end_it_saves_within_the_epoch_first(uninterrupted, tmp_path):
    process = start(tmp_path)
    checkpoint = tmp_path / "naive-seed0" / "checkpoint.npz"
    while process.poll() is None and not checkpoint.exists():
        time.sleep(0.01)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "Told to end, and saved at step" in errors
    assert "Traceback" not in errors
    assert json.loads((tmp_path / "report.json").read_text())["status"] == "interrupted"
    step = json.loads(str(np.load(checkpoint)["progress"]))["step"]
    assert f"saved at step {step}." in errors
    process = start(tmp_path)
    process.communicate(timeout=300)
    np.testing.assert_allclose(history(tmp_path), history(uninterrupted), rtol=1e-9)


def test_a_complete_report_is_shown_again_and_another_config_is_refused(uninterrupted):
    before = (uninterrupted / "report.json").read_text()
    process = start(uninterrupted)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "| naive  | 0 " in output
    process = start(uninterrupted, "--config.learning_rate=0.2", "--config.model.depth=16")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "is of another config. Choose another --workdir, or remove it." in errors
    assert "learning_rate: 0.2, was 0.1" in errors
    assert "model.depth: 16, was 10" in errors
    assert "Traceback" not in errors
    assert (uninterrupted / "report.json").read_text() == before


@pytest.fixture
def small():
    small = config.default_config()
    small.update_from_flattened_dict({"dataset": "digits", "model.depth": 10, "model.growth_rate": 4, "seeds": (0, 1)})
    small.update_from_flattened_dict({"epochs": 2, "steps_per_epoch": 3, "batch_size": 32, "accuracy_margin": 1.0})
    small.update_from_flattened_dict({"mode": "eager", "compare": ("naive", "checkpoint")})
    return small


def test_what_is_done_is_not_done_again(small, tmp_path, monkeypatch):
    whole, train = compare.run(small, tmp_path / "whole"), training.train

    def ended(loop, config, data, seed, workdir):
        if seed == 1 and workdir.name.startswith("checkpoint"):
            raise KeyboardInterrupt
        return train(loop, config, data, seed, workdir)

    monkeypatch.setattr(training, "train", ended)
    with pytest.raises(KeyboardInterrupt):
        compare.run(small, tmp_path / "ended")
    trained = []
    monkeypatch.setattr(training, "train", lambda *a: trained.append((a[3], a[4].name)) or train(*a))
    monkeypatch.setattr(compare, "_gradient_parity", None)  # a call would fail
    monkeypatch.setattr(compare, "_time_in_turns", None)
    result = compare.run(small, tmp_path / "ended")
    assert trained == [(1, "checkpoint-seed1")]
    assert [run["history"]["loss"] for run in result["runs"]] == [run["history"]["loss"] for run in whole["runs"]]


def test_two_runs_of_one_config_give_the_same_curve(small, tmp_path):
    small.update_from_flattened_dict({"mode": "graph", "compare": (), "seeds": (3,)})
    first, again = (compare.run(small, tmp_path / name)["runs"] for name in "ab")
    for one, other in zip(first, again, strict=True):
        for name in CURVES:
            assert one["history"][name] == other["history"][name]


def test_a_broken_or_foreign_checkpoint_is_refused_and_changes_nothing(tmp_path):
    variables = [keras.Variable(np.ones(3)), keras.Variable(np.zeros(2))]
    path = tmp_path / "checkpoint.npz"
    assert checkpoints.restore(path, variables) is None
    checkpoints.save(path, variables, {"step": 7})
    whole = path.read_bytes()
    ones = variables[0].numpy().tobytes()
    another_bit = whole.replace(ones, b"\x01" + ones[1:])
    assert another_bit != whole
    variables[0].assign([5, 6, 7])
    for broken in (whole[: len(whole) // 2], whole[:-100] + bytes(100), another_bit, b""):
        path.write_bytes(broken)
        with pytest.raises(checkpoints.CheckpointError, match="checkpoint.npz is broken .*Remove it to train from the start"):
            checkpoints.restore(path, variables)
    path.write_bytes(whole)
    with pytest.raises(
        checkpoints.CheckpointError, match="is of another network: 1 shapes differ, such as None expected, .2,. found"
    ):
        checkpoints.restore(path, variables[:1])
    np.testing.assert_array_equal(variables[0], [5, 6, 7])
    assert checkpoints.restore(path, variables) == {"step": 7}
    np.testing.assert_array_equal(variables[0], [1, 1, 1])
