"""DenseNet-BC (L=70, k=12) on scikit-learn's handwritten digits: the whole comparison in minutes, without a network.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart

No paper trains on these digits; above 95% of the 360 test images right is what both strategies must reach.
"""

from densenets.config import default_config


def get_config():
    config = default_config()

    # Data
    config.dataset = "digits"
    config.augment = False

    # Model
    config.model.depth = 70

    # Recipe: the papers', with far fewer epochs
    config.epochs = 7
    return config
