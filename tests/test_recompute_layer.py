import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import images, relative_error

from densenets.layers import Recompute


def plainly(layer):
    return layer


def segment(channels=4):
    return [
        keras.layers.Conv2D(channels, 3, padding="same", kernel_regularizer="l2"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.ReLU(),
    ]


def sequential():
    return keras.Sequential(segment())


def functional():
    inputs = keras.Input((8, 8, 3))
    x = inputs
    for layer in segment():
        x = layer(x)
    return keras.Model(inputs, keras.layers.Concatenate()([inputs, x]))


def single():
    return keras.layers.Conv2D(4, 3, activity_regularizer="l2")


def network(inner, wrap):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8, 8, 3))
    x = wrap(inner())(inputs)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling2D()(x)))


@pytest.mark.parametrize("inner", [sequential, functional, single])
def test_fit_equals_the_plain_layer(inner, mode, float64):
    trained = []
    for wrap in (plainly, Recompute):
        model = network(inner, wrap)
        model.compile("sgd", "mse", run_eagerly=mode == "eager", jit_compile=mode == "xla")
        history = model.fit(images(6), tf.ones([6, 2], tf.float64), batch_size=2, epochs=2, verbose=0, shuffle=False)
        trained.append((np.array(history.history["loss"]), [v.numpy() for v in model.variables]))
    # Keras reports losses in float32.
    assert relative_error(trained[1][0], trained[0][0]) < 1e-6
    assert relative_error(trained[1][1], trained[0][1]) < 1e-10


@pytest.mark.parametrize("inner", [sequential, functional, single])
def test_saves_and_loads_and_is_seen(inner, tmp_path):
    model = network(inner, Recompute)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x = images(dtype="float32")
    assert relative_error(loaded(x), model(x)) == 0
    lines = []
    loaded.summary(print_fn=lines.append)
    assert "(Recompute)" in "\n".join(lines)
    # A fresh process needs nothing but the import.
    script = f"import densenets, keras; print(keras.models.load_model({str(tmp_path / 'model.keras')!r}).count_params())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == str(model.count_params())


def test_losses_count_once_and_have_gradients(float64):
    losses, grads = [], []
    for wrap in (plainly, Recompute):
        keras.utils.set_random_seed(1)
        layer = wrap(keras.Sequential([keras.layers.Dense(3, kernel_regularizer="l2", activity_regularizer="l2")]))
        x = images(4, 1, 2)[:, 0, 0]
        with tf.GradientTape() as tape:
            layer(x)
            losses.append(list(layer.losses))
            total = tf.add_n(layer.losses)
        grads.append(tape.gradient(total, [v.value for v in layer.trainable_variables]))
    assert len(losses[0]) == len(losses[1]) == 2
    assert relative_error(tf.add_n(losses[1]), tf.add_n(losses[0])) < 1e-14
    assert relative_error(grads[1][0], grads[0][0]) < 1e-14


def test_frozen_sublayers_stay(float64):
    results = []
    for wrap in (plainly, Recompute):
        model = network(sequential, wrap)
        inner = model.layers[1] if wrap is plainly else model.layers[1].layer
        inner.layers[1].trainable = False
        model.compile("sgd", "mse")
        frozen = inner.layers[1].get_weights()
        model.fit(images(4), tf.ones([4, 2], tf.float64), verbose=0, shuffle=False)
        assert relative_error(inner.layers[1].get_weights(), frozen) == 0
        results.append(model.get_weights())
    assert relative_error(*results) < 1e-10


def test_masks_pass_through():
    results = []
    for wrap in (plainly, Recompute):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,), dtype="int32")
        x = keras.layers.Embedding(10, 4, mask_zero=True)(inputs)
        x = wrap(keras.layers.LSTM(3, return_sequences=True))(x)
        model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(x))
        results.append(model(tf.constant([[1, 2, 3, 0, 0], [4, 0, 0, 0, 0]])))
    assert relative_error(*results) < 1e-6


def test_several_inputs_and_outputs(float64):
    @keras.saving.register_keras_serializable("tests")
    class Pair(keras.layers.Layer):
        def call(self, a, b, training=False):
            return {"sum": a + b, "product": a * b * (2 if training else 1)}

    a, b = keras.Input((3,)), keras.Input((3,))
    outputs = Recompute(Pair())(a, b)
    model = keras.Model([a, b], outputs)
    x = images(2, 1, 3)[:, 0, 0]
    assert np.allclose(model([x, x], training=True)["product"], 2 * x * x)


def test_metrics_inside_see_each_batch_once():
    class Counting(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean()

        def call(self, x):
            self.mean.update_state(tf.reduce_mean(x))
            return x * 2

    layer = Recompute(Counting())
    with tf.GradientTape() as tape:
        x = tf.Variable([3.0])
        y = layer(x)
    tape.gradient(y, x)
    assert layer.layer.mean.count.numpy() == 1
    assert layer.layer.mean.result().numpy() == 3
