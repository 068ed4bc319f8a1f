import json
import subprocess
import sys

import pytest
import tensorflow as tf

from densenets import memory

# In a process of its own: where others have allocated before, the allocator may hand out a free piece up to twice the size.
SCRIPT = """
import json
import tensorflow as tf
from densenets import memory

kept = tf.zeros([1024, 1024])
eager = lambda: tf.reduce_sum(tf.raw_ops.RandomStandardNormal(shape=[8, 1024, 1024], dtype=tf.float32))
steps = {"eager": eager, "graph": tf.function(eager), "result": lambda: tf.zeros([1024, 1024])}
for name, step in steps.items():
    measured = min((memory.measure(step) for _ in range(3)), key=lambda m: m.peak)  # other threads allocate too
    print(json.dumps([name, measured.device, measured.peak, measured.baseline]))
"""


@pytest.fixture(scope="module")
def measured():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    return {
        name: memory.Measurement(peak, baseline, device)
        for name, device, peak, baseline in map(json.loads, done.stdout.splitlines())
    }


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_counts_what_lives_during_the_step_and_not_between(measured, mode):
    assert measured[mode].device == "CPU:0"
    assert 32 * 2**20 <= measured[mode].peak < 33 * 2**20
    assert measured[mode].baseline >= 1024 * 1024 * 4


def test_results_count(measured):
    assert 4 * 2**20 <= measured["result"].peak < 5 * 2**20


def test_warns_where_sizes_are_rounded(monkeypatch):
    monkeypatch.delenv("TF_CPU_ALLOCATOR_USE_BFC")
    with pytest.warns(UserWarning, match="TF_CPU_ALLOCATOR_USE_BFC=1 was not set"):
        memory.measure(lambda: None)


def test_a_device_without_statistics_is_a_clear_error(monkeypatch):
    def absent(device):
        raise ValueError("Allocator stats not available")

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", absent)
    with pytest.raises(RuntimeError, match="The allocator of CPU:0 keeps no statistics"):
        memory.measure(lambda: None)
