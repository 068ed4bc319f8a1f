"""The process behind one case of `densenets.benchmark`: builds, measures, then steps when told to."""

import json
import sys
import time

import keras
import tensorflow as tf

import densenets
from densenets import dense_block, memory, zoo

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def main():
    """Builds the case of the first argument, prints what it found, then answers commands line by line."""
    case = json.loads(sys.argv[1])
    try:
        step, found = _prepare(**case)
        print(json.dumps(found), flush=True)
        for command in map(str.strip, sys.stdin):
            print(json.dumps(COMMANDS[command](step)), flush=True)
    except Exception as error:  # whatever it is, it is this case's result
        print(json.dumps({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}), flush=True)


def _timed(step):
    start = time.perf_counter()
    float(step())
    return {"seconds": time.perf_counter() - start}


def _measured(step):
    measured = memory.measure(step)
    return {"peak_bytes": measured.peak, "baseline_bytes": measured.baseline}


COMMANDS = {"step": _timed, "measure": _measured}


def _prepare(model, batch_size, mode, contender, task, precision="float32", **arguments):
    if contender.startswith("torch"):
        from densenets import benchmark_torch

        return benchmark_torch.prepare(model, batch_size, mode, contender, task)
    if mode == "xla":
        memory.watch_xla()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(precision)
    network = _network(model, contender, arguments)
    one_step = {"training": _training_step, "inference": _inference_step}[task](network, batch_size)
    step = one_step if mode == "eager" else tf.function(one_step, jit_compile=mode == "xla")
    start = time.perf_counter()
    measured = memory.measure(step)
    # `measure` steps twice; what the second takes is what every later one takes.
    first = time.perf_counter() - start
    start = time.perf_counter()
    float(step())
    first -= time.perf_counter() - start
    return step, {
        "peak_bytes": measured.peak,
        "baseline_bytes": measured.baseline,
        "compiled_bytes": measured.compiled,
        "first_step_seconds": first,
        "parameters": network.count_params(),
    }


def _training_step(network, batch_size):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    optimizer.build(network.trainable_variables)
    images = tf.random.normal([batch_size, *network.input_shape[1:]])
    labels = tf.zeros([batch_size], tf.int32)

    def one_step_on_data():  # the name of Keras' own, which `memory.watch_xla` looks for
        with tf.GradientTape() as tape:
            loss = LOSS(labels, network(images, training=True))
        grads = tape.gradient(loss, network.trainable_variables)
        optimizer.apply_gradients(zip(grads, network.trainable_variables, strict=True))
        return loss

    return one_step_on_data


def _inference_step(network, batch_size):
    images = tf.random.normal([batch_size, *network.input_shape[1:]])

    def one_step_on_data():
        return tf.reduce_sum(network(images, training=False))

    return one_step_on_data


def _network(model, contender, arguments):
    """The network of a case, giving logits; `arguments` are a builder's, for the strategies of densenets."""
    if contender == "remat":
        with keras.RematScope("full"):
            return _network(model, "keras", arguments)
    if contender == "recompute_grad":
        dense_block.STRATEGIES[contender] = _with_tf_recompute_grad
    by_size = model.replace("x", "").isdigit()
    if contender == "keras":
        return _plain_densenet(**design(model)) if by_size else _application(model)
    arguments = {"memory": contender, "classifier_activation": None} | arguments
    return densenets.DenseNetCifar(**design(model), **arguments) if by_size else densenets.create_model(model, **arguments)


def design(model):
    """The arguments of a builder that make the network of this name, or `LxK`: DenseNet-BC of depth L and growth rate K."""
    if not model.replace("x", "").isdigit():
        return zoo.arguments(model)
    depth, growth_rate = map(int, model.split("x"))
    return {"depth": depth, "growth_rate": growth_rate}


def _with_tf_recompute_grad(dense_layers, x, training):
    """What the `checkpoint` strategy would be on TensorFlow's own function. It moves the moving averages twice."""
    features = [x]
    for dense_layer in dense_layers:
        narrowed = tf.recompute_grad(lambda *features, layer=dense_layer: layer.narrow(*features, training=training))(*features)
        features.append(dense_layer.grow(narrowed, training=training))
    return keras.ops.concatenate(features, axis=-1)


def _application(model):
    name = "DenseNet" + model.removeprefix("densenet_")
    if not hasattr(keras.applications, name):
        raise ValueError(f"keras.applications has no {model}")
    return getattr(keras.applications, name)(weights=None, classifier_activation=None)


def _plain_densenet(depth, growth_rate):
    """DenseNet-BC for 32x32 images of plain Keras layers, as one writes it from the paper."""
    layers = keras.layers

    def norm_relu_conv(x, channels, size):
        x = layers.ReLU()(layers.BatchNormalization(epsilon=1e-5, momentum=0.9)(x))
        return layers.Conv2D(channels, size, padding="same", use_bias=False)(x)

    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(2 * growth_rate, 3, padding="same", use_bias=False)(inputs)
    for block in range(3):
        for _ in range((depth - 4) // 6):
            new = norm_relu_conv(norm_relu_conv(x, 4 * growth_rate, 1), growth_rate, 3)
            x = layers.Concatenate()([x, new])
        if block < 2:
            x = layers.AveragePooling2D(2)(norm_relu_conv(x, x.shape[-1] // 2, 1))
    x = layers.ReLU()(layers.BatchNormalization(epsilon=1e-5, momentum=0.9)(x))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


if __name__ == "__main__":
    main()
