"""CIFAR-10 by the recipe of arXiv:1608.06993. The papers' rows, error in percent; by default DenseNet-BC (L=100, k=12), C10+.

    python train.py --config=configs/cifar10.py --workdir=runs/cifar10
    python train.py --config=configs/cifar10.py:densenet_bc_190_40 --workdir=runs/cifar10-190-40
    python train.py --config=configs/cifar10.py:densenet_40_12,augment=False --workdir=runs/cifar10-40-12-plain

| network                | augment=True | augment=False |
|------------------------|--------------|---------------|
| densenet_40_12         | 5.24         | 7.00          |
| densenet_100_12        | 4.10         | 5.77          |
| densenet_100_24        | 3.74         | 5.83          |
| densenet_bc_100_12     | 4.51         | 5.92          |
| densenet_bc_250_24     | 3.62         | 5.19          |
| densenet_bc_190_40     | 3.46         | -             |
| wide_densenet_bc_40_36 | 4.58         | -             |
| wide_densenet_bc_40_48 | 3.99         | -             |
| wide_densenet_bc_40_60 | 4.01         | -             |

Single fields can be set too: `--config.model.depth=40`. Without augmentation there is dropout of 0.2, as in the paper.
"""

from densenets.config import default_config, model_arguments, parse_variant


def get_config(variant=None):
    chosen = parse_variant(variant, model="densenet_bc_100_12", augment=True)
    config = default_config()

    # Data
    config.dataset = "cifar10"
    config.augment = chosen.augment

    # Model
    config.model = model_arguments(chosen.model, config.augment)
    return config
