"""Memory predicted against memory measured: `python -m densenets.benchmark_prediction`.

    python -m densenets.benchmark_prediction --workdir=runs/prediction

Every case is one training step in a process of its own, measured five times; the median counts: in a graph, what lives between
steps and the peak above it; under XLA the compiler's own total. Writes prediction.json, prediction.md and prediction.png, and
goes on from a prediction.json that it finds. It takes half an hour on two CPU cores, two cases at a time (nothing is timed).

    python -m densenets.benchmark_prediction --plans

holds plans against measurements: does the largest batch of a plan fit, and is twice as large over the budget?
"""

import argparse
import concurrent.futures
import json
import pathlib
import statistics

from densenets import benchmark, files, memory
from densenets.benchmark_worker import design
from densenets.dense_block import STRATEGIES
from densenets.memory.architecture import parts_from
from densenets.memory.pictures import COLOURS
from densenets.memory.prediction import predict_parts

F, B = "float32", "mixed_bfloat16"
# network (LxK is DenseNet-BC), batch, image size, precision, dropout, modes
GRID = [
    ("40x12", 64, 32, F, 0.0, ("graph", "xla")),
    ("40x12", 64, 32, B, 0.0, ("graph", "xla")),
    ("40x12", 256, 32, F, 0.0, ("graph",)),
    ("40x12", 64, 32, F, 0.2, ("graph",)),
    ("22x24", 128, 32, F, 0.0, ("graph", "xla")),
    ("40x36", 32, 32, F, 0.0, ("graph", "xla")),
    ("100x12", 32, 32, F, 0.0, ("graph", "xla")),
    ("100x12", 8, 64, F, 0.0, ("graph",)),
    ("100x12", 16, 32, B, 0.0, ("graph",)),
    ("100x24", 8, 32, F, 0.0, ("graph",)),
    ("160x12", 16, 32, F, 0.0, ("graph",)),
    ("densenet_40_12", 32, 32, F, 0.0, ("graph", "xla")),
    ("densenet_40_12", 32, 32, F, 0.2, ("graph",)),
    ("densenet_121", 8, 224, F, 0.0, ("graph", "xla")),
    ("densenet_121", 8, 224, B, 0.0, ("graph",)),
    ("densenet_121", 8, 96, F, 0.0, ("graph", "xla")),
    ("densenet_121", 8, 96, B, 0.0, ("graph", "xla")),
    ("densenet_169", 4, 160, F, 0.0, ("graph", "xla")),
    ("densenet_161", 4, 96, F, 0.0, ("graph", "xla")),
    ("densenet_201", 8, 64, F, 0.0, ("graph",)),
]

# network, strategy, budget
PLANS = [
    ("densenet_40_12", "checkpoint", "0.5GiB"),
    ("40x12", "naive", "1GiB"),
    ("100x12", "shared", "0.5GiB"),
    ("densenet_121", "shared", "1GiB"),
    ("densenet_121", "naive", "2GiB"),
    ("densenet_121", "checkpoint", "4GiB"),
]


def main():
    """Does what the command line asks for."""
    parser = argparse.ArgumentParser("python -m densenets.benchmark_prediction")
    parser.add_argument("--workdir", type=pathlib.Path, default="runs/prediction", help="where the results go")
    parser.add_argument("--processes", type=int, default=2, help="cases measured at once")
    parser.add_argument("--plans", action="store_true", help="measures what plans say instead")
    options = parser.parse_args()
    if options.plans:
        for line in plan_table():
            print(line, flush=True)
    else:
        _hold_against_measurements(options.workdir, options.processes)


def _hold_against_measurements(workdir, processes):
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / "prediction.json"
    measured = json.loads(path.read_text()) if path.exists() else []
    known = [{key: found[key] for key in CASE} for found in measured]
    missing = [wanted for wanted in cases() if wanted not in known]
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        for done in concurrent.futures.as_completed([pool.submit(measure, wanted) for wanted in missing]):
            measured.append(done.result())
            print(measured[-1], flush=True)
            files.replace(path, lambda partial: partial.write_text(json.dumps(measured, indent=1) + "\n"))
    rows = [found | {"predicted": predict(found)} for found in measured if "error" not in found]
    files.replace(workdir / "prediction.md", lambda partial: partial.write_text(table(rows) + "\n"))
    files.replace(workdir / "prediction.png", lambda partial: plot(rows).savefig(partial, format="png", dpi=120))
    print(summary(rows))


CASE = ("model", "batch_size", "image_size", "precision", "dropout_rate", "mode", "memory")


def case(model, batch_size, image_size, precision=F, dropout_rate=0.0, mode="graph", memory="shared"):
    """One case, as a dictionary."""
    return dict(zip(CASE, (model, batch_size, image_size, precision, dropout_rate, mode, memory), strict=True))


def cases():
    """Every case of the grid."""
    return [case(*row[:-1], mode, strategy) for row in GRID for mode in row[-1] for strategy in STRATEGIES]


def measure(case, repeats=5):
    """The case with the bytes that its step took in all, by the median of `repeats` measurements, or with an error."""
    size, options = case["image_size"], {"precision": case["precision"], "dropout_rate": case["dropout_rate"]}
    worker = benchmark.Worker(
        case["memory"], case["model"], case["batch_size"], case["mode"], "training", input_shape=(size, size, 3), **options
    )
    answers = [worker.case, *(worker.ask("measure") for _ in range(repeats - 1 if case["mode"] == "graph" else 0))]
    found = worker.finish()
    if "error" in found:
        return case | {"error": found["error"]}
    if case["mode"] == "xla":
        return case | {"measured": found["compiled_bytes"]}
    totals = [answer["baseline_bytes"] + answer["peak_bytes"] for answer in answers]
    return case | {"measured": int(statistics.median(totals)), "range": [min(totals), max(totals)]}


def predict(case):
    """The bytes predicted of a case."""
    parts = parts_from((case["image_size"],) * 2, dropout_rate=case["dropout_rate"], **design(case["model"]))
    return int(predict_parts(parts, case["batch_size"], case["memory"], case["mode"], case["precision"], "sgd"))


def plan_table():
    """A line for each of `PLANS`: what its largest batch took, and one twice as large."""
    yield "| network | strategy | budget | largest batch | took | twice as many took |"
    yield "|---|---|---|---|---|---|"
    for model, strategy, budget in PLANS:
        plan = memory.plan(design(model), budget)
        [batch_size] = [fit.largest_batch for fit in plan.fits if fit.memory == strategy]
        size = 224 if "blocks" in design(model) else 32
        cells = [model, strategy, budget, batch_size]
        for n in (batch_size, 2 * batch_size):
            found = measure(case(model, n, size, memory=strategy), repeats=1)
            cells.append(memory.in_words(found["measured"]) if "measured" in found else found["error"][:80])
        yield "| " + " | ".join(map(str, cells)) + " |"


# === What it found ===


def error(row):
    """The relative error of a prediction; above 0 where it is too high."""
    return row["predicted"] / row["measured"] - 1


def summary(rows):
    """The distribution of the errors in a sentence."""
    errors = sorted(map(error, rows))
    return (
        f"{len(errors)} cases: the median error is {statistics.median(map(abs, errors)):.1%}, the largest "
        f"{max(map(abs, errors)):.1%}; from {errors[0]:+.1%} to {errors[-1]:+.1%}."
    )


def table(rows):
    """Every case, in Markdown."""
    lines = [
        summary(rows),
        "",
        "| model | batch | image | precision | dropout | mode | memory | measured | predicted | error |",
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: [str(row[key]) for key in CASE]):
        mib = [f"{row[key] / benchmark.MIB:.0f} MiB" for key in ("measured", "predicted")]
        size = f"{row['image_size']}x{row['image_size']}"
        cells = [row["model"], row["batch_size"], size, row["precision"], row["dropout_rate"], row["mode"], row["memory"], *mib]
        lines.append("| " + " | ".join(map(str, [*cells, f"{error(row):+.1%}"])) + " |")
    return "\n".join(lines)


def plot(rows):
    """Predicted over measured, on logarithmic axes, with the bounds that are promised."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(6, 5.5), layout="constrained")
    axes = figure.subplots()
    for strategy, colour in COLOURS.items():
        for mode, marker in (("graph", "o"), ("xla", "^")):
            own = [row for row in rows if (row["memory"], row["mode"]) == (strategy, mode)]
            x, y = ([row[key] / benchmark.MIB for row in own] for key in ("measured", "predicted"))
            axes.loglog(x, y, marker, color=colour, label=f"{strategy}, {mode}", markersize=5, alpha=0.7)
    ends = [
        0.9 * min(row["measured"] for row in rows) / benchmark.MIB,
        1.1 * max(row["measured"] for row in rows) / benchmark.MIB,
    ]
    axes.plot(ends, ends, color="black", linewidth=0.7)
    axes.fill_between(
        ends, [0.95 * end for end in ends], [1.15 * end for end in ends], color="grey", alpha=0.2, label="-5% to +15%"
    )
    axes.set(xlabel="measured, MiB", ylabel="predicted, MiB", title="Memory of a training step in all")
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
