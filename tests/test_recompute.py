"""The table: every mode that TensorFlow has, times every property that a recomputation must keep; then one test a promise."""

import functools
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import images, in_mode, peak_bytes, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

import densenets
from densenets import devices, memory, recompute

# === The table ===

MODES = ["eager", "graph", "xla", "v1_session", "while_loop", "map_fn", "mirrored", "mixed_bfloat16", "mixed_float16"]
PROPERTIES = ["outputs", "input_gradients", "variable_gradients", "moving_averages", "dropout_masks"]


class KerasNetwork:
    """Two segments conv-BN-dropout-ReLU, each wrapped."""

    def __init__(self, wrap):
        keras.utils.set_random_seed(3)
        layers = keras.layers
        self.segments = [
            keras.Sequential(
                [
                    keras.Input((6, 6, 3)),
                    layers.Conv2D(3, 3, padding="same"),
                    layers.BatchNormalization(),
                    layers.Dropout(0.4),
                    layers.ReLU(),
                ]
            )
            for _ in range(2)
        ]
        self.wrap = wrap

    def __call__(self, x):
        for segment in self.segments:
            x = self.wrap(functools.partial(segment, training=True))(x)
        return x

    def collect(self, attribute):
        return [v for segment in self.segments for v in getattr(segment, attribute)]

    def step(self, x, loop=None):
        trainable = [v.value for v in self.collect("trainable_variables")]
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = (loop or type(self).__call__)(self, x)
            loss = tf.reduce_sum(tf.cast(outputs, tf.float64) ** 2)
        grads = tape.gradient(loss, [x, *trainable])
        return outputs, grads[0], grads[1:]

    def results(self, step, x):
        step(x)
        outputs, input_gradients, variable_gradients = step(x)  # the second, so that state has moved
        return {
            "outputs": outputs,
            "input_gradients": input_gradients,
            "variable_gradients": variable_gradients,
            "moving_averages": [v.value for v in self.collect("non_trainable_variables") if "moving" in v.path],
            # Both the masks of the second step and where each seed generator stands after it.
            "dropout_masks": [outputs == 0, *[v.value for v in self.collect("variables") if "seed" in v.path]],
        }


def run_while_loop(network, x):
    return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, network(x)), [0, x])[1]


def run_map_fn(network, x):
    return tf.map_fn(lambda image: network(image[None])[0], x)


def run_v1_session(wrap):
    """Plain variables in a graph of TensorFlow 1, where Keras layers do not run."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        kernels = [tf.Variable(images(3, 3, 9, seed=i)[0], use_resource=True) for i in (1, 2)]
        kernels = [tf.Variable(tf.reshape(k.initial_value, [3, 3, 3, 3]), use_resource=True) for k in kernels]
        moving = [tf.Variable(tf.zeros([3], tf.float64), trainable=False) for _ in kernels]
        x = images(2, 6)
        moves = []

        def segment(x, i=0, is_recomputing=False):
            y = tf.nn.conv2d(x, kernels[i], 1, "SAME")
            mean, variance = tf.nn.moments(y, [0, 1, 2])
            if not is_recomputing:
                moves.append(moving[i].assign(0.9 * moving[i] + 0.1 * mean))
            y = (y - mean) * tf.math.rsqrt(variance + 1e-3)
            return tf.nn.relu(tf.nn.experimental.stateless_dropout(y, 0.4, seed=[i, 7]))

        y = x
        for i in range(2):
            y = wrap(segment)(y, i=i)
        grads = tf.gradients(tf.reduce_sum(y**2), [x, *kernels])
        session.run(tf.compat.v1.global_variables_initializer())
        assert len(moves) == 2
        outputs, grads, _ = session.run([y, grads, moves])
        return {
            "outputs": outputs,
            "input_gradients": grads[0],
            "variable_gradients": grads[1:],
            "moving_averages": session.run(moving),
            "dropout_masks": outputs == 0,
        }


def run_mirrored(wrap):
    strategy = devices.make_strategy("mirrored")
    with strategy.scope():
        network = KerasNetwork(wrap)

    @tf.function
    def distributed(x):
        def replica():
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
            return network.step(x + tf.cast(index, x.dtype))

        return tf.nest.map_structure(lambda v: tf.stack(strategy.experimental_local_results(v)), strategy.run(replica))

    return network.results(distributed, images(2, 6))


@functools.cache
def results(mode, wrap):
    """What a step of the network comes to in a mode, as NumPy arrays."""
    half = mode.startswith("mixed")
    keras.config.set_floatx("float32" if half else "float64")
    keras.config.set_dtype_policy(mode if half else "float64")
    if mode == "v1_session":
        found = run_v1_session(wrap)
    elif mode == "mirrored":
        found = run_mirrored(wrap)
    else:
        network = KerasNetwork(wrap)
        loop = {"while_loop": run_while_loop, "map_fn": run_map_fn}.get(mode)
        step = in_mode(functools.partial(network.step, loop=loop), mode)
        found = network.results(step, images(2, 6, dtype="float32" if half else "float64"))
    return tf.nest.map_structure(lambda v: None if v is None else np.asarray(v), found)


def plainly(fn):
    return fn


@pytest.mark.parametrize("prop", PROPERTIES)
@pytest.mark.parametrize("mode", MODES)
def test_recomputed_equals_plain(mode, prop):
    ours, plain = results(mode, recompute)[prop], results(mode, plainly)[prop]
    # In half precision the same operations round alike.
    assert relative_error(ours, plain) < 1e-10
    if prop != "dropout_masks":
        assert all(np.any(v) for v in tf.nest.flatten(plain))  # there was something to compare


# === Memory ===


def chain(units_per_segment, wrap):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    segments = []
    for _ in range(24):
        segment = keras.Sequential([keras.Input((16, 16, 16))])
        for _ in range(units_per_segment):
            segment.add(layers.Conv2D(16, 3, padding="same", use_bias=False))
            segment.add(layers.BatchNormalization())
            segment.add(layers.ReLU())
        segments.append(segment)
    variables = [v.value for segment in segments for v in segment.trainable_variables]

    def step(x):
        with tf.GradientTape() as tape:
            for segment in segments:
                x = wrap(lambda x, segment=segment: segment(x, training=True))(x)
            loss = tf.reduce_sum(x**2)
        return tape.gradient(loss, variables)

    return step


@functools.cache
def chain_peak(units_per_segment, wrap, mode):
    gc.collect()
    return peak_bytes(chain(units_per_segment, wrap), mode, images(32, 16, 16, dtype="float32"))


def test_chain_of_24_segments_needs_about_a_third(mode):
    plain, ours = (chain_peak(3, wrap, mode) for wrap in (plainly, recompute))
    assert ours <= 0.35 * plain


def test_single_units_need_what_arithmetic_says(mode):
    plain, ours = (chain_peak(1, wrap, mode) for wrap in (plainly, recompute))
    # A unit conv-BN-ReLU keeps two tensors, its wrapped form one (its input); a few more live while one unit is at work.
    tensor = 32 * 16 * 16 * 16 * 4
    # The weights' gradients are half a tensor; eagerly some more live until Python's collector comes.
    at_work = {"eager": 18, "graph": 7, "xla": 4}[mode]
    assert ours <= (24 + at_work) * tensor
    assert ours <= 0.6 * plain


def units(count, dtype):
    """`count` units of convolution and ReLU on variables of TensorFlow's own, which every mode runs; and the variables."""
    kernels = [tf.Variable(tf.random.stateless_normal([3, 3, 8, 8], [i, 1], stddev=0.1)) for i in range(count)]

    def segment(x):
        for kernel in kernels:
            x = tf.nn.relu(tf.nn.conv2d(x, tf.cast(kernel, dtype), 1, "SAME"))
        return x

    return segment, kernels


def loop_step(wrap, dtype):
    segment, kernels = units(4, dtype)

    def step(x):
        with tf.GradientTape() as tape:
            y = tf.while_loop(lambda i, x: i < 8, lambda i, x: (i + 1, wrap(segment)(x)), [0, x])[1]
            loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
        return tape.gradient(loss, kernels)

    return step


def chain_step(wrap, dtype):
    segments, kernels = zip(*[units(4, dtype) for _ in range(8)], strict=True)

    def step(x):
        with tf.GradientTape() as tape:
            for segment in segments:
                x = wrap(segment)(x)
            loss = tf.reduce_sum(tf.cast(x, tf.float32) ** 2)
        return tape.gradient(loss, list(kernels))

    return step


def peak_in(mode, wrap):
    """The peak of a step over 8 segments of 4 units each."""
    dtype = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}.get(mode, "float32")
    shape = [16, 32, 32, 8]
    if mode == "v1_session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x, segments = tf.ones(shape), [units(4, dtype) for _ in range(8)]
            for segment, _ in segments:
                x = wrap(segment)(x)
            grads = tf.gradients(tf.reduce_sum(x**2), [kernel for _, kernels in segments for kernel in kernels])
            session.run(tf.compat.v1.global_variables_initializer())
            return memory.measure(session.run, [tf.reduce_sum(grad) for grad in grads]).peak
    x = tf.ones(shape, dtype)
    if mode == "mirrored":
        strategy = devices.make_strategy("mirrored")
        with strategy.scope():
            step = chain_step(wrap, dtype)
        return memory.measure(tf.function(lambda: strategy.run(step, [x]))).peak
    step = (loop_step if mode == "while_loop" else chain_step)(wrap, dtype)
    return memory.measure(tf.function(step), x).peak


@pytest.mark.parametrize("mode", ["v1_session", "while_loop", "mirrored", "mixed_bfloat16", "mixed_float16"])
def test_memory_falls_in_every_other_mode_too(mode):
    gc.collect()
    # Of 8 * 4 tensors, 8 inputs and the 4 of the segment at work are left, and what that needs. In float16 TensorFlow's
    # convolution takes more workspace on a CPU than all the tensors.
    assert peak_in(mode, recompute) <= (0.8 if mode == "mixed_float16" else 0.6) * peak_in(mode, plainly)


def test_tf_recompute_grad_for_the_record(mode):
    """TensorFlow's own function moves every moving average twice, and saves as much on this chain only where order is kept."""
    segment = keras.Sequential([keras.Input((4, 4, 2)), keras.layers.BatchNormalization(momentum=0.5)])
    moving = segment.non_trainable_variables[0]

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.recompute_grad(lambda x: segment(x, training=True))(x)
        return tape.gradient(y, x)

    in_mode(step, mode)(tf.ones([1, 4, 4, 2]))
    assert moving.numpy() == pytest.approx(0.75)  # once would be 0.5
    if mode != "graph":
        assert chain_peak(3, tf.recompute_grad, mode) <= 0.35 * chain_peak(3, plainly, mode)
    # In a plain graph it is between a fifth and all of the plain chain's peak, as the executor happens to order the gradients.


# === Decorator and arguments ===


def gradients(fn, inputs, mode="eager"):
    """The result of `fn` and its gradients, `None`s and all, by a loss that weighs every element differently."""

    def step(*inputs):
        with tf.GradientTape() as tape:
            tape.watch([x for x in inputs if x.dtype.is_floating])
            results = fn(*inputs)
            loss = tf.add_n(
                [
                    tf.reduce_sum(y * tf.reshape(tf.cast(tf.range(1, tf.size(y) + 1), y.dtype), tf.shape(y)))
                    for y in tf.nest.flatten(results)
                    if y.dtype.is_floating
                ]
            )
        grads = tape.gradient(loss, list(inputs))
        return results, [None if g is None else tf.convert_to_tensor(g) for g in grads]

    return in_mode(step, mode)(*inputs)


def vector(*values):
    return tf.constant(values, tf.float64)


def test_every_way_of_decorating():
    def fn(x):
        return x**2

    x = vector(1, 2)
    expected = gradients(fn, [x])
    for decorated in (
        recompute(fn),
        recompute(use_data_dep=True)(fn),
        recompute(use_data_dep=False, tupleize_grads=True)(fn),
        densenets.recompute_grad(fn),
    ):
        assert decorated.__name__ == "fn"
        assert relative_error(gradients(decorated, [x]), expected) == 0
    assert densenets.recompute_grad is densenets.recompute


@pytest.mark.parametrize("use_data_dep", [None, True, False])
@pytest.mark.parametrize("tupleize_grads", [True, False])
def test_ordering_never_changes_the_result(use_data_dep, tupleize_grads, mode):
    def fn(x, y):
        return tf.sin(x) * y, tf.cast(y, tf.float64)

    decorate = recompute(use_data_dep=use_data_dep, tupleize_grads=tupleize_grads)
    inputs = [vector(1, 2, 3), vector(4, 5, 6)]
    assert relative_error(gradients(decorate(fn), inputs, mode), gradients(fn, inputs, mode)) < 1e-14


def test_infinite_and_missing_gradients_do_not_leak_through_the_data_dependency():
    def step(x, dy):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = recompute(lambda x: tf.stack([x[0] * 2, x[1] * 3]), use_data_dep=True)(x)
        return tape.gradient(y, x, output_gradients=dy)

    grads = tf.function(step, jit_compile=True)(vector(1, 2), vector(np.inf, 1))
    assert np.array_equal(grads, [np.inf, 3])


def test_is_recomputing_is_false_then_true():
    seen = []

    @recompute
    def fn(x, is_recomputing):
        seen.append(is_recomputing)
        return x**2

    gradients(fn, [vector(1, 2)])
    assert seen == [False, True]


def test_nested_structures_and_keyword_arguments(mode):
    def fn(pair, *, table, scale, name):
        assert name == "any object"
        return {"sum": pair[0] + table["b"], "rest": [pair[1] * scale, (table["c"],)]}

    def call(a, b, c, d, wrap=plainly):
        return wrap(fn)((a, d), table={"b": b, "c": c}, scale=2.0, name="any object")

    inputs = [vector(1), vector(2), vector(3), vector(4)]
    ours = gradients(functools.partial(call, wrap=recompute), inputs, mode)
    assert relative_error(ours, gradients(call, inputs, mode)) == 0


def test_integers_and_booleans_pass_without_gradients(mode):
    def fn(x, index, flag):
        return tf.gather(x, index) * tf.cast(flag, x.dtype), index + 1, tf.logical_not(flag)

    inputs = [vector(1, 2, 3), tf.constant([2, 0]), tf.constant([True, False])]
    assert relative_error(gradients(recompute(fn), inputs, mode), gradients(fn, inputs, mode)) == 0


def test_one_tensor_in_two_positions(mode):
    def call(wrap, x):
        return wrap(lambda a, b: a**2 * b)(x, x)

    x = [vector(1, 2)]
    ours = gradients(functools.partial(call, recompute), x, mode)
    assert relative_error(ours, gradients(functools.partial(call, plainly), x, mode)) < 1e-14


def test_none_where_the_plain_function_has_none(mode):
    def fn(x, unused):
        return x * 2, tf.stop_gradient(unused)

    assert gradients(recompute(fn), [vector(1), vector(2)], mode)[1][1] is None
    variable, idle = tf.Variable(vector(1, 2)), tf.Variable(vector(3))

    def step():
        with tf.GradientTape() as tape:
            y = recompute(lambda: variable * 2 + 0 * tf.stop_gradient(idle))()
        return tape.gradient(y, [variable, idle])

    ours = in_mode(step, mode)()
    assert np.array_equal(ours[0], [2, 2])
    assert ours[1] is None


def test_variables_alone_need_no_inputs(mode):
    variable = tf.Variable(vector(1, 2))

    def step(wrap):
        with tf.GradientTape() as tape:
            y = wrap(lambda: tf.sin(variable) ** 2)()
        return tape.gradient(y, variable)

    assert relative_error(in_mode(functools.partial(step, recompute), mode)(), step(plainly)) < 1e-14


def test_embeddings_have_dense_gradients(mode):
    table = tf.Variable(tf.ones([5, 2], tf.float64))

    def step(wrap):
        with tf.GradientTape() as tape:
            y = wrap(lambda ids: tf.nn.embedding_lookup(table, ids) ** 3)(tf.constant([1, 1, 4]))
        return tf.convert_to_tensor(tape.gradient(y, table))

    assert relative_error(in_mode(functools.partial(step, recompute), mode)(), step(plainly)) == 0


def test_ragged_tensors(mode):
    if mode == "xla":
        pytest.skip("XLA does not compile ragged tensors")
    values = [vector(1, 2, 3)]

    def call(wrap, values):
        ragged = tf.RaggedTensor.from_row_lengths(values, [1, 2])
        return wrap(lambda r: tf.reduce_sum(r**2, axis=1))(ragged)

    ours = gradients(functools.partial(call, recompute), values, mode)
    assert relative_error(ours, gradients(functools.partial(call, plainly), values, mode)) < 1e-14


def test_layers_built_in_the_first_call(mode, float64):
    def step(wrap):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])

        def train(x):
            with tf.GradientTape() as tape:
                y = wrap(lambda x: model(x, training=True))(x)
            return y, tape.gradient(y, [v.value for v in model.trainable_variables])

        train = in_mode(train, mode)
        x = images(3, 1, 2)[:, 0, 0]
        return train(x), train(x), [v.numpy() for v in model.variables]

    assert relative_error(step(recompute), step(plainly)) < 1e-12


def test_tensors_closed_over_have_their_gradients(mode):
    def call(wrap, x, scale, offset):
        wrapped = scale * 2  # a tensor that is no argument of either

        def fn(x, offset=offset):
            return x * wrapped + offset * scale

        return wrap(fn)(x)

    inputs = [vector(1, 2), vector(3, 4), vector(5, 6)]
    ours = gradients(functools.partial(call, recompute), inputs, mode)
    assert relative_error(ours, gradients(functools.partial(call, plainly), inputs, mode)) < 1e-14


@pytest.mark.parametrize("size", [1, 1000])  # a graph takes in a small tensor as a constant, a large one as a placeholder
def test_tensors_from_outside_of_the_graph_have_their_gradients(size, mode):
    held, variable = tf.fill([size], vector(3)[0]), tf.Variable(tf.fill([size], vector(2)[0]))

    def step(wrap):
        with tf.GradientTape() as tape:
            tape.watch(held)
            y = wrap(lambda: held**2 * variable)()
        return tape.gradient(y, [held, variable])

    assert relative_error(in_mode(functools.partial(step, recompute), mode)(), step(plainly)) < 1e-14


def test_a_tensor_that_is_argument_and_closed_over(mode):
    def call(wrap, x):
        return wrap(lambda y: y * x)(x)

    ours = gradients(functools.partial(call, recompute), [vector(3, 4)], mode)
    assert relative_error(ours, gradients(functools.partial(call, plainly), [vector(3, 4)], mode)) < 1e-14


def test_tensors_held_by_objects_have_their_gradients(mode):
    class Holder:
        pass

    def call(wrap, x, held):
        holder = Holder()
        holder.tensor = held
        return wrap(lambda x: x * holder.tensor)(x)

    inputs = [vector(1, 2), vector(3, 4)]
    ours = gradients(functools.partial(call, recompute), inputs, mode)
    assert relative_error(ours, gradients(functools.partial(call, plainly), inputs, mode)) == 0


def test_nested(mode, float64):
    def step(wrap):
        network = KerasNetwork(plainly)

        def outer(x):
            for segment in network.segments:
                x = wrap(functools.partial(segment, training=True))(x)
            return x

        def train(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(wrap(outer)(x) ** 2)
            return y, tape.gradient(y, [x, *[v.value for v in network.collect("trainable_variables")]])

        train = in_mode(train, mode)
        return train(images(2, 6)), train(images(2, 6)), [v.value for v in network.collect("variables")]

    assert relative_error(step(recompute), step(plainly)) < 1e-10


def test_persistent_tape_and_shared_weights(float64):
    dense = keras.layers.Dense(3)
    x = images(2, 1, 3)[:, 0, 0]

    def step(wrap):
        with tf.GradientTape(persistent=True) as tape:
            y = x
            for _ in range(5):
                y = wrap(lambda y: tf.tanh(dense(y)))(y)
            loss = tf.reduce_sum(y)
        sources = [v.value for v in dense.trainable_variables]
        return [tape.gradient(loss, sources) for _ in range(2)]

    assert relative_error(step(recompute), step(plainly)) < 1e-12


def test_second_derivatives():
    def second(wrap):
        x = vector(1, 2)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = wrap(lambda x: tf.sin(x) * x**2)(x)
            dx = inner.gradient(y, x)
        return outer.gradient(dx, x)

    assert relative_error(second(recompute), second(plainly)) < 1e-14


def test_layer_inherits_training_and_autocast_in_both_runs(mode):
    """A layer whose `call` recomputes a part of itself: that part must find the outer layer's context again."""

    class Outer(keras.layers.Layer):
        def __init__(self, wrap, **kwargs):
            super().__init__(**kwargs)
            self.wrap = wrap
            self.dropout = keras.layers.Dropout(0.5, seed=1, dtype=self.dtype_policy)
            self.norm = keras.layers.BatchNormalization(dtype=self.dtype_policy)

        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 4))
            self.norm.build((*shape[:-1], 4))

        def call(self, x):
            return self.wrap(lambda x: self.dropout(self.norm(tf.matmul(x, tf.convert_to_tensor(self.kernel)))))(x)

    def step(wrap):
        keras.utils.set_random_seed(1)
        layer = Outer(wrap, dtype="mixed_bfloat16")
        layer.build((None, 3))

        def train(x):
            with tf.GradientTape() as tape:
                y = layer(x, training=True)
                loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
            return y, tape.gradient(loss, [v.value for v in layer.trainable_variables])

        y, grads = in_mode(train, mode)(images(8, 1, 3, "float32")[:, 0, 0])
        assert y.dtype == tf.bfloat16
        assert np.any(np.asarray(y, "float32") == 0)  # dropout was at work
        return y, grads

    assert relative_error(step(recompute), step(plainly)) < 1e-10


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_small_network_argument_structure_and_dtype(data):
    dtype = data.draw(st.sampled_from(["float64", "float32", "complex128"]))
    widths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    kernels, width = [], 2
    for new in widths:
        kernels.append(tf.Variable(rng.normal(size=(width, new)), dtype=dtype))
        width = new
    leaves = [tf.constant(rng.normal(size=(3, 2)), dtype) for _ in range(data.draw(st.integers(1, 3)))]
    structure = data.draw(st.sampled_from([list, tuple, lambda leaves: {str(i): [x] for i, x in enumerate(leaves)}]))
    extra = data.draw(st.sampled_from([tf.constant([0, 2, 1]), tf.constant([True, False, True]), None]))
    activation = data.draw(st.sampled_from([tf.sin, tf.tanh, tf.identity]))
    wrap = recompute(tupleize_grads=data.draw(st.booleans()), use_data_dep=data.draw(st.sampled_from([None, True])))

    def fn(inputs, extra=None):
        x = tf.add_n(tf.nest.flatten(inputs))
        if extra is not None:
            x = tf.gather(x, extra) if extra.dtype.is_integer else tf.boolean_mask(x, extra)
        for kernel in kernels:
            x = activation(tf.matmul(x, kernel))
        return tf.nest.map_structure(lambda leaf: leaf * 2, inputs), x

    def step(wrap, mode):
        def train(*leaves):
            with tf.GradientTape() as tape:
                tape.watch(leaves)
                results = wrap(fn)(structure(list(leaves)), extra=extra)
                loss = tf.add_n([tf.reduce_sum(tf.math.real(y) ** 2) for y in tf.nest.flatten(results)])
            return results, tape.gradient(loss, [*leaves, *kernels])

        return in_mode(train, mode)(*leaves)

    mode = data.draw(st.sampled_from(["eager", "graph"]))
    assert relative_error(step(wrap, mode), step(plainly, mode)) < {"float32": 1e-5}.get(dtype, 1e-12)


# === Refusals ===


@pytest.mark.parametrize("argument", [3.0, None, "name", True])
def test_refuses_a_positional_argument_that_is_no_tensor(argument):
    def double(x, factor):
        return x * factor

    with pytest.raises(TypeError, match=r"`double`: positional argument leaf 1 is .* which is no tensor. Pass it by keyword"):
        recompute(double)(vector(1), argument)


def test_arrays_and_variables_are_tensors_enough():
    variable = tf.Variable(vector(2, 3))
    with tf.GradientTape() as tape:
        y = recompute(lambda x, v: x * v)(np.array([4.0, 5.0]), variable)
    assert np.array_equal(tape.gradient(y, variable), [4, 5])


@pytest.mark.parametrize("result", [None, 3, [None, "text"]])
def test_refuses_a_function_that_returns_no_tensor(result):
    with pytest.raises(TypeError, match="must return a tensor or a structure with tensors"):
        recompute(lambda x: result)(vector(1))


def test_refuses_other_variables_in_the_recomputation(mode):
    a, b = tf.Variable(1.0, name="a"), tf.Variable(2.0, name="b")

    @recompute
    def fn(x, is_recomputing):
        return x * (b if is_recomputing else a)

    with pytest.raises(ValueError, match=r"read other trainable variables .* first run: \['a:0'\].*recomputation: \['b:0'\]"):
        gradients(fn, [tf.constant([1.0])], mode)


def test_refuses_random_numbers_that_cannot_be_drawn_again(mode):
    generator = tf.random.Generator.from_seed(1)
    for fn in (
        lambda x: x * tf.random.uniform([2]),
        lambda x: tf.nn.dropout(x, 0.5),
        lambda x: x + generator.normal([2]),
    ):
        with pytest.raises(ValueError, match="draws random numbers with the stateful operation .*SeedGenerator"):
            in_mode(recompute(fn), mode)(tf.constant([1.0, 2.0]))


def test_stateless_random_numbers_are_drawn_again(mode):
    def fn(x, seed):
        return x * tf.random.stateless_uniform([3], seed, dtype=x.dtype)

    inputs = [vector(1, 2, 3), tf.constant([1, 2])]
    assert relative_error(gradients(recompute(fn), inputs, mode), gradients(fn, inputs, mode)) == 0


def test_refuses_losses_and_symbolic_tensors_and_names_the_layer_for_them():
    layer = keras.layers.ActivityRegularization(l2=0.1)
    with pytest.raises(ValueError, match=r"calls `add_loss` inside `recompute`.*densenets.layers.Recompute"):
        recompute(layer)(tf.ones([2, 2]))
    with pytest.raises(TypeError, match=r"symbolic Keras tensor.*densenets.layers.Recompute\(layer\)\(x\)"):
        recompute(keras.layers.Dense(2))(keras.Input((3,)))


def test_refuses_state_that_changes_inside_a_loop_inside():
    norm = keras.layers.BatchNormalization()
    norm.build((None, 2))

    @tf.function
    def step(x):
        body = lambda i, x: (i + 1, norm(x, training=True))  # noqa: E731
        return recompute(lambda x: tf.while_loop(lambda i, x: i < 2, body, [0, x])[1])(x)

    with pytest.raises(ValueError, match="moving_mean' inside a loop or a branch.*Wrap the body of the loop"):
        step(tf.ones([3, 2]))


def test_refuses_what_is_no_function():
    with pytest.raises(TypeError, match="`fn` must be a function or a layer, got 3"):
        recompute(3)
