"""The named DenseNets, and what the papers state of each.

Sources: Huang et al., "Densely Connected Convolutional Networks" (arXiv:1608.06993), tables 1 to 3; Pleiss et al.,
"Memory-Efficient Implementation of DenseNets" (arXiv:1707.06990), section 4; the authors' repository
(github.com/liuzhuang13/DenseNet).
"""

import dataclasses
import difflib

from densenets.model import DenseNet, DenseNetCifar

PAPER = "arXiv:1608.06993"
REPORT = "arXiv:1707.06990"
REPOSITORY = "github.com/liuzhuang13/DenseNet"


@dataclasses.dataclass(frozen=True)
class Published:
    """What a source states of a network. Errors are in percent, of one model and one crop.

    Attributes:
        source: where it is stated.
        parameters: weights, in millions, as printed (with 10 classes, or 1000 for ImageNet).
        errors: by data set; `"C10"` and `"C100"` without augmentation, `"C10+"` and `"C100+"` with it,
            `"ImageNet top-1"` and `"ImageNet top-5"`.
        note: what is to be known of the source's figures.
    """

    source: str
    parameters: float | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A named network: the arguments of its builder, and what is published of it."""

    arguments: dict
    published: Published

    def build(self, overrides):
        builder = DenseNet if "blocks" in self.arguments else DenseNetCifar
        return builder(**(self.arguments | overrides))


def _cifar(depth, growth_rate, source, parameters, *errors, bc=True):
    names = ("C10", "C10+", "C100", "C100+")
    arguments = {"depth": depth, "growth_rate": growth_rate}
    if not bc:
        arguments |= {"bottleneck": False, "compression": 1.0}
    stated = {name: error for name, error in zip(names, errors, strict=True) if error is not None}
    return Variant(arguments, Published(source, parameters, stated))


def _imagenet(blocks, growth_rate, source, parameters, top1, top5=None, note=""):
    errors = {"ImageNet top-1": top1} | ({} if top5 is None else {"ImageNet top-5": top5})
    return Variant({"blocks": blocks, "growth_rate": growth_rate}, Published(source, parameters, errors, note))


VARIANTS = {
    # errors %:                                        parameters  C10  C10+   C100  C100+
    "densenet_40_12": _cifar(40, 12, PAPER, 1.0, 7.00, 5.24, 27.55, 24.42, bc=False),
    "densenet_100_12": _cifar(100, 12, PAPER, 7.0, 5.77, 4.10, 23.79, 20.20, bc=False),
    "densenet_100_24": _cifar(100, 24, PAPER, 27.2, 5.83, 3.74, 23.42, 19.25, bc=False),
    "densenet_bc_100_12": _cifar(100, 12, PAPER, 0.8, 5.92, 4.51, 24.15, 22.27),
    "densenet_bc_250_24": _cifar(250, 24, PAPER, 15.3, 5.19, 3.62, 19.64, 17.60),
    "densenet_bc_190_40": _cifar(190, 40, PAPER, 25.6, None, 3.46, None, 17.18),
    "wide_densenet_bc_40_36": _cifar(40, 36, REPOSITORY, 1.5, None, 4.58, None, 22.30),
    "wide_densenet_bc_40_48": _cifar(40, 48, REPOSITORY, 2.7, None, 3.99, None, 20.29),
    "wide_densenet_bc_40_60": _cifar(40, 60, REPOSITORY, 4.3, None, 4.01, None, 19.99),
    # errors %:                                                          top-1  top-5
    "densenet_121": _imagenet((6, 12, 24, 16), 32, PAPER, 7.98, 25.02, 7.71),
    "densenet_169": _imagenet((6, 12, 32, 32), 32, PAPER, 14.15, 23.80, 6.85),
    "densenet_201": _imagenet((6, 12, 48, 32), 32, PAPER, 20.01, 22.58, 6.34),
    "densenet_264": _imagenet((6, 12, 64, 48), 32, PAPER, 33.34, 22.15, 6.12),
    "densenet_161": _imagenet((6, 12, 36, 24), 48, REPOSITORY, 28.68, 22.2),
}


def list_models():
    """The names that `create_model` knows, in the order of the papers' tables."""
    return list(VARIANTS)


def create_model(name, **overrides):
    """Builds a network by name.

    Args:
        name: one of `list_models()`.
        **overrides: arguments of `DenseNet` (or `DenseNetCifar`) that replace the variant's own.

    Returns:
        A `keras.Model`.

    Raises:
        ValueError: for an unknown name, with the nearest ones.
    """
    return _variant(name).build({"name": name} | overrides)


def published(name):
    """What the papers state of a network, as a `Published`.

    Raises:
        ValueError: for an unknown name, with the nearest ones.
    """
    return _variant(name).published


def _variant(name):
    if name not in VARIANTS:
        near = difflib.get_close_matches(str(name), VARIANTS) or list(VARIANTS)
        raise ValueError(f"`name` must be one of `list_models()`, such as {', '.join(near)}; got {name!r}.")
    return VARIANTS[name]


# === keras.applications' names ===


def _application(variant, title):
    default_name = title.lower()

    def build(
        include_top=True,
        weights=None,
        input_tensor=None,
        input_shape=None,
        pooling=None,
        classes=1000,
        classifier_activation="softmax",
        name=default_name,
        **kwargs,
    ):
        arguments = {
            "include_top": include_top,
            "weights": weights,
            "input_tensor": input_tensor,
            "input_shape": input_shape,
            "pooling": pooling,
            "classes": classes,
            "classifier_activation": classifier_activation,
            "name": name,
        }
        return VARIANTS[variant].build(arguments | kwargs)

    build.__name__ = build.__qualname__ = title
    build.__doc__ = (
        f"Builds {title}, with the arguments of `keras.applications.DenseNet121`, in its order.\n\n"
        "`memory` and `dropout_rate`, by keyword, and all else are as for `densenets.DenseNet`."
    )
    return build


DenseNet121 = _application("densenet_121", "DenseNet121")
DenseNet161 = _application("densenet_161", "DenseNet161")
DenseNet169 = _application("densenet_169", "DenseNet169")
DenseNet201 = _application("densenet_201", "DenseNet201")
DenseNet264 = _application("densenet_264", "DenseNet264")
