"""The dense block as the first paper draws it: autodiff keeps every concatenation, batch norm and ReLU."""

import keras


def naive(dense_layers, x, training):
    """The features [N, H, W, c0 + L*k] of a block of L `dense_layers` on `x` [N, H, W, c0]; keeps O(L^2) of them."""
    for dense_layer in dense_layers:
        x = keras.ops.concatenate([x, dense_layer(x, training=training)], axis=-1)
    return x
