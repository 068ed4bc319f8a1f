"""The dense block of the technical report (arXiv:1707.06990, section 3): what is cheap to make is made again.

Concatenation and batch norm are the O(L^2) part of a block's memory and little of its work. Each layer keeps the features
that it reads, which all layers share, and its narrow intermediate results; the concatenation, the batch norm, the ReLU and
the 1x1 convolution over all of them run again in the backward pass.
"""

import functools

import keras

from densenets.recompute import recompute


def checkpoint(dense_layers, x, training):
    """The features [N, H, W, c0 + L*k] of a block of L `dense_layers` on `x` [N, H, W, c0]; keeps O(L) of them."""
    features = [x]
    for dense_layer in dense_layers:
        narrowed, *features = recompute(functools.partial(_narrow, dense_layer))(*features, training=training)
        features.append(dense_layer.grow(narrowed, training=training))
    return keras.ops.concatenate(features, axis=-1)


def _narrow(dense_layer, *features, training):
    """Hands the features on, so that each layer adds its part to their gradients; else all parts are kept to be added last."""
    return dense_layer.narrow(*features, training=training), *features
