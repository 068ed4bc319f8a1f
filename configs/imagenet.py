"""ImageNet by the recipe of arXiv:1608.06993, or by the cosine schedule of arXiv:1707.06990; by default DenseNet-121.

    python train.py --config=configs/imagenet.py --workdir=runs/imagenet
    python train.py --config=configs/imagenet.py:densenet_264 --config.distribute=mirrored --workdir=runs/imagenet-264
    python train.py --config=configs/imagenet.py:cosine_densenet_264_48 --config.distribute=mirrored --workdir=runs/cosine

The papers' rows, single-crop top-1 error in percent:

| network                | augment=True |
|------------------------|--------------|
| densenet_121           | 25.02        |
| densenet_169           | 23.80        |
| densenet_201           | 22.58        |
| densenet_264           | 22.15        |
| densenet_161           | 22.2         |
| densenet_232_48        | 21.2         |
| cosine_densenet_264_32 | 21.6         |
| cosine_densenet_264_48 | 20.4         |

tensorflow-datasets needs the two archives of ILSVRC2012, which nobody may hand on; `tfds build imagenet2012` says where to put
them. One strategy is trained alone; set `--config.compare` to hold others against it.
"""

from densenets.config import default_config, model_arguments, parse_variant


def get_config(variant=None):
    chosen = parse_variant(variant, model="densenet_121")
    config = default_config()

    # Data
    config.dataset = "imagenet2012"
    config.augment = True

    # Model
    config.model = model_arguments(chosen.model, config.augment)
    config.compare = ()

    # Recipe
    config.epochs = 90
    config.batch_size = 256
    config.schedule = "cosine" if chosen.model.startswith("cosine") else "steps"
    config.milestones = (1 / 3, 2 / 3)  # epochs 30 and 60
    return config
