import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import images, peak_bytes, plain_dense_block, relative_error, training_step
from hypothesis import given, settings
from hypothesis import strategies as st

from densenets.layers import DenseBlock, Transition

STRATEGIES = ["naive", "checkpoint"]


def block_model(memory, channels=5, **kwargs):
    inputs = keras.Input((None, None, channels))
    return keras.Model(inputs, DenseBlock(memory=memory, **kwargs)(inputs))


def plain_model(channels=5, **kwargs):
    inputs = keras.Input((None, None, channels))
    return keras.Model(inputs, plain_dense_block(inputs, **kwargs))


def copy_weights(source, target):
    """By order of creation, which is the order of the layers in both."""
    target.set_weights(source.get_weights())


@pytest.mark.parametrize("memory", STRATEGIES)
@pytest.mark.parametrize("bottleneck", [True, False])
def test_equals_plain_keras_layers_in_float64(memory, bottleneck, mode, float64):
    arguments = {"num_layers": 3, "growth_rate": 4, "bottleneck": bottleneck}
    plain, ours = plain_model(**arguments), block_model(memory, **arguments)
    copy_weights(plain, ours)
    x = images(channels=5)
    assert relative_error(training_step(ours, x, mode), training_step(plain, x, mode)) < 1e-12
    assert relative_error(ours.get_weights(), plain.get_weights()) < 1e-12  # the moving averages moved alike


@settings(max_examples=15, deadline=None)
@given(
    num_layers=st.integers(1, 4),
    growth_rate=st.integers(1, 6),
    channels=st.integers(1, 6),
    bottleneck=st.booleans(),
    batch=st.integers(1, 3),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
)
def test_equals_plain_keras_layers_for_any_shape(num_layers, growth_rate, channels, bottleneck, batch, height, width):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    arguments = {"num_layers": num_layers, "growth_rate": growth_rate, "bottleneck": bottleneck}
    plain, ours = plain_model(channels, **arguments), block_model("checkpoint", channels, **arguments)
    copy_weights(plain, ours)
    x = tf.constant(np.random.default_rng(0).normal(size=(batch, height, width, channels)))
    # A pixel alone in its batch has no variance: the gradient is rounding, magnified by 1 / sqrt(epsilon).
    tolerance = 1e-12 if batch * height * width > 2 else 1e-6
    outputs, gradients = training_step(ours, x, "eager")
    plain_outputs, plain_gradients = training_step(plain, x, "eager")
    assert relative_error(outputs, plain_outputs) < 1e-12
    scale = max(float(tf.reduce_max(tf.abs(g))) for g in plain_gradients)
    for a, b in zip(gradients, plain_gradients, strict=True):
        assert float(tf.reduce_max(tf.abs(a - b))) <= tolerance * scale
    assert relative_error(ours.get_weights(), plain.get_weights()) < 1e-12


def test_dropout_draws_the_same_mask_in_every_strategy(mode, float64):
    results = []
    for memory in STRATEGIES:
        keras.utils.set_random_seed(1)
        model = block_model(memory, num_layers=3, growth_rate=4, dropout_rate=0.5)
        first = training_step(model, images(channels=5), mode)
        second = training_step(model, images(channels=5), mode)
        assert relative_error(first[0], second[0]) > 0.01  # another mask each step
        results.append((first, second, model.get_weights()))
    assert relative_error(*results) < 1e-12


@pytest.mark.parametrize("memory", STRATEGIES)
def test_frozen_block_uses_moving_averages_and_keeps_them(memory, float64):
    model = block_model(memory, num_layers=2, growth_rate=4)
    model.trainable = False
    before = model.get_weights()
    x = images(channels=5)
    assert relative_error(model(x, training=True), model(x, training=False)) == 0
    assert relative_error(model.get_weights(), before) == 0


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_rounds_as_the_naive_strategy_does(policy, mode):
    keras.config.set_dtype_policy(policy)
    results = []
    for memory in STRATEGIES:
        keras.utils.set_random_seed(0)
        model = block_model(memory, num_layers=3, growth_rate=4)
        outputs, gradients = training_step(model, images(channels=5, dtype="float32"), mode)
        assert outputs.dtype == model.get_layer(index=1).compute_dtype
        assert all(g.dtype == tf.float32 for g in gradients)
        results.append([outputs, *gradients])
    # The same operations on the same values; only sums over the readers of a feature may be taken in another order, by
    # which each of 4 terms is rounded once more. XLA may also keep wider intermediate results in one and not the other.
    unit = {"mixed_bfloat16": 2**-8, "mixed_float16": 2**-11}[policy]
    assert relative_error(*results) < 4 * unit * (4 if mode == "xla" else 1)


def test_memory_does_not_change_names_or_files(tmp_path):
    models = {memory: block_model(memory, num_layers=2, growth_rate=4) for memory in STRATEGIES}
    paths = [[w.path for w in model.weights] for model in models.values()]
    assert len({tuple(p.split("/", 1)[1] for p in path) for path in paths}) == 1
    models["naive"].save_weights(tmp_path / "block.weights.h5")
    models["checkpoint"].load_weights(tmp_path / "block.weights.h5")
    assert relative_error(models["checkpoint"].get_weights(), models["naive"].get_weights()) == 0


@pytest.mark.parametrize("memory", STRATEGIES)
def test_saves_and_loads_with_its_config(memory, tmp_path):
    inputs = keras.Input((8, 8, 3))
    x = DenseBlock(2, 4, bottleneck=False, dropout_rate=0.1, memory=memory, momentum=0.8, name="conv2")(inputs)
    model = keras.Model(inputs, Transition(0.3, dropout_rate=0.1)(x))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("conv2").get_config() == model.get_layer("conv2").get_config()
    x = images(dtype="float32")
    assert relative_error(loaded(x), model(x)) == 0


def test_recomputation_saves_memory(mode):
    x = images(batch=16, size=16, channels=5, dtype="float32")
    peaks = {}
    for memory in STRATEGIES:
        model = block_model(memory, num_layers=12, growth_rate=4)

        def step(x, model=model):
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(model(x, training=True) ** 2)
            return tape.gradient(value, [v.value for v in model.trainable_variables])

        peaks[memory] = peak_bytes(step, mode, x)
    # XLA on a CPU adds up each feature's gradients last, and keeps those of every layer until then.
    assert peaks["checkpoint"] < {"eager": 0.7, "graph": 0.7, "xla": 0.8}[mode] * peaks["naive"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 0}, "`num_layers` must be a positive integer, got 0"),
        ({"growth_rate": 1.5}, "`growth_rate` must be a positive integer, got 1.5"),
        ({"dropout_rate": 1.0}, "`dropout_rate` must be at least 0 and below 1, got 1.0"),
        ({"memory": "little"}, "`memory` must be one of 'naive', 'checkpoint'; got 'little'"),
    ],
)
def test_refuses_what_is_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        DenseBlock(**({"num_layers": 2, "growth_rate": 4} | arguments))


def test_transition_halves_the_image_and_compresses():
    assert Transition(0.5)(images(size=7, channels=6, dtype="float32")).shape == (2, 3, 3, 3)
    with pytest.raises(ValueError, match="`compression` must be above 0 and at most 1, got 0"):
        Transition(0)
