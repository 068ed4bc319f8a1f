"""What a DenseNet is made of, as far as memory asks: sizes, in the order that data flows.

The parts are read off a built model (`parts_of`), or worked out from a builder's arguments (`parts_from`), which takes no time
where a thousand networks are to be tried.
"""

import dataclasses
import math
from collections.abc import Sequence

import keras

from densenets.dense_block import DenseBlock, Transition
from densenets.dense_block.dense_layer import BOTTLENECK_WIDTH
from densenets.model import smallest_size
from densenets.stem import Stem


@dataclasses.dataclass(frozen=True)
class Part:
    """A layer of a network, as memory sees it.

    Attributes:
        name: the layer's.
        kind: `"stem"`, `"convolution"`, `"block"`, `"transition"`, `"norm"` (with the ReLU behind it), or `"other"`, which is
            taken to keep what it hands on.
        size, size_out: height and width in front of the layer and behind it; (1, 1) for what is no image.
        channels, out: in front of the layer and behind it.
        trained: the number of weights that are trained.
        state: the number of all others, such as moving averages.
        num_layers, growth_rate, bottleneck: of a block.
        dropout: whether values are dropped.
    """

    name: str
    kind: str
    size: tuple[int, int]
    size_out: tuple[int, int]
    channels: int
    out: int
    trained: int = 0
    state: int = 0
    num_layers: int = 0
    growth_rate: int = 0
    bottleneck: bool = True
    dropout: bool = False

    @property
    def widths(self):
        """The channels that each layer of a block reads."""
        return [self.channels + i * self.growth_rate for i in range(self.num_layers)]

    @property
    def narrow(self):
        """The channels between the two convolutions of a block's layer; 0 without bottlenecks."""
        return BOTTLENECK_WIDTH * self.growth_rate if self.bottleneck else 0


# === Of a model ===

KINDS = {
    DenseBlock: "block",
    Transition: "transition",
    Stem: "stem",
    keras.layers.Conv2D: "convolution",
    keras.layers.BatchNormalization: "norm",
}
# What they hand on is their input, or is counted with the batch norm in front.
FREE = (keras.layers.Activation, keras.layers.ReLU, keras.layers.Flatten, keras.layers.Reshape)


def parts_of(model: keras.Model, image_size: tuple[int, int] | None = None) -> list[Part]:
    """The parts of a built Functional or Sequential model with one input of images.

    Args:
        model: which may contain other such models.
        image_size: height and width, where the model leaves them open.

    Raises:
        ValueError: for another model, or one of open size without `image_size`.
    """
    if not isinstance(model, keras.Model) or not getattr(model, "inputs", None):
        raise ValueError(f"`model` must be a built Functional or Sequential model, got {model!r}.")
    shapes = [tuple(tensor.shape) for tensor in model.inputs]
    if len(shapes) != 1 or len(shapes[0]) != 4:
        raise ValueError(f"`model` must have one input of images [N, H, W, c]; it has {shapes}.")
    size = tuple(own or asked for own, asked in zip(shapes[0][1:3], image_size or (None, None), strict=True))
    if None in size:
        raise ValueError(f"`image_size` must be given, as (height, width), for a model that leaves it open; got {image_size}.")
    return _walk(model, (1, *size, shapes[0][3]))


def _walk(model, input_shape):
    """The parts of `model` on an input of `input_shape`, layer by layer along its tensors."""
    shapes, parts = {id(model.inputs[0]): input_shape}, []
    last = input_shape
    for layer in model.layers:
        if isinstance(layer, keras.layers.InputLayer):
            continue
        if isinstance(layer, keras.Model):  # its tensors are its own: it is given what the layer before it hands on
            parts += _walk(layer, last)
            last = tuple(layer.compute_output_shape(last))
            continue
        given = [shapes.get(id(tensor), last) for tensor in keras.tree.flatten(layer.input)]
        last = tuple(layer.compute_output_shape(given if len(given) > 1 else given[0]))
        shapes[id(keras.tree.flatten(layer.output)[0])] = last
        if not isinstance(layer, FREE):
            parts.append(_part(layer, given[0], last))
    return parts


def _part(layer, shape, out):
    kind = next((kind for cls, kind in KINDS.items() if type(layer) is cls), "other")
    sizes = {"size": _size(shape), "size_out": _size(out), "channels": _channels(shape), "out": _channels(out)}
    part = Part(
        name=layer.name,
        kind=kind,
        **sizes,
        trained=sum(math.prod(v.shape) for v in layer.trainable_variables),
        state=sum(math.prod(v.shape) for v in layer.non_trainable_variables if "float" in v.dtype),
        dropout=getattr(layer, "dropout_rate", 0) > 0,
    )
    if kind != "block":
        return part
    own = {key: getattr(layer, key) for key in ("num_layers", "growth_rate", "bottleneck")}
    return dataclasses.replace(part, **own)


def _size(shape):
    return tuple(shape[1:3]) if len(shape) == 4 else (1, 1)


def _channels(shape):
    return shape[-1] if len(shape) == 4 else math.prod(shape[1:])


# === Of arguments ===


def parts_from(
    image_size: tuple[int, int],
    blocks: Sequence[int] | None = None,
    growth_rate: int = 12,
    depth: int | None = None,
    bottleneck: bool = True,
    compression: float = 0.5,
    stem: str | None = None,
    dropout_rate: float = 0.0,
    classes: int | None = None,
) -> list[Part]:
    """The parts of what `densenets.DenseNet` (by `blocks`) or `densenets.DenseNetCifar` (by `depth`) would build.

    Raises:
        ValueError: for images that are too small for it.
    """
    if blocks is None:
        if depth is None:
            raise ValueError("`blocks` or `depth` must be given.")
        blocks = ((depth - 4) // (6 if bottleneck else 3),) * 3
    stem = stem or ("imagenet" if depth is None else "cifar")
    classes = classes or {"imagenet": 1000, "cifar": 10}[stem]
    smallest = smallest_size(stem, len(blocks))
    if min(image_size) < smallest:
        raise ValueError(f"`image_size` must be at least {smallest} by {smallest} for this network; got {image_size}.")
    height, width = image_size
    channels = 2 * growth_rate if stem == "imagenet" or (bottleneck and compression < 1) else 16
    if stem == "imagenet":
        size = (height + 3) // 4, (width + 3) // 4
        trained = 7 * 7 * 3 * channels + 2 * channels
        parts = [Part("conv1", "stem", (height, width), size, 3, channels, trained, state=2 * channels)]
    else:
        size = height, width
        parts = [Part("conv1_conv", "convolution", size, size, 3, channels, 3 * 3 * 3 * channels)]
    for i, num_layers in enumerate(blocks, start=2):
        block = Part(
            name=f"conv{i}",
            kind="block",
            size=size,
            size_out=size,
            channels=channels,
            out=channels + num_layers * growth_rate,
            num_layers=num_layers,
            growth_rate=growth_rate,
            bottleneck=bottleneck,
            dropout=dropout_rate > 0,
        )
        state = sum(2 * (c + block.narrow) for c in block.widths)
        parts.append(dataclasses.replace(block, trained=sum(layer_weights(block)), state=state))
        channels = block.out
        if i < len(blocks) + 1:
            out, halved = int(channels * compression), (size[0] // 2, size[1] // 2)
            trained, dropout = channels * out + 2 * channels, dropout_rate > 0
            parts.append(
                Part(f"pool{i}", "transition", size, halved, channels, out, trained, state=2 * channels, dropout=dropout)
            )
            size, channels = halved, out
    return [
        *parts,
        Part("bn", "norm", size, size, channels, channels, 2 * channels, state=2 * channels),
        Part("avg_pool", "other", size, (1, 1), channels, channels),
        Part("predictions", "other", (1, 1), (1, 1), channels, classes, (channels + 1) * classes),
    ]


def layer_weights(block: Part) -> list[int]:
    """The number of weights that each layer of a block trains."""
    k, narrow = block.growth_rate, block.narrow
    behind = (lambda c: c * narrow + 2 * narrow + 9 * narrow * k) if block.bottleneck else (lambda c: 9 * c * k)
    return [2 * c + behind(c) for c in block.widths]
