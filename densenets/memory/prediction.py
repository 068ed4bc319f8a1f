"""Memory, predicted: the bytes of a training step, from the architecture alone.

A step is walked through once, layer by layer, forwards and then backwards, and what lives at each moment is added up:

- **weights**: the network's, the optimizer's slots, the batch of images; half-precision copies of kernels; what an optimizer
  makes of its slots before the gradients arrive;
- **kept**: what each layer keeps for its backward pass. A batch norm with its ReLU keeps two values for each that it reads
  (its input and the ReLU's output), so a plain block of L layers, whose layer l reads c_l = c0 + l*k channels, keeps
  2*sum(c_l) + 8*L*k channels: the square of the depth. `"checkpoint"` keeps k + 8k for each layer, `"shared"` k;
- **gradients**: that of the features, which every layer adds to;
- **transient**: what a layer makes and frees while it runs.

The peak is the fullest moment. Two things are not derived but fitted to measurements, and stand as tables below: how much the
allocator hands out beyond what is asked for (`ROUNDING`), and how many tensors a layer has in hand at once (`IN_HAND`).
"""

import dataclasses
import math
from typing import NamedTuple

import keras

from densenets.dense_block import STRATEGIES, DenseBlock
from densenets.dense_block.features import CHUNKS
from densenets.dense_block.shared import CHUNKED_PIXELS
from densenets.memory.architecture import Part, layer_weights, parts_of

MODES = ("graph", "xla")
SIZES = {"float32": 4, "float64": 8, "mixed_bfloat16": 2, "mixed_float16": 2}  # bytes of what layers compute
# Slots for each weight, and in a graph the products of slots that the executor makes at once and holds until the gradients
# come: Keras' SGD multiplies its momentum so.
OPTIMIZERS = {"none": (0, 0), "sgd": (1, 1), "torch_sgd": (1, 1), "adam": (2, 0)}


class Moment(NamedTuple):
    """What lives, in bytes, while one layer runs.

    Attributes:
        part: the layer's name; of a block, with the number of its layer behind a slash.
        direction: `"forward"` or `"backward"`.
        weights, kept, gradients, transient: as this file's head has them.
    """

    part: str
    direction: str
    weights: float
    kept: float
    gradients: float
    transient: float

    @property
    def total(self):
        return self.weights + self.kept + self.gradients + self.transient


class Prediction(int):
    """The bytes that a training step takes in all, weights and data included: a number, with its reasons.

    Attributes:
        moments: the step, layer by layer, as `Moment`s.
        peak: the fullest of them.
        kept_by_part: what each part keeps for its backward pass, by name, in bytes.
        baseline: what of it lives between steps: weights, optimizer slots, images.
    """

    moments: list[Moment]
    peak: Moment
    kept_by_part: dict[str, int]
    baseline: int

    def __new__(cls, moments, kept_by_part, baseline):
        peak = max(moments, key=lambda moment: moment.total)
        self = super().__new__(cls, math.ceil(peak.total))
        self.moments, self.peak, self.kept_by_part, self.baseline = moments, peak, kept_by_part, math.ceil(baseline)
        return self

    def breakdown(self) -> dict[str, int]:
        """The bytes of the fullest moment: weights, kept, gradients and transient."""
        return {kind: round(getattr(self.peak, kind)) for kind in ("weights", "kept", "gradients", "transient")}


def predict(
    model: keras.Model,
    batch_size: int,
    *,
    memory: str | None = None,
    mode: str = "graph",
    precision: str | None = None,
    optimizer: str = "sgd",
    image_size: tuple[int, int] | None = None,
) -> Prediction:
    """Says what a training step will take, before anything runs. It takes milliseconds.

    It is calibrated on the CPU's allocator, which is the GPU's too (docs/memory.md holds it against measurements). On a GPU
    add what cuDNN takes as workspace for its convolutions, and the CUDA context.

    Args:
        model: a built Functional or Sequential model. Layers that are none of a DenseNet's count by what they hand on. What
            stands in front of the first trainable weight keeps nothing.
        batch_size: images in a step, on one device.
        memory: how the dense blocks compute; the model's own way by default.
        mode: `"graph"` or `"xla"`. (Eager execution, which keeps much more, is not predicted.)
        precision: a dtype policy, such as `"mixed_bfloat16"`; the model's own by default.
        optimizer: `"sgd"` (Keras', with momentum), `"torch_sgd"` (`train.py`'s), `"adam"` or `"none"`.
        image_size: (height, width), where the model leaves them open.

    Returns:
        A `Prediction`: an `int`, the bytes in all.

    Raises:
        ValueError: for an argument that cannot be, naming it.
    """
    parts = parts_of(model, image_size)
    blocks = [layer for layer in model._flatten_layers() if isinstance(layer, DenseBlock)]
    memory = memory or (blocks[0].memory if blocks else "naive")
    precision = precision or (blocks[0] if blocks else model).dtype_policy.name
    return predict_parts(parts, batch_size, memory, mode, precision, optimizer)


def predict_parts(
    parts: list[Part],
    batch_size: int,
    memory: str = "shared",
    mode: str = "graph",
    precision: str = "float32",
    optimizer: str = "sgd",
) -> Prediction:
    """As `predict`, for a network that has not been built."""
    _check("memory", memory, STRATEGIES)
    _check("mode", mode, MODES)
    _check("precision", precision, SIZES)
    _check("optimizer", optimizer, OPTIMIZERS)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"`batch_size` must be a positive integer, got {batch_size!r}.")
    way = _Way(batch_size, memory, mode, SIZES[precision])
    first_trained = next((i for i, part in enumerate(parts) if part.trained), len(parts))
    layers: list[_Layer] = []
    for i, part in enumerate(parts):
        own = LAYERS[part.kind](part, way)
        if i < first_trained:  # what it would keep it only has in hand
            own = [layer._replace(kept=0, forward=max(layer.kept, layer.forward), frozen=True) for layer in own]
        layers += own
    return _walk_through(layers, parts, way, optimizer, keeps_gradients=precision == "mixed_float16")


def _check(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}; got {value!r}.")


# === What a layer takes ===


class _Layer(NamedTuple):
    """Bytes of one layer: kept until its backward pass; in hand during each pass; of the features' gradient."""

    part: str
    name: str
    trained: int
    kept: float
    forward: float
    gradient: float
    backward: float
    frozen: bool = False

    @classmethod
    def alone(cls, part, kept, forward, gradient, backward):
        """Of a part that is one layer."""
        return [cls(part.name, part.name, part.trained, kept, forward, gradient, backward)]


# Tensors as wide as what a layer reads that are in hand at once: in its forward pass, and in its backward pass those in the
# dtype of the layer and those in that of the statistics. Of a chunk of the batch, where the way takes it in chunks. Layers
# without bottlenecks are in a table of their own: their 3x3 convolution is as wide as what they read.
IN_HAND = {
    ("naive", "graph"): (1, 1, 2),
    ("naive", "xla"): (0, 0, 0),
    ("checkpoint", "graph"): (3, 4, 2),
    ("checkpoint", "xla"): (1, 1, 2),
    ("shared", "graph"): (1, 3.5, 0),
    ("shared", "xla"): (1, 0, 1.25),
}
IN_HAND_PLAIN = IN_HAND | {
    ("checkpoint", "graph"): (3, 1, 2),
    ("shared", "graph"): (1, 7, 0),
    ("shared", "xla"): (1, 0, 2.7),
}


@dataclasses.dataclass(frozen=True)
class _Way:
    """How a step is computed. `size` is that of a value, `wide` that of a statistic, in bytes."""

    batch_size: int
    memory: str
    mode: str
    size: int

    @property
    def half(self):
        return self.size < 4

    @property
    def wide(self):
        return max(4, self.size)

    @property
    def normed(self):
        """Bytes that a batch norm with its ReLU keeps of each value: its input, widened, and the output.

        XLA on a CPU widens the output too, since it has no convolutions in half precision.
        """
        return self.wide + self.size + (self.wide if self.half and self.mode == "xla" else 0)

    def chunks(self, pixels):
        return CHUNKS if self.memory == "shared" and self.mode == "graph" and pixels >= CHUNKED_PIXELS else 1

    def in_hand(self, pixels, bottleneck=True):
        """Bytes in hand, forwards and backwards, for each value that a layer reads."""
        forward, narrow, wide = (IN_HAND if bottleneck else IN_HAND_PLAIN)[self.memory, self.mode]
        if self.memory == "shared" and self.mode == "graph" and self.half:
            wide = 3  # each operation widens its inputs
        return forward * self.size, (narrow * self.size + wide * self.wide) / self.chunks(pixels)

    def between(self, pixels):
        """Bytes in hand for each value between a layer's two convolutions: z and its gradient, and what comes of a chunk's."""
        if self.mode == "xla":
            return 2.7 * self.wide
        return 2 * self.size + self.wide / self.chunks(pixels)


def _block(part, way):
    pixels = math.prod(part.size)
    values = way.batch_size * pixels
    k, narrow = part.growth_rate, part.narrow
    forward, backward = way.in_hand(pixels, part.bottleneck)
    layers = []
    for i, (c, trained) in enumerate(zip(part.widths, layer_weights(part), strict=True)):
        mask = narrow + k if part.dropout else 0  # a byte for each value
        in_hand = c * backward
        if way.memory == "naive":
            kept = (c + narrow) * way.normed + mask
        else:
            kept = (k + (part.channels if i == 0 else 0)) * way.size
            if way.memory == "checkpoint":
                kept += narrow * way.normed + mask
            else:
                in_hand += narrow * way.between(pixels) + 3 * mask * way.wide
        layers.append(
            _Layer(
                part=part.name,
                name=f"{part.name}/{i + 1}",
                trained=trained if part.trained else 0,
                kept=values * kept,
                forward=values * (c * forward + narrow * way.size),
                gradient=values * (c + k) * way.size,
                backward=values * in_hand,
            )
        )
    return layers


def _stem(part, way):
    half = [(n + 1) // 2 for n in part.size]
    values = way.batch_size * math.prod(half) * part.out
    if way.memory == "shared":
        kept = way.batch_size * math.prod(n + 6 for n in part.size) * part.channels * way.size  # the image, padded
        in_hand = values * (2 * way.size + 3 * way.wide / CHUNKS if way.mode == "graph" else 9 * way.wide)
        forward = values * (2 * way.size + 2 * way.wide / CHUNKS)
    else:
        padded = way.batch_size * math.prod(n + 2 for n in half) * part.out
        pooled = way.batch_size * math.prod(part.size_out) * part.out if way.half else 0
        kept = values * way.normed + (padded + pooled) * way.size
        in_hand, forward = 3 * values * way.wide, values * way.wide
    return _Layer.alone(part, kept, forward, 0, in_hand)


def _transition(part, way):
    pixels = math.prod(part.size)
    values = way.batch_size * pixels * part.channels
    if way.memory == "shared":
        _, backward = way.in_hand(pixels)
        masks = 3.5 * way.batch_size * pixels * part.out * way.wide if part.dropout else 0
        kept, forward, gradient, in_hand = 0, values * way.size / 2 + masks, values * way.size, values * backward + masks
    else:
        mask = way.batch_size * pixels * part.out if part.dropout else 0
        kept, forward, gradient, in_hand = values * way.normed + mask, values * way.wide, 0, 3 * values * way.wide
    return _Layer.alone(part, kept, forward, gradient, in_hand)


def _norm(part, way):
    values = way.batch_size * math.prod(part.size) * part.channels
    return _Layer.alone(part, values * way.normed, values * way.wide, 0, 3 * values * way.wide)


def _convolution(part, way):
    """What it hands on is read by a dense block or a batch norm, which counts it."""
    values = way.batch_size * math.prod(part.size_out) * part.out
    return _Layer.alone(part, 0, values * way.size, 0, values * way.size)


def _other(part, way):
    values = way.batch_size * math.prod(part.size_out) * part.out
    return _Layer.alone(part, values * way.size, 0, 0, 2 * values * way.size)


LAYERS = {
    "stem": _stem,
    "convolution": _convolution,
    "block": _block,
    "transition": _transition,
    "norm": _norm,
    "other": _other,
}

# === Through the step ===

# What the allocator hands out over what is asked for, since a free piece up to twice as large is not cut: (mode, memory,
# whether in half precision). XLA lays its tensors out itself; its factors stand for what this file leaves out.
ROUNDING = {
    ("graph", "naive", False): 1.08,
    ("graph", "naive", True): 1.11,
    ("graph", "checkpoint", False): 1.065,
    ("graph", "checkpoint", True): 1.19,
    ("graph", "shared", False): 1.1,
    ("graph", "shared", True): 1.10,
    ("xla", "naive", False): 1.05,
    ("xla", "naive", True): 1.11,
    ("xla", "checkpoint", False): 1.05,
    ("xla", "checkpoint", True): 1.07,
    ("xla", "shared", False): 1.13,
    ("xla", "shared", True): 1.21,
}
WEIGHTS_ROUNDING = {"graph": 1.16, "xla": 1.04}


def _walk_through(layers, parts, way, optimizer, keeps_gradients):
    rounding = ROUNDING[way.mode, way.memory, way.half]
    slots, early = OPTIMIZERS[optimizer]
    trained, state = sum(part.trained for part in parts), sum(part.state for part in parts)
    images = way.batch_size * math.prod(parts[0].size) * parts[0].channels * 4
    each, rounded = way.wide, WEIGHTS_ROUNDING[way.mode]
    baseline = ((1 + slots) * trained + state) * each * rounded + images
    # Copies of kernels, and products of slots, of the layers whose backward pass is still to come. XLA has gradients instead:
    # those that wait for the end of the step, fewer where the backward pass does not wait either.
    if way.mode == "graph":
        ahead = (early * each + (way.size if way.half else 0)) * rounded
    else:
        ahead = (0.7 if way.memory == "shared" else 1) * each * rounded
    # Between steps and over the whole of each, a tensor as wide as the first block stays with the executor of a plain graph.
    first = next((part for part in parts if part.kind == "block"), None)
    stays = way.batch_size * math.prod(first.size) * first.out * way.wide if first else 0
    is_trained = first is not None and first.trained > 0
    kept = stays if is_trained and way.mode == "graph" and way.memory != "shared" else 0
    weights, moments, kept_by_part = baseline + ahead * trained, [], {}
    for layer in layers:
        kept += layer.kept * rounding
        kept_by_part[layer.part] = kept_by_part.get(layer.part, 0) + round(layer.kept * rounding)
        moments.append(Moment(layer.name, "forward", weights, kept, 0, layer.forward * rounding))
    for layer in reversed([layer for layer in layers if not layer.frozen]):
        in_hand = layer.gradient * rounding, layer.backward * rounding
        moments.append(Moment(layer.name, "backward", weights, kept, *in_hand))
        kept -= layer.kept * rounding
        if way.mode == "graph":
            weights += layer.trained * (each * keeps_gradients - ahead)
    return Prediction(moments, kept_by_part, baseline)
