"""Which devices a program runs on, and how a batch is spread over them."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib

import tensorflow as tf

from densenets import backend


class DeviceError(ValueError):
    """A device that was asked for is not there."""


@dataclasses.dataclass(frozen=True)
class Share:
    """Which part of each batch a process computes.

    Attributes:
        worker, num_workers: the process's number, and how many there are.
        num_replicas: the devices of each process, each of which takes an equal part.
    """

    worker: int = 0
    num_workers: int = 1
    num_replicas: int = 1

    @property
    def all_replicas(self):
        return self.num_workers * self.num_replicas


ALONE = Share()


def choose(gpus=None):
    """Makes TensorFlow use these GPUs alone, with memory taken as needed. Call it before anything is computed.

    Args:
        gpus: their numbers, as strings or integers; `None` for all.

    Raises:
        DeviceError: where one is not there.
    """
    present = tf.config.list_physical_devices("GPU")
    if gpus is not None:
        numbers = [str(number) for number in range(len(present))]
        for gpu in gpus:
            if str(gpu) not in numbers:
                raise DeviceError(
                    f"--gpu must name GPUs of {', '.join(numbers) or 'none, since TensorFlow sees none here'}; got {gpu}."
                )
        present = [present[int(gpu)] for gpu in gpus]
        tf.config.set_visible_devices(present, "GPU")
    for gpu in present:
        tf.config.experimental.set_memory_growth(gpu, True)


@functools.cache  # TensorFlow takes the sums of two strategies in one process for one another
def make_strategy(distribute):
    """The `tf.distribute` strategy of a name: "none", "mirrored" (every GPU, or every logical CPU) or "multi_worker".

    Call it before anything is computed: workers can only be joined then.

    Raises:
        DeviceError: where the environment does not name the workers.
    """
    if distribute == "none":
        return tf.distribute.get_strategy()
    if distribute == "mirrored":
        names = [device.name for device in tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")]
        return tf.distribute.MirroredStrategy(names)
    try:
        cluster = json.loads(os.environ.get("TF_CONFIG", "{}"))
        cluster["cluster"]["worker"][cluster["task"]["index"]]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DeviceError(
            "config.distribute=multi_worker needs the workers in the environment, for example "
            'TF_CONFIG=\'{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}\'; '
            f"got TF_CONFIG={os.environ.get('TF_CONFIG')!r}."
        ) from error
    return tf.distribute.MultiWorkerMirroredStrategy()


def is_chief(strategy):
    """Whether this process is the one that writes files."""
    resolver = strategy.cluster_resolver
    return resolver is None or not resolver.task_id


def in_all_processes(strategy, number):
    """The set of the `number`s that the processes of `strategy` call this with. Returns when all of them are here."""
    if strategy.cluster_resolver is None:
        return {number}
    numbers = strategy.gather(strategy.experimental_distribute_values_from_function(lambda _: tf.constant([number])), axis=0)
    return set(map(int, numbers.numpy()))


def spread(strategy, make_dataset):
    """The batches of `make_dataset(share)` for the devices of `strategy`: each its part of every batch."""
    if strategy.num_replicas_in_sync == 1:
        return make_dataset(Share())

    def own(context):
        workers = context.num_input_pipelines
        return make_dataset(Share(context.input_pipeline_id, workers, context.num_replicas_in_sync // workers))

    return strategy.distribute_datasets_from_function(own)


def capacity() -> int | None:
    """The bytes that one device has for a step: a GPU by its allocator's limit, a CPU by the machine's memory.

    On a CPU, a container's limit counts where it is lower. `None` where it is not known.
    """
    if tf.config.list_physical_devices("GPU"):
        return backend.gpu_memory_limit()
    try:
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, ValueError, OSError):
        return None
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(pathlib.Path("/sys/fs/cgroup/memory.max").read_text()))  # "max" where there is no limit
    return min(limits)
