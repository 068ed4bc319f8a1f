"""Memory, drawn: against depth or batch, and through one step."""

from collections.abc import Sequence

import matplotlib.axes
import numpy as np

from densenets.memory.prediction import Prediction

COLOURS = {"naive": "tab:red", "checkpoint": "tab:blue", "shared": "tab:green"}
MIB = 2**20


def draw_scaling(
    axes: matplotlib.axes.Axes,
    label: str,
    values: Sequence[int],
    measured: dict[str, Sequence[int]],
    predicted: dict[str, Sequence[int]] | None = None,
) -> dict[str, float]:
    """Draws memory against `values` (depths, batches) on logarithmic axes: points where measured, lines where predicted.

    Args:
        axes: of matplotlib.
        label: what the values are.
        values: along the axis.
        measured: bytes for each value, by strategy.
        predicted: the same.

    Returns:
        The exponent that fits the measured points, by strategy.
    """
    exponents = {}
    for memory, peaks in measured.items():
        exponents[memory] = exponent(values, peaks)
        text = f"{memory}: exponent {exponents[memory]:.2f}"
        axes.loglog(values, np.divide(peaks, MIB), "o", color=COLOURS.get(memory), label=text)
        if predicted:
            axes.loglog(values, np.divide(predicted[memory], MIB), "-", color=COLOURS.get(memory), linewidth=1)
    axes.set(xlabel=label, ylabel="MiB")
    axes.set_xticks(values, map(str, values))
    axes.minorticks_off()
    axes.legend()
    return exponents


def exponent(values: Sequence[float], sizes: Sequence[float]) -> float:
    """The power of `values` with which `sizes` grow, by least squares of the logarithms."""
    return float(np.polyfit(np.log(values), np.log(sizes), 1)[0])


def draw_timeline(axes: matplotlib.axes.Axes, prediction: Prediction, title: str = "") -> None:
    """Draws what lives while each layer runs, forwards and then backwards, as `predict` has it."""
    kinds = ("weights", "kept", "gradients", "transient")
    bytes_ = np.array([[getattr(moment, kind) for kind in kinds] for moment in prediction.moments]).T / MIB
    axes.stackplot(range(len(prediction.moments)), bytes_, labels=kinds, step="mid")
    axes.axvline(sum(moment.direction == "forward" for moment in prediction.moments) - 0.5, color="black")
    starts = [(i, moment.part[:-2]) for i, moment in enumerate(prediction.moments) if moment.part.endswith("/1")]
    if not starts:
        starts = [(i, moment.part) for i, moment in enumerate(prediction.moments)]
    axes.set_xticks([i for i, _ in starts], [part for _, part in starts], fontsize=8)
    axes.set(ylabel="MiB", title=title)
    axes.legend(loc="upper left", fontsize=7)
