"""What a comparison found: for programs (`report.json`), for people (`report.md`, the terminal) and as plots."""

import json
import pathlib

import matplotlib.figure

from densenets import files

MIB = 2**20


def make_workdir(workdir):
    """Creates `workdir` and makes sure that it can be written.

    Raises:
        OSError: where it cannot.
    """
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    files.replace(workdir / "report.json", lambda path: path.write_text("{}"))
    return workdir


def write(result, workdir):
    """Writes the report's files, each beside its old version and then in its place."""
    files.replace(workdir / "report.json", lambda path: path.write_text(json.dumps(result, indent=2) + "\n"))
    files.replace(workdir / "report.md", lambda path: path.write_text(markdown(result)))
    if result["runs"]:
        files.replace(workdir / "cost.png", lambda path: _plot_cost(result).savefig(path, format="png", dpi=120))
        files.replace(workdir / "curves.png", lambda path: _plot_curves(result).savefig(path, format="png", dpi=120))


# === Text ===


def markdown(result):
    """The report as a page."""
    environment = result["environment"]
    lines = [
        f"# Comparison: {result['status']}",
        "",
        f"{environment['source']}: {environment['train_images']} training and {environment['test_images']} test images. "
        f"{environment['device']}, TensorFlow {environment['tensorflow']}, Keras {environment['keras']}.",
        "",
        table(result),
        "",
        "Peak: the most memory alive at once in a training step, above what lives between steps, by the device's own "
        "allocator. Step: the median, the strategies taking turns. Ratios are to the first row of the same seed.",
        "",
        *[f"- {line}" for line in verdict(result)],
    ]
    if result["runs"]:
        lines += ["", "![memory and time](cost.png)", "", "![training curves](curves.png)"]
    return "\n".join(lines) + "\n"


def table(result):
    """The runs as a Markdown table."""
    rows = [["memory", "seed", "mode", "test accuracy", "peak", "ratio", "step", "ratio", "parameters"]]
    first = {}
    for run in result["runs"]:
        reference = first.setdefault(run["seed"], run)
        rows.append(
            [
                run["memory"],
                str(run["seed"]),
                run["mode"],
                f"{run['accuracy']:.2%}",
                f"{run['peak_bytes'] / MIB:.1f} MiB",
                f"{run['peak_bytes'] / reference['peak_bytes']:.2f}",
                f"{run['step_seconds'] * 1000:.1f} ms",
                f"{run['step_seconds'] / reference['step_seconds']:.2f}",
                f"{run['params']:,}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def verdict(result):
    """What was judged, one line each."""
    parity = result["parity"]
    if parity is None:
        return ["Parity: not judged; one strategy alone has nothing to be held against."]
    lines = [
        f"Gradients: {_passed(parity['gradients_passed'])}; largest error {parity['max_gradient_error']:.1e}, of moving "
        f"averages {parity['max_moving_average_error']:.1e} ({parity['gradients_judged']})."
    ]
    if "accuracy_gap" in parity:
        lines.append(
            f"Accuracy: {_passed(parity['accuracy_passed'])}; gap {parity['accuracy_gap']:.2%}, allowed "
            f"{parity['accuracy_gap_allowed']:.2%} ({parity['accuracy_judged']})."
        )
    return lines


def _passed(passed):
    return "passed" if passed else "FAILED"


# === Plots ===


def _plot_cost(result):
    figure = matplotlib.figure.Figure(figsize=(8, 3), layout="constrained")
    memory_axes, time_axes = figure.subplots(1, 2)
    runs = [run for run in result["runs"] if run["seed"] == result["runs"][0]["seed"]]
    names = [run["memory"] for run in runs]
    bars = memory_axes.bar(names, [run["peak_bytes"] / MIB for run in runs], color="tab:blue")
    memory_axes.bar_label(bars, fmt="%.0f")
    memory_axes.set(title="Peak memory of a training step", ylabel="MiB")
    bars = time_axes.bar(names, [run["step_seconds"] * 1000 for run in runs], color="tab:orange")
    time_axes.bar_label(bars, fmt="%.0f")
    time_axes.set(title="Time of a training step", ylabel="ms")
    return figure


def _plot_curves(result):
    figure = matplotlib.figure.Figure(figsize=(8, 3), layout="constrained")
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    styles = ["-", "--", ":"]
    names = list(dict.fromkeys(run["memory"] for run in result["runs"]))
    for run in result["runs"]:
        style = {
            "linestyle": styles[names.index(run["memory"]) % len(styles)],
            "label": f"{run['memory']}, seed {run['seed']}",
        }
        epochs = range(1, len(run["history"]["loss"]) + 1)
        loss_axes.plot(epochs, run["history"]["loss"], **style)
        accuracy_axes.plot(epochs, [100 * a for a in run["history"]["val_accuracy"]], **style)
    loss_axes.set(title="Training loss", xlabel="epoch", yscale="log")
    accuracy_axes.set(title="Test accuracy", xlabel="epoch", ylabel="%")
    accuracy_axes.legend()
    return figure
