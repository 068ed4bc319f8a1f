"""DenseNet-BC (L=100, k=12) on Fashion-MNIST (arXiv:1708.07747), by the recipe for CIFAR.

    python train.py --config=configs/fashion_mnist.py --workdir=runs/fashion_mnist
    python train.py --config=configs/fashion_mnist.py:densenet_40_12 --workdir=runs/fashion_mnist-40-12

Neither paper reports Fashion-MNIST; the data set's page lists a DenseNet-BC (768K parameters) at 4.6% error.
"""

from densenets.config import default_config, model_arguments, parse_variant


def get_config(variant=None):
    chosen = parse_variant(variant, model="densenet_bc_100_12", augment=True)
    config = default_config()

    # Data
    config.dataset = "fashion_mnist"
    config.augment = chosen.augment

    # Model
    config.model = model_arguments(chosen.model, config.augment)
    return config
