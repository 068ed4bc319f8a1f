"""What a comparison found: for programs (`report.json`), for people (`report.md`, the terminal) and as plots.

`python -m densenets.report runs/a runs/b ...` reads several workdirs into one table.
"""

import json
import os
import pathlib
import statistics
import sys

import matplotlib.figure

from densenets import config as config_module
from densenets import files, tables

MIB = 2**20


def open_workdir(workdir, config):
    """The report of an earlier start in `workdir`, to go on from, or an empty one.

    Args:
        workdir: a path; it is made where it is not there.
        config: as a dictionary.

    Raises:
        ConfigError: where the directory is of another config.
        OSError: where it cannot be written.
    """
    workdir = pathlib.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    if not os.access(workdir, os.W_OK):
        raise PermissionError(f"{workdir} cannot be written.")
    if not (workdir / "config.json").exists():
        return {
            "status": "running",
            "config": config,
            "environment": None,
            "published": None,
            "parity": None,
            "costs": {},
            "runs": [],
        }
    differences = config_module.differences(config, json.loads((workdir / "config.json").read_text()))
    if differences:
        raise config_module.ConfigError(
            f"{workdir} is of another config. Choose another --workdir, or remove it. The differences are:\n"
            + "\n".join(f"  {line}" for line in differences)
        )
    return json.loads((workdir / "report.json").read_text())


class Report:
    """A report, `result`, and its files in `workdir`; one of several processes `writes` them."""

    def __init__(self, result, workdir, writes=True):
        self.result, self.workdir, self.writes = result, pathlib.Path(workdir), writes

    def write(self):
        """Writes all files, each beside its old version and then in its place."""
        if not self.writes:
            return
        result, workdir = self.result, self.workdir
        files.replace(workdir / "report.json", lambda path: path.write_text(json.dumps(result, indent=2) + "\n"))
        files.replace(workdir / "report.md", lambda path: path.write_text(markdown(result)))
        if result["runs"]:
            files.replace(workdir / "cost.png", lambda path: _plot_cost(result).savefig(path, format="png", dpi=120))
            files.replace(workdir / "curves.png", lambda path: _plot_curves(result).savefig(path, format="png", dpi=120))
        # The last file: where it is, there is a report of it.
        files.replace(workdir / "config.json", lambda path: path.write_text(json.dumps(result["config"], indent=2) + "\n"))


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
    return tables.aligned(rows)


def verdict(result):
    """What was judged, one line each."""
    parity, published = result["parity"], result["published"]
    paper = []
    if published and result["runs"]:
        errors = ", ".join(f"{name} {1 - mean:.2%}" for name, mean in _accuracies(result).items())
        stated = f"{published['model']} on {published['data']}, {published['error']}% error ({published['source']})"
        paper = [f"Paper: {stated}; here {errors}."]
    if parity is None:
        return [*paper, "Parity: not judged; one strategy alone has nothing to be held against."]
    lines = [
        *paper,
        f"Gradients: {_passed(parity['gradients_passed'])}; largest error {parity['max_gradient_error']:.1e}, of moving "
        f"averages {parity['max_moving_average_error']:.1e} ({parity['gradients_judged']}).",
    ]
    if "accuracy_gap" in parity:
        lines.append(
            f"Accuracy: {_passed(parity['accuracy_passed'])}; gap {parity['accuracy_gap']:.2%}, allowed "
            f"{parity['accuracy_gap_allowed']:.2%} ({parity['accuracy_judged']})."
        )
        for name, (low, high) in parity.get("accuracy_intervals", {}).items():
            lines.append(f"{name} differs by {low:+.2%} to {high:+.2%} in test accuracy.")
    return lines


def _accuracies(result):
    """The mean test accuracy over the seeds by strategy."""
    names = dict.fromkeys(run["memory"] for run in result["runs"])
    return {name: statistics.fmean(run["accuracy"] for run in result["runs"] if run["memory"] == name) for name in names}


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
    if result["published"]:
        accuracy_axes.axhline(100 - result["published"]["error"], color="black", linewidth=0.5, label="paper")
    accuracy_axes.set(title="Test accuracy", xlabel="epoch", ylabel="%")
    accuracy_axes.legend()
    return figure


# === Several workdirs ===


def summary(workdirs):
    """One table of the reports in several workdirs: each strategy's accuracy over its seeds, its cost, the paper's error."""
    rows = [["workdir", "data", "memory", "status", "seeds", "test accuracy (range)", "error", "paper", "peak", "step"]]
    for workdir in workdirs:
        result = json.loads((pathlib.Path(workdir) / "report.json").read_text())
        published = result["published"]
        for name, mean in _accuracies(result).items():
            runs = [run for run in result["runs"] if run["memory"] == name]
            low, high = (pick(run["accuracy"] for run in runs) for pick in (min, max))
            rows.append(
                [
                    str(workdir),
                    result["environment"]["dataset"],
                    name,
                    result["status"],
                    ", ".join(str(run["seed"]) for run in runs),
                    f"{mean:.2%} ({low:.2%} to {high:.2%})",
                    f"{1 - mean:.2%}",
                    f"{published['error']}%" if published else "-",
                    f"{runs[0]['peak_bytes'] / MIB:.0f} MiB",
                    f"{runs[0]['step_seconds'] * 1000:.0f} ms",
                ]
            )
    return tables.aligned(rows)


if __name__ == "__main__":
    print(summary(sys.argv[1:]))
