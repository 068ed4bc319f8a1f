"""DenseNet: stem, dense blocks with transitions between them, head (arXiv:1608.06993, table 1)."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import layers

from densenets import weights as weights_module
from densenets.dense_block import DenseBlock, Transition, he_fan_out
from densenets.stem import Stem

STEMS = ("imagenet", "cifar")


def DenseNet(
    blocks: Sequence[int],
    growth_rate: int,
    *,
    bottleneck: bool = True,
    compression: float = 0.5,
    stem: str = "imagenet",
    dropout_rate: float = 0.0,
    memory: str = "shared",
    include_top: bool = True,
    weights: str | os.PathLike | None = None,
    input_tensor: keras.KerasTensor | None = None,
    input_shape: tuple[int | None, ...] | None = None,
    pooling: str | None = None,
    classes: int = 1000,
    classifier_activation: str | Callable | None = "softmax",
    name: str = "densenet",
) -> keras.Model:
    """Builds a DenseNet as a Functional model.

    Every dense block is a layer of its own, named `conv2`, `conv3`, ...; its output serves segmentation and detection:

    ```python
    model = densenets.DenseNet121(include_top=False, input_shape=(224, 224, 3))
    pyramid = keras.Model(model.input, [model.get_layer(f"conv{i}").output for i in (2, 3, 4, 5)])  # strides 4, 8, 16, 32
    ```

    Args:
        blocks: the number of layers in each dense block.
        growth_rate: k, the features that each layer adds.
        bottleneck: whether a 1x1 convolution to 4k channels precedes each 3x3 (DenseNet-B).
        compression: theta, the share of the channels that a transition hands on (0.5 for DenseNet-C, 1 for none).
        stem: `"imagenet"` (7x7 convolution and 3x3 pooling, stride 4 together) or `"cifar"` (3x3 convolution, stride 1).
        dropout_rate: the share of values dropped after each convolution but the first.
        memory: how the dense blocks compute; see `densenets.layers.DenseBlock`. It changes neither weights nor results.
        include_top: whether pooling and the classifier stand at the end.
        weights: `None` for a new network; `"imagenet"` for the files that Keras Applications publishes of DenseNet-121, 169
            and 201; or the path of a file in any layout that `densenets.weights.load` knows.
        input_tensor: a Keras tensor to build on, instead of a new input.
        input_shape: `(height, width, channels)`, entries of `None` for unknown sizes. By default 224x224x3 or 32x32x3 with
            `include_top`, else unknown sizes with 3 channels.
        pooling: without `include_top`: `"avg"`, `"max"` or `None` for the feature map itself.
        classes: the number of classes.
        classifier_activation: of the classifier; `None` gives logits.
        name: of the model.

    Returns:
        A `keras.Model`.

    Raises:
        ValueError: for an argument out of its range, naming it.
    """
    blocks = tuple(blocks)
    _check(blocks, growth_rate, stem, pooling, classes)
    inputs, x = _input(stem, len(blocks), include_top, input_tensor, input_shape)
    if weights == "imagenet":
        design = (blocks, growth_rate, bottleneck, compression, stem)
        published = weights_module.imagenet(design, include_top, x.shape, classes, classifier_activation)

    # === Stem ===
    if stem == "imagenet":
        x = Stem(2 * growth_rate, memory=memory, name="conv1")(x)
    else:
        # "16 (or twice the growth rate for DenseNet-BC) output channels" (section 3, "Implementation Details")
        channels = 2 * growth_rate if bottleneck and compression < 1 else 16
        conv = {"padding": "same", "use_bias": False, "kernel_initializer": he_fan_out()}
        x = layers.Conv2D(channels, 3, name="conv1_conv", **conv)(x)

    # === Dense blocks ===
    for i, num_layers in enumerate(blocks, start=2):
        x = DenseBlock(
            num_layers, growth_rate, bottleneck=bottleneck, dropout_rate=dropout_rate, memory=memory, name=f"conv{i}"
        )(x)
        if i < len(blocks) + 1:
            x = Transition(compression, dropout_rate=dropout_rate, name=f"pool{i}")(x)

    # === Head ===
    x = layers.BatchNormalization(epsilon=1e-5, momentum=0.9, name="bn")(x)
    x = layers.Activation("relu", name="relu")(x)
    if include_top:
        x = layers.GlobalAveragePooling2D(name="avg_pool")(x)
        x = layers.Dense(classes, activation=classifier_activation, name="predictions")(x)
    elif pooling == "avg":
        x = layers.GlobalAveragePooling2D(name="avg_pool")(x)
    elif pooling == "max":
        x = layers.GlobalMaxPooling2D(name="max_pool")(x)

    model = keras.Model(inputs, x, name=name)
    if weights is not None:
        weights_module.load(model, weights_module.fetch(*published) if weights == "imagenet" else weights)
    return model


def DenseNetCifar(
    depth: int,
    growth_rate: int,
    *,
    bottleneck: bool = True,
    compression: float = 0.5,
    input_shape: tuple[int | None, ...] | None = None,
    classes: int = 10,
    **kwargs: Any,
) -> keras.Model:
    """Builds the paper's network for 32x32 images: three equal dense blocks behind a 3x3 convolution.

    Args:
        depth: L, the number of layers with weights: `6n + 4` with bottlenecks, `3n + 4` without, for n layers a block.
        growth_rate: k, the features that each layer adds.
        bottleneck: `True` for DenseNet-BC, `False` for the first DenseNet.
        compression: of the transitions; below 1 for DenseNet-BC, 1 for the first DenseNet.
        input_shape: `(height, width, channels)`, 32x32x3 by default.
        classes: the number of classes.
        **kwargs: as for `DenseNet`.

    Returns:
        A `keras.Model`.

    Raises:
        ValueError: for a depth that no such network has, or another argument out of its range.
    """
    convolutions = 6 if bottleneck else 3
    layers_per_block, rest = divmod(depth - 4, convolutions)
    if rest or layers_per_block < 1:
        nearest = 4 + convolutions * max(1, layers_per_block)
        raise ValueError(
            f"`depth` must be {convolutions}n + 4 {'with' if bottleneck else 'without'} bottlenecks, got {depth}; "
            f"the nearest are {nearest} and {nearest + convolutions}."
        )
    return DenseNet(
        (layers_per_block,) * 3,
        growth_rate,
        bottleneck=bottleneck,
        compression=compression,
        stem="cifar",
        input_shape=input_shape,
        classes=classes,
        **kwargs,
    )


def smallest_size(stem: str, num_blocks: int) -> int:
    """The least height and width of an image: each transition halves it, and nothing may be left of no size."""
    return 2 ** (num_blocks - 1) * {"imagenet": 4, "cifar": 1}[stem]


def _input(stem, num_blocks, include_top, input_tensor, input_shape):
    """The model's inputs and the tensor to go on from, shapes checked."""
    if input_tensor is not None:
        if not isinstance(input_tensor, keras.KerasTensor):
            raise ValueError(f"`input_tensor` must be a Keras tensor, such as `keras.Input(...)`; got {input_tensor!r}.")
        if input_shape is not None and tuple(input_shape) != tuple(input_tensor.shape[1:]):
            raise ValueError(f"`input_shape` is {input_shape}, but `input_tensor` has the shape {input_tensor.shape[1:]}.")
        input_shape = input_tensor.shape[1:]
    if input_shape is None:
        size = {"imagenet": 224, "cifar": 32}[stem] if include_top else None
        input_shape = (size, size, 3)
    smallest = smallest_size(stem, num_blocks)
    if len(input_shape) != 3 or any(size is not None and size < smallest for size in input_shape[:2]):
        raise ValueError(
            f"`input_shape` must be (height, width, channels), height and width at least {smallest}; got {input_shape}."
        )
    if input_shape[2] is None:
        raise ValueError(f"`input_shape` must give the number of channels; got {input_shape}.")
    if input_tensor is None:
        inputs = keras.Input(input_shape)
        return inputs, inputs
    sources = keras.utils.get_source_inputs(input_tensor)
    return sources[0] if len(sources) == 1 else sources, input_tensor


def _check(blocks, growth_rate, stem, pooling, classes):
    if keras.config.backend() != "tensorflow":
        raise ValueError(f"densenets needs Keras on TensorFlow; the backend is {keras.config.backend()!r}.")
    if keras.config.image_data_format() != "channels_last":
        raise ValueError("densenets computes in 'channels_last'; `keras.config.image_data_format()` is 'channels_first'.")
    if not blocks or any(not isinstance(n, int) or n < 1 for n in blocks):
        raise ValueError(f"`blocks` must be positive numbers of layers, one for each block; got {blocks!r}.")
    if not isinstance(growth_rate, int) or growth_rate < 1:
        raise ValueError(f"`growth_rate` must be a positive integer, got {growth_rate!r}.")
    if stem not in STEMS:
        raise ValueError(f"`stem` must be one of {', '.join(map(repr, STEMS))}; got {stem!r}.")
    if pooling not in (None, "avg", "max"):
        raise ValueError(f"`pooling` must be None, 'avg' or 'max'; got {pooling!r}.")
    if not isinstance(classes, int) or classes < 1:
        raise ValueError(f"`classes` must be a positive integer, got {classes!r}.")
