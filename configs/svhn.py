"""SVHN by the recipe of arXiv:1608.06993: 40 epochs of 604,388 images, dropout instead of augmentation.

    python train.py --config=configs/svhn.py --workdir=runs/svhn
    python train.py --config=configs/svhn.py:densenet_100_24 --workdir=runs/svhn-100-24

The paper's rows, error in percent; by default DenseNet-BC (L=100, k=12):

| network            | augment=False |
|--------------------|---------------|
| densenet_40_12     | 1.79          |
| densenet_100_12    | 1.67          |
| densenet_100_24    | 1.59          |
| densenet_bc_100_12 | 1.76          |
| densenet_bc_250_24 | 1.74          |

The paper holds 6,000 images back to choose the epoch that it tests; here all are trained on, and the last epoch is tested.
"""

from densenets.config import default_config, model_arguments, parse_variant


def get_config(variant=None):
    chosen = parse_variant(variant, model="densenet_bc_100_12")
    config = default_config()

    # Data
    config.dataset = "svhn_cropped"
    config.augment = False

    # Model
    config.model = model_arguments(chosen.model, config.augment)

    # Recipe
    config.epochs = 40
    return config
