import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import images, peak_bytes, plain_dense_block, relative_error, training_step
from hypothesis import given, settings
from hypothesis import strategies as st

from densenets.dense_block import shared
from densenets.layers import DenseBlock, Transition

STRATEGIES = ["naive", "checkpoint", "shared"]


def block_model(memory, channels=5, size=(8, 8), **kwargs):
    inputs = keras.Input((*size, channels))
    return keras.Model(inputs, DenseBlock(memory=memory, **kwargs)(inputs))


def plain_model(channels=5, **kwargs):
    inputs = keras.Input((None, None, channels))
    return keras.Model(inputs, plain_dense_block(inputs, **kwargs))


def copy_weights(source, target):
    """By order of creation, which is the order of the layers in both."""
    target.set_weights(source.get_weights())


@pytest.fixture
def chunked(monkeypatch):
    """The batch in chunks, as large images have it."""
    monkeypatch.setattr(shared, "CHUNKED_PIXELS", 1)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("memory", STRATEGIES)
@pytest.mark.parametrize("bottleneck", [True, False])
def test_equals_plain_keras_layers_in_float64(memory, bottleneck, mode, float64):
    arguments = {"num_layers": 3, "growth_rate": 4, "bottleneck": bottleneck}
    plain, ours = plain_model(**arguments), block_model(memory, **arguments)
    copy_weights(plain, ours)
    x = images(channels=5)
    assert relative_error(training_step(ours, x, mode), training_step(plain, x, mode)) < 1e-12
    assert relative_error(ours.get_weights(), plain.get_weights()) < 1e-12  # the moving averages moved alike


@settings(max_examples=30, deadline=None)
@given(
    memory=st.sampled_from(["checkpoint", "shared"]),
    known_size=st.booleans(),
    num_layers=st.integers(1, 4),
    growth_rate=st.integers(1, 6),
    channels=st.integers(1, 6),
    bottleneck=st.booleans(),
    batch=st.integers(1, 3),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
)
def test_equals_plain_keras_layers_for_any_shape(
    memory, known_size, num_layers, growth_rate, channels, bottleneck, batch, height, width
):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    arguments = {"num_layers": num_layers, "growth_rate": growth_rate, "bottleneck": bottleneck}
    size = (height, width) if known_size else (None, None)
    plain, ours = plain_model(channels, **arguments), block_model(memory, channels, size=size, **arguments)
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
        model = block_model(memory, num_layers=2, growth_rate=4, dropout_rate=0.5)
        first = training_step(model, images(channels=5), mode)
        second = training_step(model, images(channels=5), mode)
        assert relative_error(first[0], second[0]) > 0.01  # another mask each step
        results.append((first, second, model.get_weights()))
    for result in results[1:]:
        assert relative_error(result, results[0]) < 1e-12


@pytest.mark.parametrize("memory", STRATEGIES)
def test_frozen_block_uses_moving_averages_and_keeps_them(memory, float64):
    plain, model = (build(num_layers=2, growth_rate=4) for build in (plain_model, functools.partial(block_model, memory)))
    copy_weights(plain, model)
    model.trainable = plain.trainable = False
    before = model.get_weights()
    x = images(channels=5)
    assert relative_error(model(x, training=True), model(x, training=False)) < 1e-12
    assert relative_error(training_step(model, x), training_step(plain, x)) < 1e-12  # the input still has its gradient
    assert relative_error(model.get_weights(), before) == 0


@pytest.mark.parametrize("memory", STRATEGIES)
def test_one_frozen_batch_norm_among_others(memory, mode, float64):
    plain, model = (build(num_layers=2, growth_rate=4) for build in (plain_model, functools.partial(block_model, memory)))
    copy_weights(plain, model)
    plain.layers[4].trainable = False  # the second batch norm of the first layer
    plain.layers[8].trainable = False  # the first batch norm of the second layer
    block = model.get_layer(index=1)
    block.dense_layers[0].norms[1].trainable = block.dense_layers[1].norms[0].trainable = False
    assert isinstance(plain.layers[4], keras.layers.BatchNormalization)
    assert isinstance(plain.layers[8], keras.layers.BatchNormalization)
    x = images(channels=5)
    (outputs, grads), (plain_outputs, plain_grads) = training_step(model, x, mode), training_step(plain, x, mode)
    assert relative_error((outputs, grads), (plain_outputs, plain_grads)) < 1e-12
    assert relative_error(model.get_weights(), plain.get_weights()) < 1e-12


def test_regularisers_constraints_and_initialisers_of_sublayers_count():
    def model(memory):
        inputs = keras.Input((8, 8, 3))
        block = DenseBlock(2, 4, memory=memory)
        for dense_layer in block.dense_layers:
            dense_layer.convs[0].kernel_regularizer = keras.regularizers.L2(0.1)
            dense_layer.convs[1].kernel_constraint = keras.constraints.MaxNorm(0.1)
            dense_layer.norms[0].gamma_initializer = keras.initializers.Constant(0.7)
        model = keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(block(inputs)))
        model.compile("sgd", "mse")
        return model, block

    models = [model(memory) for memory in STRATEGIES]
    for trained, block in models:
        copy_weights(models[0][0], trained)
        assert np.all(block.dense_layers[0].norms[0].gamma.numpy() == np.float32(0.7))
        assert len(trained.losses) == 2  # one for each regularised kernel
    histories = [trained.fit(images(4), tf.ones([4, 11]), verbose=0).history["loss"] for trained, _ in models]
    for (trained, block), history in zip(models, histories, strict=True):
        assert np.linalg.norm(block.dense_layers[0].convs[1].kernel, axis=0).max() < 0.1 + 1e-6
        assert history == pytest.approx(histories[0], rel=1e-5)
        assert relative_error(trained.get_weights(), models[0][0].get_weights()) < 1e-4


def test_shared_refuses_synchronized_batch_norm():
    model = block_model("shared", num_layers=2, growth_rate=4)
    model.get_layer(index=1).dense_layers[1].norms[0].synchronized = True
    x = images(channels=5, dtype="float32")
    model(x, training=False)
    with pytest.raises(ValueError, match="`memory='shared'` takes no synchronized batch norm, as .*block2/0_bn.* 'checkpoint'"):
        model(x, training=True)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_is_as_near_to_float32_as_the_naive_strategy(policy, mode):
    def results(memory, dtype):
        keras.config.set_dtype_policy(dtype)
        keras.utils.set_random_seed(0)
        model = block_model(memory, num_layers=3, growth_rate=4)
        outputs, gradients = training_step(model, images(channels=5, dtype="float32"), mode)
        assert outputs.dtype == model.get_layer(index=1).compute_dtype
        assert all(g.dtype == tf.float32 for g in gradients)
        return [np.asarray(tf.cast(value, tf.float32)) for value in (outputs, *gradients)]

    exact = results("naive", "float32")

    def error(memory):
        pairs = zip(results(memory, policy), exact, strict=True)
        return np.mean([np.linalg.norm(ours - reference) / np.linalg.norm(reference) for ours, reference in pairs])

    naive = error("naive")
    unit = {"mixed_bfloat16": 2**-8, "mixed_float16": 2**-11}[policy]
    assert unit / 4 < naive < 50 * unit  # the policy was at work
    # The strategies round in other places, and where a value is near zero a ReLU may then pass or not.
    assert error("checkpoint") < 1.5 * naive + unit
    assert error("shared") < 1.5 * naive + unit


def test_memory_does_not_change_names_or_files(tmp_path):
    models = {memory: block_model(memory, num_layers=2, growth_rate=4) for memory in STRATEGIES}
    paths = [[w.path for w in model.weights] for model in models.values()]
    assert len({tuple(p.split("/", 1)[1] for p in path) for path in paths}) == 1
    models["naive"].save_weights(tmp_path / "block.weights.h5")
    for model in models.values():
        model.load_weights(tmp_path / "block.weights.h5")
        assert relative_error(model.get_weights(), models["naive"].get_weights()) == 0


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
        model = block_model(memory, size=(16, 16), num_layers=12, growth_rate=4)

        def step(x, model=model):
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(model(x, training=True) ** 2)
            return tape.gradient(value, [v.value for v in model.trainable_variables])

        peaks[memory] = peak_bytes(step, mode, x)
    # XLA on a CPU adds up each feature's gradients last, and keeps those of every layer until then.
    assert peaks["checkpoint"] < {"eager": 0.7, "graph": 0.7, "xla": 0.8}[mode] * peaks["naive"]
    assert peaks["shared"] < 0.35 * peaks["naive"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 0}, "`num_layers` must be a positive integer, got 0"),
        ({"growth_rate": 1.5}, "`growth_rate` must be a positive integer, got 1.5"),
        ({"dropout_rate": 1.0}, "`dropout_rate` must be at least 0 and below 1, got 1.0"),
        ({"memory": "little"}, "`memory` must be one of 'naive', 'checkpoint', 'shared'; got 'little'"),
    ],
)
def test_refuses_what_is_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        DenseBlock(**({"num_layers": 2, "growth_rate": 4} | arguments))


def test_transition_halves_the_image_and_compresses():
    assert Transition(0.5)(images(size=7, channels=6, dtype="float32")).shape == (2, 3, 3, 3)
    with pytest.raises(ValueError, match="`compression` must be above 0 and at most 1, got 0"):
        Transition(0)
