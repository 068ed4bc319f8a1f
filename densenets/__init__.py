"""densenets: memory-efficient DenseNets for TensorFlow and Keras 3."""

from densenets import layers, memory
from densenets.model import DenseNet, DenseNetCifar
from densenets.recompute import recompute, recompute_grad
from densenets.reversible import RevBlock, rev_block
from densenets.zoo import (
    DenseNet121,
    DenseNet161,
    DenseNet169,
    DenseNet201,
    DenseNet264,
    create_model,
    list_models,
    published,
)

__version__ = "0.1.0"

__all__ = [
    "DenseNet",
    "DenseNet121",
    "DenseNet161",
    "DenseNet169",
    "DenseNet201",
    "DenseNet264",
    "DenseNetCifar",
    "RevBlock",
    "create_model",
    "layers",
    "list_models",
    "memory",
    "published",
    "recompute",
    "recompute_grad",
    "rev_block",
]
