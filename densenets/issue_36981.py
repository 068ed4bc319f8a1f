"""The network of tensorflow #36981, "`recompute_grad` does not save memory and is incompatible with graph mode".

Its reporter wrapped each BN-ReLU-conv1x1-BN-ReLU-conv3x3 of a small DenseNet by `tf.recompute_grad` and saw no saving in eager
execution, and gradients of `None` in graphs. Here the same layers are wrapped by `densenets.layers.Recompute`.
"""

import keras
from keras import layers

from densenets.layers import DenseLayer, Recompute

BLOCKS = ((5, 4), (10, 8), (10, 8))  # layers and growth rate; bottlenecks are four times the growth rate, 16, 32 and 32 wide
TRANSITIONS = (64, 128)


def build(input_shape, classes, memory, classifier_activation="softmax"):
    """Builds the network; `memory="checkpoint"` wraps every dense layer, anything else none."""
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(32, 5, strides=2, padding="same", use_bias=False)(inputs)
    for i, (num_layers, growth_rate) in enumerate(BLOCKS):
        features = [x]
        for _ in range(num_layers):
            layer = DenseLayer(growth_rate)
            features.append((Recompute(layer) if memory == "checkpoint" else layer)(list(features)))
        x = layers.Concatenate()(features)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        if i < len(TRANSITIONS):
            x = layers.Conv2D(TRANSITIONS[i], 1, use_bias=False)(x)
            x = layers.AveragePooling2D(2)(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(classes, activation=classifier_activation)(x), name="issue_36981")
