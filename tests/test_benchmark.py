"""`python -m densenets.benchmark` as its user runs it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def benchmark(workdir, *arguments):
    command = [sys.executable, "-m", "densenets.benchmark", "--batch_sizes=2", "--rounds=1", f"--workdir={workdir}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((workdir / "benchmark.json").read_text())


def test_every_contender_is_measured_and_a_failure_is_a_result(tmp_path):
    printed, cases = benchmark(tmp_path, "--models=10x4", "--contenders=keras,remat,recompute_grad,shared")
    assert [case["contender"] for case in cases] == ["keras", "remat", "recompute_grad", "shared"]
    for case in cases:
        if case["contender"] == "remat":  # keras #21207
            assert "keywords arguments only when eager execution is enabled" in case["error"]
        else:
            assert case["peak_bytes"] > 0
            assert case["step_seconds_range"][0] <= case["step_seconds"] <= case["step_seconds_range"][1]
    assert len({case["parameters"] for case in cases if "error" not in case}) == 1
    assert "| remat | failed: ValueError: Exception encountered when calling Functional.call(). The custom_gradient" in printed
    assert (tmp_path / "benchmark.md").read_text().strip() in printed
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")


def test_inference_is_a_task_too(tmp_path):
    _, cases = benchmark(tmp_path, "--models=10x4,16x4", "--contenders=keras,shared", "--task=inference")
    assert [(case["model"], case["contender"]) for case in cases] == [
        ("10x4", "keras"), ("10x4", "shared"), ("16x4", "keras"), ("16x4", "shared"),
    ]  # fmt: skip
    assert all(case["task"] == "inference" for case in cases)
    assert all(case["peak_bytes"] > 0 for case in cases)


def test_torchvision_is_a_contender_where_it_is_installed(tmp_path):
    pytest.importorskip("torchvision", reason="torchvision is not installed: pip install -e '.[torch]'")
    _, cases = benchmark(tmp_path, "--models=10x4", "--contenders=shared,torch,torch_checkpoint")
    assert [case.get("error") for case in cases] == [None] * 3
    assert cases[1]["parameters"] == cases[2]["parameters"]
