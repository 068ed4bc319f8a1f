"""The dense block: one layer that owns the weights, and its ways through."""

from densenets.dense_block.dense_block import STRATEGIES, DenseBlock
from densenets.dense_block.dense_layer import DenseLayer, he_fan_out
from densenets.dense_block.transition import Transition

__all__ = ["STRATEGIES", "DenseBlock", "DenseLayer", "Transition", "he_fan_out"]
