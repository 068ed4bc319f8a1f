"""The network of tensorflow #36981 on Fashion-MNIST, with and without recomputation: what its reporter tried to see.

    python train.py --config=configs/issue_36981.py --workdir=runs/issue_36981 --config.recompute=True --config.mode=graph

prints the peak memory of a training step; run it with `--config.recompute=False`, and with `--config.mode=eager`, `graph` or
`xla`, to compare. Where Fashion-MNIST cannot be downloaded, scikit-learn's digits serve and the report says so.
"""

from densenets.config import default_config


def get_config():
    config = default_config()

    # Data
    config.dataset = "fashion_mnist"
    config.fallback_dataset = "digits"
    config.augment = False

    # Model
    with config.ignore_type():
        config.model = "issue_36981"
    config.recompute = True

    # Recipe
    config.optimizer = "adam"
    config.learning_rate = 1e-3
    config.milestones = ()
    config.batch_size = 1024
    config.epochs = 1
    return config
