"""The named DenseNets, and what the papers state of each.

Sources: Huang et al., "Densely Connected Convolutional Networks" (arXiv:1608.06993), tables 1 to 3; Pleiss et al.,
"Memory-Efficient Implementation of DenseNets" (arXiv:1707.06990), section 4; the authors' repository
(github.com/liuzhuang13/DenseNet). FLOPs (multiply-adds, as the first paper counts them) are printed by none of them, but in a
figure; those here are torchvision's of the same networks.
"""

import dataclasses
import difflib
import fnmatch
import os
from collections.abc import Callable
from typing import Any

import keras

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
        errors: by data set; `"C10"` and `"C100"` without augmentation, `"C10+"` and `"C100+"` with it, `"SVHN"`,
            `"ImageNet top-1"` and `"ImageNet top-5"`.
        flops: multiply-adds for one image, in billions, as torchvision states them; `None` where nobody does.
        note: what is to be known of these figures.
    """

    source: str
    parameters: float | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    flops: float | None = None
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
    names = ("C10", "C10+", "C100", "C100+", "SVHN")
    arguments = {"depth": depth, "growth_rate": growth_rate}
    if not bc:
        arguments |= {"bottleneck": False, "compression": 1.0}
    stated = {name: error for name, error in zip(names, errors, strict=True) if error is not None}
    return Variant(arguments, Published(source, parameters, stated))


def _imagenet(blocks, growth_rate, source, parameters, top1=None, top5=None, flops=None, note=""):
    stated = {"ImageNet top-1": top1, "ImageNet top-5": top5}
    errors = {name: error for name, error in stated.items() if error is not None}
    return Variant({"blocks": blocks, "growth_rate": growth_rate}, Published(source, parameters, errors, flops, note))


DEDUCED = (
    "The report does not print the blocks; (6, 12, 48, 48) fits its depth and the 55M parameters that the size of its "
    "checkpoint implies."
)
COSINE = "The architecture of {}; the schedule, a cosine in place of steps, is the difference."

VARIANTS = {
    # errors %:                                        parameters  C10  C10+   C100  C100+  SVHN
    "densenet_40_12": _cifar(40, 12, PAPER, 1.0, 7.00, 5.24, 27.55, 24.42, 1.79, bc=False),
    "densenet_100_12": _cifar(100, 12, PAPER, 7.0, 5.77, 4.10, 23.79, 20.20, 1.67, bc=False),
    "densenet_100_24": _cifar(100, 24, PAPER, 27.2, 5.83, 3.74, 23.42, 19.25, 1.59, bc=False),
    "densenet_bc_100_12": _cifar(100, 12, PAPER, 0.8, 5.92, 4.51, 24.15, 22.27, 1.76),
    "densenet_bc_250_24": _cifar(250, 24, PAPER, 15.3, 5.19, 3.62, 19.64, 17.60, 1.74),
    "densenet_bc_190_40": _cifar(190, 40, PAPER, 25.6, None, 3.46, None, 17.18, None),
    "wide_densenet_bc_40_36": _cifar(40, 36, REPOSITORY, 1.5, None, 4.58, None, 22.30, None),
    "wide_densenet_bc_40_48": _cifar(40, 48, REPOSITORY, 2.7, None, 3.99, None, 20.29, None),
    "wide_densenet_bc_40_60": _cifar(40, 60, REPOSITORY, 4.3, None, 4.01, None, 19.99, None),
    # errors %:                                                          top-1  top-5
    "densenet_121": _imagenet((6, 12, 24, 16), 32, PAPER, 7.98, 25.02, 7.71, 2.834),
    "densenet_169": _imagenet((6, 12, 32, 32), 32, PAPER, 14.15, 23.80, 6.85, 3.36),
    "densenet_201": _imagenet((6, 12, 48, 32), 32, PAPER, 20.01, 22.58, 6.34, 4.291),
    "densenet_264": _imagenet((6, 12, 64, 48), 32, PAPER, 33.34, 22.15, 6.12),
    "densenet_161": _imagenet((6, 12, 36, 24), 48, REPOSITORY, 28.68, 22.2, flops=7.728),
    "densenet_232_48": _imagenet((6, 12, 48, 48), 48, REPORT, None, 21.2, note=DEDUCED),
    "densenet_264_48": _imagenet((6, 12, 64, 48), 48, REPORT, 73, note="The report trains it by the cosine schedule only."),
    "cosine_densenet_264_32": _imagenet((6, 12, 64, 48), 32, REPORT, 33.34, 21.6, note=COSINE.format("densenet_264")),
    "cosine_densenet_264_48": _imagenet((6, 12, 64, 48), 48, REPORT, 73, 20.4, note=COSINE.format("densenet_264_48")),
}


def list_models(pattern: str = "*") -> list[str]:
    """The names that `create_model` knows, in the order of the papers' tables; those that match a pattern such as `"*bc*"`."""
    return fnmatch.filter(VARIANTS, pattern)


def create_model(name: str, **overrides: Any) -> keras.Model:
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


def arguments(name: str) -> dict[str, Any]:
    """The arguments that make a network: of `DenseNetCifar` (with `depth`) or of `DenseNet` (with `blocks`).

    Raises:
        ValueError: for an unknown name, with the nearest ones.
    """
    return dict(_variant(name).arguments)


def identify(arguments: dict[str, Any], schedule: str = "steps") -> str | None:
    """The name of the network that `arguments` make when trained by a `schedule`, "steps" or "cosine"; `None` for another."""
    defaults = {"bottleneck": True, "compression": 0.5}
    wanted = defaults | {key: value for key, value in arguments.items() if key not in ("dropout_rate", "stem")}
    names = [name for name, variant in VARIANTS.items() if defaults | variant.arguments == wanted]
    by_schedule = [name for name in names if name.startswith("cosine") == (schedule == "cosine")]
    return next(iter(by_schedule), None)


def published(name: str) -> Published:
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


def _application(variant, title, default_weights):
    default_name = title.lower()

    def build(
        include_top: bool = True,
        weights: str | os.PathLike | None = default_weights,
        input_tensor: keras.KerasTensor | None = None,
        input_shape: tuple[int | None, ...] | None = None,
        pooling: str | None = None,
        classes: int = 1000,
        classifier_activation: str | Callable | None = "softmax",
        name: str = default_name,
        **kwargs: Any,
    ) -> keras.Model:
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
        f"`weights` is {default_weights!r} by default. `memory` and `dropout_rate`, by keyword, and all else are as for "
        "`densenets.DenseNet`."
    )
    return build


# The default is Keras Applications' own where it publishes weights.
DenseNet121 = _application("densenet_121", "DenseNet121", "imagenet")
DenseNet169 = _application("densenet_169", "DenseNet169", "imagenet")
DenseNet201 = _application("densenet_201", "DenseNet201", "imagenet")
DenseNet161 = _application("densenet_161", "DenseNet161", None)
DenseNet264 = _application("densenet_264", "DenseNet264", None)
