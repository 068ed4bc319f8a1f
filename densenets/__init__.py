"""densenets: memory-efficient DenseNets for TensorFlow and Keras 3."""

from keras.applications.densenet import decode_predictions, preprocess_input

from densenets import layers, memory, weights
from densenets.flops import count_flops
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
    "count_flops",
    "create_model",
    "decode_predictions",
    "layers",
    "list_models",
    "memory",
    "preprocess_input",
    "published",
    "recompute",
    "recompute_grad",
    "rev_block",
    "weights",
]
