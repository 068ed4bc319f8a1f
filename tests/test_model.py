import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import images, relative_error, training_step

import densenets
from densenets import devices


@pytest.mark.parametrize("jit_compile", ["auto", False, True])
def test_densenet121_trains_with_fit(jit_compile):
    model = densenets.DenseNet121(weights=None, memory="checkpoint", input_shape=(32, 32, 3), classes=4)
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=jit_compile)
    before = [v.numpy() for v in model.trainable_variables]
    history = model.fit(images(4, 32, dtype="float32"), tf.constant([0, 1, 2, 3]), epochs=1, verbose=0)
    assert np.isfinite(history.history["loss"][0])
    unmoved = [v.path for v, b in zip(model.trainable_variables, before, strict=True) if np.all(v.numpy() == b)]
    assert unmoved == []


def step_with(memory, mode, batch=6, **arguments):
    """Two steps of a small network in float64: the second's results, and all weights after it."""
    keras.utils.set_random_seed(1)
    model = densenets.DenseNet((1, 2), 4, classifier_activation=None, classes=3, memory=memory, **arguments)
    x = images(batch, arguments["input_shape"][0])
    training_step(model, x, mode)
    return training_step(model, x, mode), model.get_weights()


@pytest.mark.parametrize(("stem", "size"), [("cifar", 17), ("imagenet", 67)])
def test_strategies_agree_in_float64(stem, size, mode, float64):
    arguments = {"stem": stem, "input_shape": (size, size, 3)}
    naive = step_with("naive", mode, **arguments)
    for memory in ("checkpoint", "shared"):
        assert relative_error(step_with(memory, mode, **arguments), naive) < 1e-11


@pytest.mark.parametrize("batch", [1, 3])  # fewer images than chunks, and not a multiple
@pytest.mark.parametrize("dropout_rate", [0.0, 0.3])
def test_strategies_agree_on_any_batch_and_unknown_sizes(batch, dropout_rate, float64):
    arguments = {"stem": "imagenet", "input_shape": (160, 160, 3), "dropout_rate": dropout_rate, "batch": batch}
    naive = step_with("naive", "graph", **arguments)
    assert relative_error(step_with("shared", "graph", **arguments), naive) < 1e-11


@pytest.mark.parametrize("dtype", ["float64", "float32"])  # TensorFlow's kernels differ on chunks without images
def test_a_batch_of_any_size_fits_one_trace(dtype):
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    models = [densenets.DenseNet((1, 1), 4, input_shape=(160, 160, 3), classes=3, memory=m) for m in ("shared", "naive")]
    models[1].set_weights(models[0].get_weights())
    shared, naive = (
        tf.function(
            functools.partial(training_step, model, mode="eager"), input_signature=[tf.TensorSpec([None, 160, 160, 3], dtype)]
        )
        for model in models
    )
    for batch in (5, 1, 3):
        x = images(batch, 160, dtype=dtype)
        assert relative_error(shared(x), naive(x)) < {"float64": 1e-11, "float32": 1e-3}[dtype]
    assert relative_error(models[0].get_weights(), models[1].get_weights()) < 1e-4


@pytest.mark.parametrize("memory", ["checkpoint", "shared"])
def test_tapped_features_have_gradients_beside_the_network_behind_them(memory, mode, float64):
    results = []
    for strategy in ("naive", memory):
        keras.utils.set_random_seed(1)
        model = densenets.DenseNetCifar(16, 4, memory=strategy, input_shape=(8, 8, 3))
        taps = keras.Model(model.input, [model.get_layer("conv2").output, model.get_layer("conv3").output, model.output])
        loss = lambda outputs: tf.add_n([tf.reduce_sum(tf.sin(output)) for output in outputs])  # noqa: E731
        results.append(training_step(taps, images(3), mode, loss))
    assert relative_error(*results) < 1e-11


@pytest.mark.parametrize("memory", ["checkpoint", "shared"])
def test_two_replicas_train_as_with_the_naive_strategy(memory, float64):
    results = []
    for strategy_name in ("naive", memory):
        keras.utils.set_random_seed(1)
        distribution = devices.make_strategy("mirrored")
        with distribution.scope():
            model = densenets.DenseNetCifar(10, 4, memory=strategy_name, input_shape=(8, 8, 3))
            model.compile("sgd", "sparse_categorical_crossentropy")
        data = tf.data.Dataset.from_tensor_slices((images(8), tf.range(8))).batch(4)
        model.fit(data, epochs=2, verbose=0)
        results.append(model.get_weights())
    assert relative_error(*results) < 1e-10


def test_keras_remat_scope_cannot_train_the_same_network():
    """What users meet without this package (keras #21207). Once Keras mends it, this test skips."""
    with keras.RematScope("full"):
        model = keras.applications.DenseNet121(weights=None, input_shape=(32, 32, 3), classes=4)
        model.compile("sgd", "sparse_categorical_crossentropy")
        try:
            model.fit(images(4, 32, dtype="float32"), tf.constant([0, 1, 2, 3]), epochs=1, verbose=0)
        except ValueError as error:
            assert "keywords arguments only when eager execution is enabled" in str(error)
        else:
            pytest.skip("keras.RematScope trains DenseNet-121 in this version of Keras")


def test_block_outputs_can_be_tapped_at_strides_4_to_32():
    model = densenets.DenseNet121(weights=None, include_top=False, input_shape=(64, 96, 3))
    taps = keras.Model(model.input, [model.get_layer(f"conv{i}").output for i in (2, 3, 4, 5)])
    shapes = [tuple(feature.shape) for feature in taps(tf.zeros([1, 64, 96, 3]))]
    assert shapes == [(1, 16, 24, 256), (1, 8, 12, 512), (1, 4, 6, 1024), (1, 2, 3, 1024)]


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ({"include_top": True, "classes": 7}, (2, 7)),
        ({"include_top": False}, (2, 2, 2, 20)),
        ({"include_top": False, "pooling": "avg"}, (2, 20)),
        ({"include_top": False, "pooling": "max"}, (2, 20)),
    ],
)
def test_head_follows_keras_applications(arguments, shape):
    model = densenets.DenseNet((1, 1), 8, stem="cifar", input_shape=(4, 4, 3), **arguments)
    assert model(tf.zeros([2, 4, 4, 3])).shape == shape


def test_builds_on_an_input_tensor():
    inputs = keras.Input((32, 32, 3))
    scaled = keras.layers.Rescaling(1 / 255)(inputs)
    model = densenets.DenseNetCifar(10, 4, input_tensor=scaled)
    assert model.input is inputs
    plain = densenets.DenseNetCifar(10, 4)
    plain.set_weights(model.get_weights())
    x = images(size=32, dtype="float32")
    assert relative_error(model(x), plain(x / 255)) < 1e-5


def test_unknown_image_size_and_any_number_of_channels():
    model = densenets.DenseNet((2, 2), 4, stem="cifar", include_top=False, pooling="avg", input_shape=(None, None, 1))
    assert model(tf.zeros([1, 9, 5, 1])).shape == (1, 16)
    assert model(tf.zeros([3, 6, 8, 1])).shape == (3, 16)


def test_saves_loads_and_switches_strategy(tmp_path):
    model = densenets.DenseNetCifar(16, 4, memory="checkpoint", dropout_rate=0.1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [layer.memory for layer in loaded.layers if hasattr(layer, "memory")] == ["checkpoint"] * 3
    other = densenets.DenseNetCifar(16, 4, memory="naive", dropout_rate=0.1, weights=None)
    other.load_weights(tmp_path / "model.keras")
    x = images(size=32, dtype="float32")
    assert relative_error(loaded(x), model(x)) == 0
    assert relative_error(other(x), model(x)) < 1e-5


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: densenets.DenseNetCifar(41, 12), "`depth` must be 6n \\+ 4 with bottlenecks, got 41; .* 40 and 46"),
        (lambda: densenets.DenseNetCifar(41, 12, bottleneck=False), "`depth` must be 3n \\+ 4 without .* 40 and 43"),
        (lambda: densenets.DenseNet((6, 0), 32), "`blocks` must be positive numbers of layers"),
        (lambda: densenets.DenseNet((6, 6), 32, stem="vit"), "`stem` must be one of 'imagenet', 'cifar'; got 'vit'"),
        (lambda: densenets.DenseNet121(memory="big"), "`memory` must be one of 'naive', 'checkpoint', 'shared'; got 'big'"),
        (lambda: densenets.DenseNet121(pooling="sum"), "`pooling` must be None, 'avg' or 'max'; got 'sum'"),
        (lambda: densenets.DenseNet121(classes=0), "`classes` must be a positive integer, got 0"),
        (lambda: densenets.DenseNet121(input_shape=(31, 32, 3)), "height and width at least 32; got \\(31, 32, 3\\)"),
        (lambda: densenets.DenseNet121(input_shape=(64, 64)), "`input_shape` must be \\(height, width, channels\\)"),
        (lambda: densenets.create_model("densenet_122"), "such as densenet_121, .*; got 'densenet_122'"),
        (lambda: densenets.published("densenet_122"), "such as densenet_121, .*; got 'densenet_122'"),
    ],
)
def test_refuses_what_makes_no_network(build, message):
    with pytest.raises(ValueError, match=message):
        build()
