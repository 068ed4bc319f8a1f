import pytest
import tensorflow as tf

from densenets import memory


def test_counts_what_lives_during_the_step_and_not_between(mode):
    kept = tf.zeros([1024, 1024])
    step = tf.function(lambda: tf.reduce_sum(tf.random.normal([8, 1024, 1024])))
    measured = min((memory.measure(step) for _ in range(3)), key=lambda m: m.peak)  # other threads allocate too
    assert measured.device == "CPU:0"
    assert 32 * 2**20 <= measured.peak < 33 * 2**20
    assert measured.baseline >= kept.shape.num_elements() * 4


def test_results_count():
    peak = min(memory.measure(lambda: tf.zeros([1024, 1024])).peak for _ in range(3))
    assert 4 * 2**20 <= peak < 5 * 2**20


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
