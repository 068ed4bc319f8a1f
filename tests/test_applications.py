"""`densenets.DenseNet121` where `keras.applications.DenseNet121` stood: the same arguments, the same meaning."""

import inspect
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import images, relative_error

import densenets

NAMES = {"DenseNet121": 1024, "DenseNet169": 1664, "DenseNet201": 1920}


@pytest.mark.parametrize("name", NAMES)
def test_the_arguments_are_those_of_keras_applications(name):
    theirs = inspect.signature(getattr(keras.applications, name)).parameters
    ours = inspect.signature(getattr(densenets, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for argument, parameter in theirs.items():
        assert ours[argument].default == parameter.default


@pytest.mark.parametrize("name", NAMES)
def test_with_top(name):
    model = getattr(densenets, name)(weights=None)
    assert model.input_shape == (None, 224, 224, 3)
    assert model.output_shape == (None, 1000)
    assert model.layers[-1].activation is keras.activations.softmax
    assert getattr(densenets, name)(weights=None, classifier_activation=None, classes=5).output_shape == (None, 5)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_without_top(channels):
    model = densenets.DenseNet121(weights=None, include_top=False, input_shape=(None, None, channels))
    assert model.output_shape == (None, None, None, 1024)
    assert model(tf.zeros([1, 64, 96, channels])).shape == (1, 2, 3, 1024)


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("name", NAMES)
def test_pooling(name, pooling):
    assert getattr(densenets, name)(weights=None, include_top=False, pooling=pooling).output_shape == (None, NAMES[name])


@pytest.mark.parametrize("arguments", [{"input_shape": (31, 64, 3)}, {"input_shape": (64, 64)}, {"weights": "no such file"}])
def test_refuses_what_keras_applications_refuses(arguments):
    for package in (keras.applications, densenets):
        with pytest.raises(ValueError):
            package.DenseNet121(**({"weights": None, "include_top": False} | arguments))


def test_refuses_channels_first(monkeypatch):
    monkeypatch.setattr(keras.config, "image_data_format", lambda: "channels_first")
    with pytest.raises(ValueError, match="densenets computes in 'channels_last'"):
        densenets.DenseNet121(weights=None)


def test_named_layers_are_there_for_taps():
    model = densenets.DenseNet121(weights=None, include_top=False, input_shape=(64, 64, 3))
    strides = [64 // model.get_layer(name).output.shape[1] for name in ("conv2", "conv3", "conv4", "conv5")]
    assert strides == [4, 8, 16, 32]


# === Transfer learning, as people do it ===


def small(**kwargs):
    return densenets.DenseNet((2, 2, 2), 4, **({"include_top": False, "pooling": "avg", "input_shape": (32, 32, 3)} | kwargs))


def with_head(base):
    """A new classifier on a network that is called as a layer, as Keras' guide to transfer learning has it."""
    inputs = keras.Input(base.input_shape[1:])
    model = keras.Model(inputs, keras.layers.Dense(3)(base(inputs)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def moved(model, x, epochs=1):
    """The paths of the weights that a training step moved."""
    before = {v.path: v.numpy() for v in model.weights}
    model.fit(x, np.arange(len(x)) % 3, epochs=epochs, batch_size=len(x), verbose=0)
    return {v.path for v in model.weights if np.any(v.numpy() != before[v.path])}


@pytest.mark.parametrize("memory", ["naive", "checkpoint", "shared"])
def test_freeze_then_unfreeze_the_last_block(memory):
    base = small(memory=memory)
    model, x = with_head(base), images(6, 32, dtype="float32")
    base.trainable = False
    model.compile("sgd", model.loss)
    assert moved(model, x) == {v.path for v in model.layers[-1].weights}

    base.trainable = True
    for layer in base.layers:
        layer.trainable = layer.name == "conv4"
    model.compile("sgd", model.loss)
    last = base.get_layer("conv4")
    assert moved(model, x) == {v.path for v in [*last.weights, *model.layers[-1].weights]}


@pytest.mark.parametrize("memory", ["checkpoint", "shared"])
def test_a_partly_frozen_network_trains_as_with_the_naive_strategy(memory, float64):
    results = []
    for strategy in ("naive", memory):
        keras.utils.set_random_seed(1)
        base = small(memory=strategy)
        for layer in base.layers[: base.layers.index(base.get_layer("conv4"))]:
            layer.trainable = False
        model = with_head(base)
        model.fit(images(6, 32), np.arange(6) % 3, epochs=2, verbose=0)
        results.append(model.get_weights())
    assert relative_error(*results) < 1e-10


def test_one_channel_and_another_size():
    base = small(input_shape=(None, None, 3))
    inputs = keras.Input((40, 40, 1))
    model = with_head(base)
    gray = keras.Model(inputs, model.layers[-1](base(keras.layers.Concatenate()([inputs] * 3))))
    x = images(2, 40, 1, "float32")
    assert relative_error(gray(x), model(tf.repeat(x, 3, axis=-1))) < 1e-5
    assert small(input_shape=(32, 32, 1))(images(2, 32, 1, "float32")).shape == (2, base.output_shape[-1])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    base = small()
    assert base.output.dtype == policy.removeprefix("mixed_")
    assert {v.dtype for v in base.weights} == {"float32"}
    model = with_head(base)
    assert {v.path for v in base.trainable_weights} <= moved(model, images(6, 32, dtype="float32"), epochs=2)


def test_a_segmentation_network_on_the_taps_trains():
    base = small(pooling=None)
    taps = [base.get_layer(name).output for name in ("conv2", "conv3", "conv4")]
    x = taps[-1]
    for tap in reversed(taps[:-1]):
        x = keras.layers.UpSampling2D(2)(x)
        x = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(keras.layers.Concatenate()([x, tap]))
    model = keras.Model(base.input, keras.layers.UpSampling2D(4)(keras.layers.Conv2D(3, 1)(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = images(6, 32, dtype="float32"), np.random.default_rng(0).integers(0, 3, (6, 32, 32))
    before = {v.path: v.numpy() for v in model.trainable_weights}
    model.fit(x, y, verbose=0)
    unmoved = {v.path for v in model.trainable_weights if np.all(v.numpy() == before[v.path])}
    assert unmoved <= {v.path for v in base.get_layer("conv4").trainable_weights} - {
        v.path for v in base.get_layer("conv3").weights
    }
    assert unmoved == set()


# === Save and deploy ===


@pytest.mark.parametrize("memory", ["naive", "checkpoint", "shared"])
def test_a_saved_model_loads_in_a_fresh_process(tmp_path, memory):
    model, x = small(memory=memory), images(2, 32, dtype="float32")
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", x)
    script = (
        "import sys, keras, numpy as np, densenets\n"
        "model = keras.models.load_model(sys.argv[1] + '/model.keras')\n"
        "np.save(sys.argv[1] + '/y.npy', model(np.load(sys.argv[1] + '/x.npy')))"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True)
    assert relative_error(np.load(tmp_path / "y.npy"), model(x)) < 1e-5


@pytest.mark.parametrize("memory", ["naive", "checkpoint", "shared"])
def test_exports_to_saved_model(tmp_path, memory):
    model = small(memory=memory)
    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "exported")
    for batch in (1, 5):
        x = images(batch, 32, dtype="float32")
        assert relative_error(loaded.serve(x), model(x)) < 1e-5


def test_exports_to_onnx(tmp_path):
    pytest.importorskip("tf2onnx", reason="tf2onnx is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model, x = small(), images(2, 32, dtype="float32")
    model(x)  # Keras exports to ONNX what was called once
    model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    y = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    assert relative_error(y, np.asarray(model(x))) < 1e-4


@pytest.mark.parametrize("memory", ["naive", "shared"])
def test_converts_to_lite(tmp_path, memory):
    model, x = small(memory=memory), images(1, 32, dtype="float32")
    model.export(tmp_path / "exported", verbose=False)
    flat = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "exported")).convert()
    interpreter = tf.lite.Interpreter(model_content=flat)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
    interpreter.invoke()
    y = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    assert relative_error(y, np.asarray(model(x))) < 1e-4
