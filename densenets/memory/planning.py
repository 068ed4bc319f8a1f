"""Memory, planned: what fits a budget."""

import bisect
import dataclasses
import re

import keras

from densenets import zoo
from densenets.dense_block import STRATEGIES
from densenets.memory.architecture import Part, parts_from, parts_of
from densenets.memory.prediction import predict_parts

UNITS = (
    {"": 1, "b": 1} | {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)} | {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}
)
LARGEST_BATCH, DEEPEST_BLOCKS = 2**20, 1000  # where the searches end: images, and layers in a block
HEADROOM = 0.07  # of the budget is left: as much have predictions been seen to be too low
# Below, `"shared"` is slower than plain layers: a network so shallow on so few pixels (README, k=12 at L=40 and batch 16).
SHALLOW_LAYERS, SHALLOW_PIXELS = 96, 32 * 32 * 32


@dataclasses.dataclass(frozen=True)
class Fit:
    """What one strategy makes of a budget.

    Attributes:
        memory: the strategy.
        largest_batch: the most images in a step that fit; 0 where one does not.
        largest_batch_bytes: what a step on them takes in all.
        batch_bytes: what a step on the batch that was asked for takes; `None` where none was.
    """

    memory: str
    largest_batch: int
    largest_batch_bytes: int
    batch_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What fits.

    Attributes:
        budget: bytes.
        batch_size: the one asked for, or `None`.
        fits: a `Fit` for each strategy.
        fastest: the strategy to take: of those that hold `batch_size` (or, without one, any image at all) that which took the
            least time in measurements; `None` where none fits.
    """

    budget: int
    batch_size: int | None
    fits: tuple[Fit, ...]
    fastest: str | None


def plan(
    model: str | dict | keras.Model,
    budget: int | float | str,
    *,
    batch_size: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    mode: str = "graph",
    precision: str = "float32",
    optimizer: str = "sgd",
) -> Plan:
    """Says for each strategy the largest batch that fits a budget, and which to take. Nothing is built or run.

    ```python
    densenets.memory.plan("densenet_121", "16GiB", batch_size=256)
    ```

    Args:
        model: a name of `densenets.list_models()`, the arguments of `DenseNet` or `DenseNetCifar`, or a built model.
        budget: bytes, or a text such as `"16GiB"`. Leave out what the CUDA context and cuDNN's workspace take. A plan fills 93%
            of it, since predictions may be a little low.
        batch_size: images in a step, on one device, that must fit.
        image_size: height and width, or one number for both; by default the variant's, or the model's own.
        mode: as for `predict`.
        precision: as for `predict`.
        optimizer: as for `predict`.

    Returns:
        A `Plan`.

    Raises:
        ValueError: for an argument that cannot be, naming it; for an unknown name, with the nearest ones.
    """
    budget = parse_bytes(budget)
    room = budget * (1 - HEADROOM)
    parts = _parts(model, image_size)
    way = {"mode": mode, "precision": precision, "optimizer": optimizer}
    fits = []
    for memory in STRATEGIES:
        largest = _most(lambda n, memory=memory: predict_parts(parts, n, memory, **way) <= room, LARGEST_BATCH)
        at_largest = int(predict_parts(parts, max(1, largest), memory, **way))
        wanted = None if batch_size is None else int(predict_parts(parts, batch_size, memory, **way))
        fits.append(Fit(memory, largest, at_largest, wanted))
    holding = {fit.memory for fit in fits if fit.largest_batch >= (batch_size or 1)}
    order = by_speed(parts, batch_size or max(fit.largest_batch for fit in fits))
    return Plan(budget, batch_size, tuple(fits), next((memory for memory in order if memory in holding), None))


def by_speed(parts: list[Part], batch_size: int) -> tuple[str, ...]:
    """The strategies, the fastest first, as the README's benchmarks have them."""
    blocks = [part for part in parts if part.kind == "block"]
    layers = sum(block.num_layers * (2 if block.bottleneck else 1) for block in blocks)
    pixels = batch_size * blocks[0].size[0] * blocks[0].size[1] if blocks else 0
    if layers < SHALLOW_LAYERS and pixels < SHALLOW_PIXELS:
        return ("naive", "shared", "checkpoint")
    return ("shared", "naive", "checkpoint")


def deepest(
    budget: int | float | str,
    batch_size: int,
    *,
    growth_rate: int = 12,
    image_size: int | tuple[int, int] = 32,
    mode: str = "graph",
    precision: str = "float32",
    optimizer: str = "sgd",
) -> dict[str, int | None]:
    """The depth L, by strategy, of the deepest DenseNet-BC with three blocks (`DenseNetCifar`) that fits a budget.

    Args:
        budget: as for `plan`.
        batch_size: images in a step.
        growth_rate: k.
        image_size: as for `plan`.
        mode: as for `predict`.
        precision: as for `predict`.
        optimizer: as for `predict`.

    Returns:
        A depth for each strategy, `None` where not even one layer a block fits.

    Raises:
        ValueError: as `plan`.
    """
    budget, size = parse_bytes(budget), _image_size(image_size)
    if isinstance(growth_rate, bool) or not isinstance(growth_rate, int) or growth_rate < 1:
        raise ValueError(f"`growth_rate` must be a positive integer, got {growth_rate!r}.")
    way = {"mode": mode, "precision": precision, "optimizer": optimizer}

    def fits(n, memory):
        parts = parts_from(size, depth=6 * n + 4, growth_rate=growth_rate)
        return predict_parts(parts, batch_size, memory, **way) <= budget * (1 - HEADROOM)

    found = {memory: _most(lambda n, memory=memory: fits(n, memory), DEEPEST_BLOCKS) for memory in STRATEGIES}
    return {memory: 6 * n + 4 if n else None for memory, n in found.items()}


def _most(fits, high):
    """The largest number from 1 to `high` that fits, 0 where none does: what fits does so for all smaller ones."""
    return bisect.bisect_left(range(1, high + 1), True, key=lambda n: not fits(n))


def _parts(model, image_size):
    size = None if image_size is None else _image_size(image_size)
    if isinstance(model, keras.Model):
        return parts_of(model, size)
    arguments = zoo.arguments(model) if isinstance(model, str) else dict(model)
    return parts_from(size or ((224, 224) if "blocks" in arguments else (32, 32)), **arguments)


def _image_size(value):
    size = value if isinstance(value, (tuple, list)) else (value, value)
    if len(size) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in size):
        raise ValueError(f"`image_size` must be a positive number of pixels, or height and width; got {value!r}.")
    return tuple(size)


def parse_bytes(text: int | float | str) -> int:
    """Bytes from a number or a text such as `"16GiB"`, `"500 MB"`, `"2.5e9"`.

    Raises:
        ValueError: for what is no positive size.
    """
    match = re.fullmatch(r"\s*(-?[\d.]+(?:e[+-]?\d+)?)\s*([a-z]*)\s*", str(text).lower())
    try:
        size = float(match[1]) * UNITS[match[2]] if match else 0
    except (KeyError, ValueError):
        size = 0
    if not 1 <= size < 2**63:
        raise ValueError(f"`budget` must be a positive number of bytes, or a text such as '16GiB' or '500MB'; got {text!r}.")
    return int(size)


def in_words(size: int) -> str:
    """A number of bytes for people: `"2.3 GiB"`."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
