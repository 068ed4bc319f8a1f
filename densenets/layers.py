"""The layers of a DenseNet, for networks of one's own."""

from densenets.dense_block import DenseBlock, DenseLayer, Transition

__all__ = ["DenseBlock", "DenseLayer", "Transition"]
