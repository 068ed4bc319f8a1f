"""The work of a network, counted from the built model as the papers count it."""

import math

import keras

from densenets.dense_block import DenseBlock, Transition
from densenets.stem import Stem


def count_flops(model: keras.Model) -> int:
    """The multiply-adds of the convolutions and of the classifier for one image: what the papers call FLOPs.

    A transition counts as the papers write it, with the convolution before the pooling, whatever order it is computed in.

    Args:
        model: built by `densenets`, for images of a certain size.

    Returns:
        A number of multiply-adds.

    Raises:
        ValueError: for a model without a certain image size.
    """
    if None in model.input_shape[1:]:
        raise ValueError(f"`model` must be built for images of a certain size; its input shape is {model.input_shape}.")
    return sum(_layer_flops(layer) for layer in model.layers)


def _layer_flops(layer):
    if isinstance(layer, keras.layers.Dense):
        kernels, pixels = [layer.kernel], 1
    elif isinstance(layer, keras.layers.Conv2D):
        kernels, pixels = [layer.kernel], math.prod(layer.output.shape[1:3])
    elif isinstance(layer, Stem):
        kernels, pixels = [layer.conv.kernel], math.prod((size + 1) // 2 for size in layer.input.shape[1:3])
    elif isinstance(layer, DenseBlock):
        kernels = [conv.kernel for dense_layer in layer.dense_layers for conv in dense_layer.convs]
        pixels = math.prod(layer.input.shape[1:3])
    elif isinstance(layer, Transition):
        kernels, pixels = [layer.conv.kernel], math.prod(layer.input.shape[1:3])
    else:
        return 0
    return pixels * sum(math.prod(kernel.shape) for kernel in kernels)
