"""The layers, for networks of one's own."""

from densenets.dense_block import DenseBlock, DenseLayer, Transition
from densenets.recompute_layer import Recompute

__all__ = ["DenseBlock", "DenseLayer", "Recompute", "Transition"]
