"""What fits a budget of memory: `python -m densenets.memory`.

    python -m densenets.memory densenet_121 --image-size=224 --budget=16GiB
    python -m densenets.memory densenet_bc_100_12 --budget=4GiB --batch-size=64 --precision=mixed_bfloat16 --json
    python -m densenets.memory --growth-rate=12 --batch-size=64 --budget=4GiB

With a network: each strategy's largest batch, and the fastest strategy that holds `--batch-size`. Without one: the deepest
DenseNet-BC that trains with `--batch-size`. The figures are predictions (docs/memory.md).
"""

import argparse
import dataclasses
import json
import sys

from densenets import tables
from densenets.memory import planning, prediction


def main(argv=None):
    """Prints the answer to a command line."""
    options = _parser().parse_args(argv)
    try:
        answer, text = _plan(options) if options.model else _deepest(options)
    except ValueError as error:
        sys.exit(str(error))
    print(json.dumps(answer, indent=2) if options.json else text)


def _parser():
    parser = argparse.ArgumentParser(
        "python -m densenets.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a name of densenets.list_models(); without, the deepest network is sought")
    parser.add_argument("--budget", required=True, help="such as 16GiB")
    parser.add_argument("--batch-size", type=int, help="images in a step, on one device")
    parser.add_argument("--image-size", type=int, help="height and width; by default the network's own")
    parser.add_argument("--growth-rate", type=int, default=12, help="k, where the deepest network is sought")
    parser.add_argument("--mode", choices=prediction.MODES, default="graph")
    parser.add_argument("--precision", choices=list(prediction.SIZES), default="float32")
    parser.add_argument("--optimizer", choices=list(prediction.OPTIMIZERS), default="sgd")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _way(options):
    return {key: getattr(options, key) for key in ("mode", "precision", "optimizer")}


def _plan(options):
    plan = planning.plan(
        options.model, options.budget, batch_size=options.batch_size, image_size=options.image_size, **_way(options)
    )
    rows = [["memory", "largest batch", "takes"]]
    for fit in plan.fits:
        takes = planning.in_words(fit.largest_batch_bytes)
        rows.append([fit.memory, str(fit.largest_batch or "none"), takes if fit.largest_batch else f"(1: {takes})"])
    what = "this"
    if plan.batch_size is not None:
        what = f"a batch of {plan.batch_size}"
        column = [f"at batch {plan.batch_size}", *(planning.in_words(fit.batch_bytes) for fit in plan.fits)]
        rows = [[*row, cell] for row, cell in zip(rows, column, strict=True)]
    verdict = f"Fastest that holds {what}: {plan.fastest}" if plan.fastest else f"Nothing holds {what}."
    text = f"{options.model} in {_budget(plan.budget, options)}\n\n{tables.aligned(rows)}\n\n{verdict}"
    return dataclasses.asdict(plan), text


def _deepest(options):
    if options.batch_size is None:
        raise ValueError("`--batch-size` must be given where the deepest network is sought.")
    size = 32 if options.image_size is None else options.image_size
    depths = planning.deepest(
        options.budget, options.batch_size, growth_rate=options.growth_rate, image_size=size, **_way(options)
    )
    budget = planning.parse_bytes(options.budget)
    images = f"{options.batch_size} images of {size}x{size}"
    head = f"The deepest DenseNet-BC (k={options.growth_rate}) on {images} in {_budget(budget, options)}"
    rows = [["memory", "depth L"], *([memory, str(depth or "none")] for memory, depth in depths.items())]
    return {"budget": budget, "batch_size": options.batch_size, "depths": depths}, f"{head}\n\n{tables.aligned(rows)}"


def _budget(budget, options):
    return f"{planning.in_words(budget)} ({options.mode}, {options.precision}, {options.optimizer})"


if __name__ == "__main__":
    main()
