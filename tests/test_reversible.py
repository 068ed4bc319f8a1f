import functools
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import images, in_mode, peak_bytes, relative_error

import densenets
from densenets import RevBlock, rev_block


def plain_block(x1, x2, f, g, num_layers=1, f_side_input=None, g_side_input=None):
    """Equation 6 of arXiv:1707.04585, under automatic differentiation."""
    f, g = (fn if isinstance(fn, list) else [fn] * num_layers for fn in (f, g))
    for f_i, g_i in zip(f, g, strict=True):
        x1 = x1 + (f_i(x2) if f_side_input is None else f_i(x2, f_side_input))
        x2 = x2 + (g_i(x1) if g_side_input is None else g_i(x1, g_side_input))
    return x1, x2


def residual(channels=3, dropout=0.3):
    return keras.Sequential(
        [
            keras.Input((6, 6, channels)),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Conv2D(channels, 3, padding="same"),
            keras.layers.Dropout(dropout),
        ]
    )


def halves(channels=3, size=6):
    return images(2, size, channels), images(2, size, channels, seed=1)


@pytest.mark.parametrize("shared", [True, False])
def test_equals_plain(shared, mode, float64):
    def results(block):
        keras.utils.set_random_seed(1)
        pairs = [(residual(), residual()) for _ in range(1 if shared else 3)]
        f, g = ([functools.partial(layer, training=True) for layer in layers] for layers in zip(*pairs, strict=True))
        layers = [layer for pair in pairs for layer in pair]

        def step(x1, x2):
            with tf.GradientTape() as tape:
                tape.watch([x1, x2])
                y1, y2 = block(x1, x2, f[0] if shared else f, g[0] if shared else g, num_layers=3)
                loss = tf.reduce_sum(y1**2) + tf.reduce_sum(tf.sin(y2))
            sources = [x1, x2, *[v.value for layer in layers for v in layer.trainable_variables]]
            return y1, y2, tape.gradient(loss, sources)

        step = in_mode(step, mode)
        return step(*halves()), step(*halves()), [v.value for layer in layers for v in layer.variables]

    assert relative_error(results(rev_block), results(plain_block)) < 1e-10


def test_side_inputs_and_tensors_closed_over_have_gradients(mode):
    side_f, side_g, closed = (images(1, 1, 3, seed=s)[0] for s in (2, 3, 4))

    def step(block, x1, x2):
        with tf.GradientTape() as tape:
            sources = [x1, x2, side_f, side_g, closed]
            tape.watch(sources)
            arguments = {"num_layers": 2, "f_side_input": [side_f], "g_side_input": [side_g]}
            y1, y2 = block(x1, x2, lambda x, s: tf.sin(x * s[0]), lambda x, s: tf.tanh(x + s[0] * closed), **arguments)
            loss = tf.reduce_sum(y1 * y2)
        return y1, y2, tape.gradient(loss, sources)

    ours = in_mode(functools.partial(step, rev_block), mode)(*halves())
    assert relative_error(ours, step(plain_block, *halves())) < 1e-10


def test_only_one_half_used(mode):
    def step(block, x1, x2):
        with tf.GradientTape() as tape:
            tape.watch([x1, x2])
            y1, _ = block(x1, x2, tf.sin, tf.tanh)
        return tape.gradient(y1, [x1, x2])

    ours = in_mode(functools.partial(step, rev_block), mode)(*halves())
    assert relative_error(ours, step(plain_block, *halves())) < 1e-12


def test_without_training_it_is_plain(float64):
    x1, x2 = halves()
    assert (
        relative_error(rev_block(x1, x2, tf.sin, tf.tanh, 2, is_training=False), plain_block(x1, x2, tf.sin, tf.tanh, 2)) == 0
    )


def block_layer(num_layers=2, **kwargs):
    layers = [[residual() for _ in range(num_layers)] for _ in range(2)]
    return RevBlock(*layers, num_layers=num_layers, **kwargs)


def test_layer_trains_saves_and_loads(tmp_path, mode):
    inputs = keras.Input((6, 6, 6))
    y1, y2 = block_layer(name="rev")([inputs[..., :3], inputs[..., 3:]])
    outputs = keras.layers.GlobalAveragePooling2D()(keras.layers.Concatenate()([y1, y2]))
    model = keras.Model(inputs, outputs)
    assert len(model.get_layer("rev").trainable_variables) == 16
    model.compile("sgd", "mse", run_eagerly=mode == "eager", jit_compile=mode == "xla")
    before = model.get_weights()
    model.fit(images(4, 6, 6, "float32"), tf.ones([4, 6]), verbose=0)
    assert all(np.any(a != b) for a, b in zip(model.get_weights(), before, strict=True))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x = images(4, 6, 6, "float32")
    assert relative_error(loaded(x), model(x)) == 0
    script = f"import densenets, keras; print(keras.models.load_model({str(tmp_path / 'model.keras')!r}).count_params())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == str(model.count_params())


def test_layer_backward_is_the_inverse_of_forward(float64):
    layer = block_layer(3)
    x1, x2 = halves()
    y1, y2 = layer.forward(x1, x2)
    assert relative_error((y1, y2), layer((x1, x2))) == 0
    assert relative_error(layer.backward(y1, y2), (x1, x2)) < 1e-12


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_activation_memory_does_not_grow_with_the_layers(mode):
    def peak(num_layers):
        layers = [(residual(8, 0.0), residual(8, 0.0)) for _ in range(num_layers)]
        f, g = ([functools.partial(layer, training=True) for layer in part] for part in zip(*layers, strict=True))
        variables = [v.value for pair in layers for layer in pair for v in layer.trainable_variables]

        def step(x1, x2):
            with tf.GradientTape() as tape:
                y1, y2 = rev_block(x1, x2, f, g, num_layers)
                loss = tf.reduce_sum(y1 * y2)
            return tape.gradient(loss, variables)

        x = images(32, 16, 8, "float32")
        weights = sum(v.shape.num_elements() * 4 for v in variables)
        # Gradients, and in XLA's figure the weights too, do grow.
        return peak_bytes(step, mode, x, x) - weights * (2 if mode == "xla" else 1)

    # In a graph the executor's choice of order may leave one tensor more alive, and how many it leaves with 4 varies too.
    one_more = 0 if mode == "xla" else 32 * 16 * 16 * 8 * 4
    assert abs(peak(32) - peak(4)) <= 0.1 * peak(4) + one_more


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 0}, "`num_layers` must be a positive integer, got 0"),
        ({"f": [tf.sin], "num_layers": 2}, "`f` lists 1 functions for `num_layers` = 2"),
        (
            {"f": lambda x: x[..., :1]},
            r"`f` must return a tensor of its input's shape .* \(2, 6, 6, 3\); got float64 \(2, 6, 6, 1\)",
        ),
        (
            {"g": lambda x: tf.cast(x, tf.float32)},
            "`g` must return a tensor of its input's shape and dtype, float64 .*got float32",
        ),
        ({"g": lambda x: None}, "`g` must return a tensor .* got None"),
        ({"x1": tf.zeros([1, 2, 3], tf.float64)}, "`x1` and `x2` must have one shape"),
        ({"f": lambda x: x * tf.random.uniform([], dtype=x.dtype)}, "stateful operation RandomUniform"),
    ],
)
def test_refuses_what_cannot_be_undone(arguments, message):
    x1, x2 = halves()
    with pytest.raises(ValueError, match=message):
        rev_block(**({"x1": x1, "x2": x2, "f": tf.sin, "g": tf.tanh} | arguments))


def test_layer_refuses_functions():
    with pytest.raises(TypeError, match="`f` and `g` must be Keras layers, got .*Use `rev_block`"):
        RevBlock(tf.sin, keras.layers.Dense(2))
    assert densenets.RevBlock is RevBlock
