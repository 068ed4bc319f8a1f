"""DenseNet-BC (L=100, k=12) on Fashion-MNIST (arXiv:1708.07747), by the recipe for CIFAR.

    python train.py --config=configs/fashion_mnist.py --workdir=runs/fashion_mnist

Neither paper reports Fashion-MNIST; the data set's page lists a DenseNet-BC (768K parameters) at 4.6% error.
"""

from densenets.training import default_config


def get_config(model=None):
    config = default_config()

    # Data
    config.dataset = "fashion_mnist"
    config.augment = True

    # Model
    if model:
        with config.ignore_type():
            config.model = model
    return config
