"""Memory and time of a training step, strategy by strategy: `python -m densenets.benchmark`.

    python -m densenets.benchmark --models=100x12 --batch_sizes=32 --modes=graph,xla --contenders=keras,checkpoint,shared

Every case runs in a process of its own, so that none finds memory that another left; the processes take their steps in turns,
since a machine's speed drifts. A case that fails is a result, and is told as such. Contenders are the strategies of
`densenets` and, for comparison,

- `keras`: the same network of plain Keras layers; `keras.applications` for `densenet_121`;
- `remat`: that network under `keras.RematScope`;
- `recompute_grad`: the checkpoint strategy on `tf.recompute_grad` instead of `densenets.recompute`;
- `torch`, `torch_checkpoint`: torchvision's DenseNet, plain and with `memory_efficient=True`, where it is installed.

A model is a name of `densenets.list_models()` or `LxK`: DenseNet-BC of depth L and growth rate K on 32x32 images.
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

from absl import app, flags

from densenets import files

MIB = 2**20

flags.DEFINE_list("models", ["100x12"], "Names of list_models(), or LxK.")
flags.DEFINE_list("batch_sizes", ["32"], "Images in a step.")
flags.DEFINE_list("modes", ["graph"], "graph, xla, eager.")
flags.DEFINE_list("contenders", ["keras", "naive", "checkpoint", "shared"], "The first is what the others are held against.")
flags.DEFINE_enum("task", "training", ["training", "inference"], "What a step does.")
flags.DEFINE_integer("rounds", 9, "Timed steps of each case.")
flags.DEFINE_string("workdir", None, "Where benchmark.json, benchmark.md and the plots go; by default nowhere.")


def main(_):
    """Runs the races that the flags name, and prints or writes what they found."""
    options, cases = flags.FLAGS, []
    if options.workdir:
        pathlib.Path(options.workdir).mkdir(parents=True, exist_ok=True)
    for model in options.models:
        for batch_size in map(int, options.batch_sizes):
            for mode in options.modes:
                cases += _race(options.contenders, model, batch_size, mode, options.task, options.rounds)
                print(_table(cases), flush=True)
        if options.workdir:
            _write(cases, pathlib.Path(options.workdir))


def _write(cases, workdir):
    files.replace(workdir / "benchmark.json", lambda path: path.write_text(json.dumps(cases, indent=2) + "\n"))
    files.replace(workdir / "benchmark.md", lambda path: path.write_text(_table(cases) + "\n"))
    files.replace(workdir / "benchmark.png", lambda path: _plot(cases).savefig(path, format="png", dpi=120))


# === One race: contenders in their processes, step by step in turns ===


def _race(contenders, model, batch_size, mode, task, rounds):
    workers = []
    for contender in contenders:  # one after another, so that none is measured while another compiles
        workers.append(Worker(contender, model, batch_size, mode, task))
    for _ in range(rounds):
        for worker in workers:
            worker.step()
    return [worker.finish() for worker in workers]


class Worker:
    """A process that holds one case and takes a step when told to.

    `options`: the precision, and arguments of the builder.
    """

    def __init__(self, contender, model, batch_size, mode, task, **options):
        self.case = {"model": model, "batch_size": batch_size, "mode": mode, "contender": contender, "task": task} | options
        command = [sys.executable, "-m", "densenets.benchmark_worker", json.dumps(self.case)]
        environment = os.environ | {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.seconds = []
        self.case |= self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": f"the process ended with exit code {self.process.wait()}"}

    def ask(self, command):
        """What the process answers to a command of `benchmark_worker.COMMANDS`; nothing, once it has failed."""
        if "error" in self.case:
            return {}
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.case |= {key: answer[key] for key in answer.keys() & {"error"}}
        return answer

    def step(self):
        answer = self.ask("step")
        self.seconds += [answer["seconds"]] if "seconds" in answer else []

    def finish(self):
        self.process.stdin.close()
        self.process.wait()
        if self.seconds:
            self.case |= {
                "step_seconds": statistics.median(self.seconds),
                "step_seconds_range": [min(self.seconds), max(self.seconds)],
            }
        return self.case


# === What it found ===


def _table(cases):
    lines = [
        "| model | batch | mode | contender | peak | ratio | step (range) | ratio | first step | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        race = _race_of(case, cases)
        cells = [case["model"], case["batch_size"], case["mode"], case["contender"]]
        if "error" in case:
            cells += [f"failed: {_reason(case['error'])}", "", "", "", "", ""]
        else:
            low, high = (f"{s:.3f}" for s in case["step_seconds_range"])
            cells += [
                f"{case['peak_bytes'] / MIB:.0f} MiB",
                _ratio(case, race[0], "peak_bytes"),
                f"{case['step_seconds']:.3f} s ({low}-{high})",
                _ratio(case, race[0], "step_seconds"),
                f"{case['first_step_seconds']:.1f} s",
                _ratio(case, race[0], "first_step_seconds"),
            ]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _reason(error):
    """The innermost error of a message that tells of several, in a line."""
    plain = re.sub(r"\x1b\[\d*m", "", error)
    return re.split(r"\b(?=\w+Error: )", plain)[-1][:160]


def _race_of(case, cases):
    """The cases that ran together with `case`, the first contender first."""
    return [c for c in cases if all(c[key] == case[key] for key in ("model", "batch_size", "mode"))]


def _ratio(case, reference, key):
    return "" if "error" in reference else f"{case[key] / reference[key]:.3f}"


def _plot(cases):
    """Two plots: peak memory, against depth with the fitted exponents where several were run; and the ratios of step times."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(12, 4), layout="constrained")
    memory, time = figure.subplots(1, 2)
    _plot_memory([case for case in cases if "error" not in case], memory)
    _plot_time(cases, time)
    return figure


def _plot_memory(done, axes):
    from densenets.memory.pictures import exponent

    for contender, mode in dict.fromkeys((case["contender"], case["mode"]) for case in done):
        own = [case for case in done if (case["contender"], case["mode"]) == (contender, mode)]
        depths = [int(case["model"].split("x")[0]) for case in own if case["model"].split("x")[0].isdigit()]
        peaks = [case["peak_bytes"] / MIB for case in own]
        label = f"{contender}, {mode}"
        if len(set(depths)) > 1 and len(depths) == len(peaks):
            axes.loglog(depths, peaks, "o-", label=f"{label}: exponent {exponent(depths, peaks):.2f}")
            axes.set(xlabel="depth L")
        else:
            axes.bar([f"{case['model']}\n{label}" for case in own], peaks)
            axes.tick_params(axis="x", labelsize=6)
    axes.set(title="Peak memory of a step", ylabel="MiB")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _plot_time(cases, axes):
    for case, reference in ((case, _race_of(case, cases)[0]) for case in cases):
        if "step_seconds" in case and "step_seconds" in reference:
            label = f"{case['model']}, {case['batch_size']}\n{case['contender']}, {case['mode']}"
            low, high = (seconds / reference["step_seconds"] for seconds in case["step_seconds_range"])
            ratio = case["step_seconds"] / reference["step_seconds"]
            axes.bar([label], [ratio], yerr=[[ratio - low], [high - ratio]], capsize=3)
    axes.axhline(1, color="black", linewidth=0.5)
    axes.tick_params(axis="x", labelsize=6)
    axes.set(title="Time of a step over that of the first contender (median, range)")


if __name__ == "__main__":
    app.run(main)
