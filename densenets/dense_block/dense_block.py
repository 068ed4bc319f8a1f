"""`DenseBlock`: the layer that owns the weights of a dense block and chooses the way through it."""

from typing import Any

import keras

from densenets.dense_block.checkpoint import checkpoint
from densenets.dense_block.dense_layer import DenseLayer
from densenets.dense_block.naive import naive
from densenets.dense_block.shared import shared

STRATEGIES = {"naive": naive, "checkpoint": checkpoint, "shared": shared}


@keras.saving.register_keras_serializable("densenets")
class DenseBlock(keras.Layer):
    """`num_layers` layers, each of which reads the features of all earlier ones: [N, H, W, c0] -> [N, H, W, c0 + L*k].

    Its weights, their names and their files do not depend on `memory`, which is only the way of computing:

    - `"naive"`: automatic differentiation keeps everything;
    - `"checkpoint"`: concat-BN-ReLU-conv1x1 is recomputed in the backward pass (arXiv:1707.06990);
    - `"shared"`: one buffer of features and their statistics is kept, all else recomputed (see `shared.py`). It takes no
      synchronized batch norm.

    Args:
        num_layers: L, how many layers.
        growth_rate: k, how many features each adds.
        bottleneck: whether each begins with a 1x1 convolution to 4k channels (DenseNet-B).
        dropout_rate: the share of values dropped after each convolution.
        memory: the strategy, above.
        epsilon, momentum: of the batch norms; the defaults are the paper's.

    Raises:
        ValueError: for an argument out of its range, naming it.
    """

    def __init__(
        self,
        num_layers: int,
        growth_rate: int,
        *,
        bottleneck: bool = True,
        dropout_rate: float = 0.0,
        memory: str = "shared",
        epsilon: float = 1e-5,
        momentum: float = 0.9,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        for name, value in (("num_layers", num_layers), ("growth_rate", growth_rate)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")
        if not 0 <= dropout_rate < 1:
            raise ValueError(f"`dropout_rate` must be at least 0 and below 1, got {dropout_rate!r}.")
        if memory not in STRATEGIES:
            raise ValueError(f"`memory` must be one of {', '.join(map(repr, STRATEGIES))}; got {memory!r}.")
        self.num_layers = num_layers
        self.growth_rate = growth_rate
        self.bottleneck = bottleneck
        self.dropout_rate = dropout_rate
        self.memory = memory
        self.epsilon = epsilon
        self.momentum = momentum
        self.dense_layers = [
            DenseLayer(
                growth_rate,
                bottleneck=bottleneck,
                dropout_rate=dropout_rate,
                epsilon=epsilon,
                momentum=momentum,
                dtype=self.dtype_policy,
                name=f"block{i + 1}",
            )
            for i in range(num_layers)
        ]

    def build(self, input_shape):
        *rest, channels = input_shape
        for i, dense_layer in enumerate(self.dense_layers):
            dense_layer.build((*rest, channels + i * self.growth_rate))

    def call(self, x, training=False):
        return STRATEGIES[self.memory](self.dense_layers, x, training=training)

    def compute_output_shape(self, input_shape):
        *rest, channels = input_shape
        return (*rest, channels + self.num_layers * self.growth_rate)

    def get_config(self):
        return super().get_config() | {
            "num_layers": self.num_layers,
            "growth_rate": self.growth_rate,
            "bottleneck": self.bottleneck,
            "dropout_rate": self.dropout_rate,
            "memory": self.memory,
            "epsilon": self.epsilon,
            "momentum": self.momentum,
        }
