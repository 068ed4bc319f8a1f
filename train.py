"""Trains a DenseNet from a config, and compares the ways of computing it.

    python train.py --config=configs/quickstart.py --workdir=runs/quickstart [--config.batch_size=32 ...] [--gpu=0]

The exit code is 0 when all that was asked for is done and proven; 130 when interrupted and 143 when told to end (SIGTERM),
after which the same command goes on; 1 when parity failed, training went wrong, something is missing or the command cannot
be understood.
"""

import os
import sys

# Before TensorFlow is imported: the allocator that GPUs use, on the CPU too, so that sizes are not rounded; fewer messages.
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# An interrupt while TensorFlow is still being imported has nothing to report; no traceback for it.
sys.excepthook = lambda kind, *rest: None if kind is KeyboardInterrupt else sys.__excepthook__(kind, *rest)

from absl import app, flags, logging  # noqa: E402
from ml_collections import config_flags  # noqa: E402

config_flags.DEFINE_config_file("config", None, "The config file, such as configs/quickstart.py.")
flags.DEFINE_string("workdir", None, "Where the report, the histories and the trained networks are written.")
flags.DEFINE_list("gpu", None, "Which GPUs to use, such as 0 or 0,1; all by default.")
flags.mark_flags_as_required(["config", "workdir"])


def main(_):
    from densenets import checkpoints, compare, config, data, devices, loop, report

    workdir = flags.FLAGS.workdir
    logging.set_verbosity(logging.INFO)
    again = "The same command goes on from there."
    try:
        devices.choose(flags.FLAGS.gpu)
        result = compare.run(flags.FLAGS.config, workdir)
    except KeyboardInterrupt:
        sys.exit(_say(f"\nInterrupted. What was found so far is in {workdir}/report.md. {again}", 130))
    except loop.PreemptedError as error:
        sys.exit(_say(f"{error} {again}", 143))
    except (
        config.ConfigError,
        data.DataError,
        devices.DeviceError,
        compare.ParityError,
        compare.OutOfMemoryError,
        checkpoints.CheckpointError,
        loop.DivergedError,
        OSError,
    ) as error:
        sys.exit(_say(str(error), 1))
    print("\n".join(["", report.table(result), "", *report.verdict(result), "", f"Written to {workdir}/report.md"]))
    sys.exit(0 if result["parity"] is None or result["parity"]["passed"] else 1)


def _say(message, code):
    print(message, file=sys.stderr)
    return code


def _parse(argv):
    """absl's parser; a config key that does not exist is told in one line, as absl tells every other wrong flag."""
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError, ValueError) as error:
        from densenets import config

        if isinstance(error, config.ConfigError):
            sys.exit(_say(str(error), 1))
        if isinstance(error, ValueError):
            raise
        keys = config.config_keys()
        unknown = [a for a in argv if a.startswith("--config.") and a.partition("=")[0][len("--config.") :] not in keys]
        sys.exit(_say(f"{' '.join(unknown) or error} sets an unknown key. The keys are: {', '.join(keys)}.", 1))


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
