"""The page of all networks: `python -m densenets.model_page --out=docs/models.md`.

Parameters and FLOPs are counted from the built models; the memory of a training step is measured, each network with each
strategy in a process of its own. That takes about half an hour on two CPU cores.
"""

import math
import pathlib

from absl import app, flags

from densenets import benchmark, files, zoo
from densenets.dense_block import STRATEGIES
from densenets.flops import count_flops
from densenets.weights import PUBLISHED

flags.DEFINE_string("out", "docs/models.md", "Where the page goes.")

BATCH_SIZE = {224: 4, 32: 16}  # images in the measured step, by image size
HEAD = """# All networks

`densenets.create_model(name)` builds them. Written by `python -m densenets.model_page`.

- Parameters: trainable weights, counted; in brackets as published.
- FLOPs: multiply-adds for one image, counted by `densenets.count_flops`; in brackets as torchvision states them.
- Error: in percent, as published, of one model and one crop; C10+ and C100+ with data augmentation.
- Memory: the peak of a training step above what lives between steps, for each image of a batch ({batches}), plain
  graph on a CPU, float32. What a step needs once for all images, such as the weights' gradients, is in it.
- Weights: `weights="imagenet"` where Keras Applications publishes them, and what `densenets.weights.load` reads.

| name | parameters | FLOPs | error | naive | checkpoint | shared | weights |
|---|---|---|---|---|---|---|---|
"""


def main(_):
    """Writes the page."""
    rows, measured = [], {}
    for name, variant in zoo.VARIANTS.items():
        model = zoo.create_model(name)
        architecture = repr(variant.arguments)  # which the cosine networks share with others
        if architecture not in measured:
            batch_size = BATCH_SIZE[model.input_shape[1]]
            measured[architecture] = [_memory(name, strategy, batch_size) for strategy in STRATEGIES]
        rows.append(_row(name, model, variant, measured[architecture]))
        print(rows[-1], flush=True)
    notes = [f"- {name}: {v.published.note}" for name, v in zoo.VARIANTS.items() if v.published.note]
    batches = ", ".join(f"{batch} at {size}x{size}" for size, batch in BATCH_SIZE.items())
    page = HEAD.format(batches=batches) + "\n".join(rows) + "\n\nSources: " + _sources() + "\n\n" + "\n".join(notes) + "\n"
    out = pathlib.Path(flags.FLAGS.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    files.replace(out, lambda path: path.write_text(page))


def _row(name, model, variant, memory):
    published = variant.published
    parameters = f"{sum(math.prod(v.shape) for v in model.trainable_variables) / 1e6:.2f}M"
    if published.parameters is not None:
        parameters += f" ({published.parameters}M)"
    flops = f"{count_flops(model) / 1e9:.3f}G" + (f" ({published.flops}G)" if published.flops is not None else "")
    errors = ", ".join(f"{data} {error}" for data, error in published.errors.items())
    return f"| {name} | {parameters} | {flops} | {errors} | {' | '.join(memory)} | {_where(variant)} |"


def _memory(name, strategy, batch_size):
    case = benchmark.Worker(strategy, name, batch_size, "graph", "training").finish()
    return f"failed: {case['error'][:60]}" if "error" in case else f"{case['peak_bytes'] / benchmark.MIB / batch_size:.1f} MiB"


def _where(variant):
    blocks = variant.arguments.get("blocks")
    if variant.arguments["growth_rate"] == 32 and blocks in PUBLISHED:
        return "imagenet; torchvision, timm"
    return "torchvision, timm" if blocks == (6, 12, 36, 24) else "-"


def _sources():
    return ", ".join(dict.fromkeys(variant.published.source for variant in zoo.VARIANTS.values())) + "."


if __name__ == "__main__":
    app.run(main)
