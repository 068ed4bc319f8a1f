"""DenseNets on CIFAR-10 by the recipe of arXiv:1608.06993; by default DenseNet-BC (L=100, k=12), C10+: 4.51% error.

    python train.py --config=configs/cifar10.py --workdir=runs/cifar10

Another network by its name in `densenets.list_models()`, or by depth and growth rate:

    python train.py --config=configs/cifar10.py:densenet_bc_190_40 --workdir=runs/cifar10-190   # 3.46%
    python train.py --config=configs/cifar10.py --config.model.depth=40 --workdir=runs/cifar10-40
"""

from densenets.training import default_config


def get_config(model=None):
    config = default_config()

    # Data
    config.dataset = "cifar10"
    config.augment = True  # the "+" of C10+

    # Model
    if model:
        with config.ignore_type():
            config.model = model
    return config
