"""CIFAR-100 by the recipe of arXiv:1608.06993. The papers' rows, error in percent; by default DenseNet-BC (L=100, k=12), C100+.

    python train.py --config=configs/cifar100.py --workdir=runs/cifar100
    python train.py --config=configs/cifar100.py:densenet_bc_250_24 --workdir=runs/cifar100-250-24
    python train.py --config=configs/cifar100.py:densenet_40_12,augment=False --workdir=runs/cifar100-40-12-plain

| network                | augment=True | augment=False |
|------------------------|--------------|---------------|
| densenet_40_12         | 24.42        | 27.55         |
| densenet_100_12        | 20.20        | 23.79         |
| densenet_100_24        | 19.25        | 23.42         |
| densenet_bc_100_12     | 22.27        | 24.15         |
| densenet_bc_250_24     | 17.60        | 19.64         |
| densenet_bc_190_40     | 17.18        | -             |
| wide_densenet_bc_40_36 | 22.30        | -             |
| wide_densenet_bc_40_48 | 20.29        | -             |
| wide_densenet_bc_40_60 | 19.99        | -             |
"""

from densenets.config import default_config, model_arguments, parse_variant


def get_config(variant=None):
    chosen = parse_variant(variant, model="densenet_bc_100_12", augment=True)
    config = default_config()

    # Data
    config.dataset = "cifar100"
    config.augment = chosen.augment

    # Model
    config.model = model_arguments(chosen.model, config.augment)
    return config
