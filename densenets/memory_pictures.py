"""The pictures of docs/memory.md: `python -m densenets.memory_pictures --out=docs`.

Memory against depth and against batch is measured, each case in a process of its own; the lines are what `memory.predict` says.
The timeline of a step is predicted. It takes about ten minutes on two CPU cores.
"""

import pathlib

import matplotlib.figure
from absl import app, flags

from densenets import benchmark, benchmark_prediction, files
from densenets.dense_block import STRATEGIES
from densenets.memory import pictures
from densenets.memory.architecture import parts_from
from densenets.memory.prediction import predict_parts

flags.DEFINE_string("out", "docs", "Where the pictures go.")

DEPTHS, BATCHES = (22, 40, 64, 100, 160), (8, 16, 32, 64)


def main(_):
    """Measures, draws and writes."""
    out = pathlib.Path(flags.FLAGS.out)
    series = (
        ("depth L (k=12, batch 16)", DEPTHS, [(f"{depth}x12", 16) for depth in DEPTHS]),
        ("batch (L=100, k=12)", BATCHES, [("100x12", batch) for batch in BATCHES]),
    )
    figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout="constrained")
    for axes, (label, values, models) in zip(figure.subplots(1, 2), series, strict=True):
        cases = {memory: [benchmark_prediction.case(*model, 32, memory=memory) for model in models] for memory in STRATEGIES}
        measured = {memory: [benchmark_prediction.measure(case)["measured"] for case in own] for memory, own in cases.items()}
        predicted = {memory: list(map(benchmark_prediction.predict, own)) for memory, own in cases.items()}
        print(label, pictures.draw_scaling(axes, label, values, measured, predicted), flush=True)
        print({memory: [round(m / benchmark.MIB) for m in found] for memory, found in measured.items()}, flush=True)
    figure.suptitle("A training step of DenseNet-BC in all: measured (points), predicted (lines)")
    _write(out / "memory_scaling.png", figure)
    _write(out / "memory_timeline.png", timeline())


def timeline():
    """What lives through one step of DenseNet-BC (L=100, k=12) on 32 images, naive against shared."""
    figure = matplotlib.figure.Figure(figsize=(11, 4), layout="constrained")
    parts = parts_from((32, 32), depth=100, growth_rate=12)
    for axes, memory in zip(figure.subplots(1, 2, sharey=True), ("naive", "shared"), strict=True):
        pictures.draw_timeline(axes, predict_parts(parts, 32, memory), memory)
    return figure


def _write(path, figure):
    files.replace(path, lambda partial: figure.savefig(partial, format="png", dpi=120))


if __name__ == "__main__":
    app.run(main)
