import os
import tempfile

# Before TensorFlow is imported: the allocator that keeps exact sizes, and no GPU, whose rounding differs.
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

# XLA writes what it allocates for functions of this name; the allocator's own figure has up to 128 MiB of rounding.
XLA_DUMP = tempfile.TemporaryDirectory()
os.environ["XLA_FLAGS"] = f"--xla_dump_to={XLA_DUMP.name} --xla_dump_hlo_module_re=.*xla_measured.*"

import keras  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

# One operation at a time: where memory is measured, the executor's order decides, and so it is the same in every run.
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

# Two devices for the tests of tf.distribute; nothing else sees the second.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)


@pytest.fixture(autouse=True)
def fresh_state():
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


@pytest.fixture(params=["eager", "graph", "xla"])
def mode(request):
    return request.param
