"""`train.py` as its user runs it: a process of its own, real configs."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import ROOT, train

FAST = ["--config.model.depth=10", "--config.epochs=1", "--config.steps_per_epoch=2", "--config.accuracy_margin=1.0"]


def test_quickstart_prints_the_table_and_writes_the_report(tmp_path):
    done = train("--config=configs/quickstart.py", f"--workdir={tmp_path}", "--config.memory_budget=2MiB", *FAST)
    assert done.returncode == 0, done.stderr
    assert "more than the 2 MiB that there are. What would fit: " in done.stderr  # and goes on
    assert "| checkpoint | 0    | graph |" in done.stdout
    assert "| shared     | 0    | graph |" in done.stdout
    assert "Gradients: passed" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["parity"]["passed"] is True


def test_failed_parity_exits_with_an_error(tmp_path):
    # No rounding error is below zero, so parity must fail.
    script = (
        "import sys; sys.argv[0] = 'train.py'\n"
        "from densenets import compare; compare.GRADIENT_TOLERANCE = 0.0\n"
        "import runpy; runpy.run_path('train.py', run_name='__main__')"
    )
    arguments = ["--config=configs/quickstart.py", f"--workdir={tmp_path}", "--config.compare=('naive', 'checkpoint')", *FAST]
    done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "Gradients: FAILED" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["parity"]["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--config.batchsize=3"],
            "--config.batchsize=3 sets an unknown key. The keys are: accuracy_margin, augment, ",
        ),
        (["--config.model.deep=3"], "--config.model.deep=3 sets an unknown key."),
        (["--config.batch_size=many"], "flag --config.batch_size=many: invalid literal for int() with base 10: 'many'"),
        (["--config.model.depth=41"], "`depth` must be 6n + 4 with bottlenecks, got 41; the nearest are 40 and 46."),
        (["--gpu=7"], "--gpu must name GPUs of none, since TensorFlow sees none here; got 7."),
    ],
)
def test_wrong_commands_are_told_in_one_line(tmp_path, arguments, message):
    done = train("--config=configs/quickstart.py", f"--workdir={tmp_path / 'run'}", *arguments, CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_unwritable_workdir_is_told_before_any_work(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    done = train("--config=configs/quickstart.py", f"--workdir={tmp_path / 'file' / 'run'}")
    assert done.returncode == 1
    assert "Not a directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_trains_on_real_cifar10_by_name(tmp_path):
    if not os.path.isdir(os.path.join(os.environ.get("TFDS_DATA_DIR", ""), "cifar10")):
        pytest.skip("CIFAR-10 is not in TFDS_DATA_DIR")
    done = train("--config=configs/cifar10.py", f"--workdir={tmp_path}", *FAST)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["environment"]["train_images"] == 50_000


def test_interrupt_leaves_a_readable_report_and_no_traceback(tmp_path):
    command = [sys.executable, "train.py", "--config=configs/quickstart.py", f"--workdir={tmp_path}"]
    command += ["--config.model.depth=10", "--config.epochs=10000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("naive-seed0/history.csv")) and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert f"Interrupted. What was found so far is in {tmp_path}/report.md." in stderr
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["status"] == "interrupted"
    assert result["parity"]["gradients_passed"] is True
    assert "Comparison: interrupted" in (tmp_path / "report.md").read_text()
