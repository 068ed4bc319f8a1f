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
    head, _, usage = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        "python -m densenets.memory", description=head + usage, formatter_class=argparse.RawDescriptionHelpFormatter
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
    wanted = plan.batch_size
    lines = [
        f"{options.model} in {planning.in_words(plan.budget)} ({options.mode}, {options.precision}, {options.optimizer})",
        "",
    ]
    lines += ["| memory     | largest batch | takes      |" + (f" at batch {wanted} |" if wanted else "")]
    lines += ["|------------|---------------|------------|" + ("-" * (len(f" at batch {wanted} ")) + "|" if wanted else "")]
    for fit in plan.fits:
        takes = (
            planning.in_words(fit.largest_batch_bytes)
            if fit.largest_batch
            else f"(1: {planning.in_words(fit.largest_batch_bytes)})"
        )
        line = f"| {fit.memory:10} | {fit.largest_batch or 'none':>13} | {takes:>10} |"
        lines += [line + (f" {planning.in_words(fit.batch_bytes):>{len(f'at batch {wanted}')}} |" if wanted else "")]
    what = f"a batch of {wanted}" if wanted else "this"
    lines += ["", f"Fastest that holds {what}: {plan.fastest}" if plan.fastest else f"Nothing holds {what}."]
    return dataclasses.asdict(plan), "\n".join(lines)


def _deepest(options):
    if options.batch_size is None:
        raise ValueError("`--batch-size` must be given where the deepest network is sought.")
    size = options.image_size or 32
    depths = planning.deepest(
        options.budget, options.batch_size, growth_rate=options.growth_rate, image_size=size, **_way(options)
    )
    budget = planning.parse_bytes(options.budget)
    lines = [
        f"The deepest DenseNet-BC (k={options.growth_rate}) on {options.batch_size} images of {size}x{size} in "
        f"{planning.in_words(budget)} ({options.mode}, {options.precision}, {options.optimizer})",
        "",
        "| memory     | depth L |",
        "|------------|---------|",
        *(f"| {memory:10} | {depth or 'none':>7} |" for memory, depth in depths.items()),
    ]
    return {"budget": budget, "batch_size": options.batch_size, "depths": depths}, "\n".join(lines)


if __name__ == "__main__":
    main()
