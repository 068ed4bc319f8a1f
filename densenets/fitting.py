"""Does a config fit its device? Asked before any data is read, of predictions (`densenets.memory.predict`)."""

import keras
import tensorflow as tf

from densenets import config as config_module
from densenets import devices, memory
from densenets.dense_block import DenseBlock

OPTIMIZERS = {"sgd": "torch_sgd", "adam": "adam"}  # of a config, as `memory.predict` calls them


def warnings(config, network: keras.Model, num_replicas: int) -> list[str]:
    """A line for each strategy of `config` whose step takes more than its device has, with what would fit.

    Args:
        config: whose `memory_budget` may name another size, or be "off".
        network: the one that the config makes.
        num_replicas: devices that share the batch.
    """
    budget = _budget(config.memory_budget)
    is_densenet = any(isinstance(layer, DenseBlock) for layer in network.layers)
    if budget is None or not is_densenet or config.mode == "eager":
        return []
    batch_size = config.batch_size // num_replicas
    way = {"mode": _mode(config), "precision": config.precision, "optimizer": OPTIMIZERS[config.optimizer]}
    plan = memory.plan(network, budget, batch_size=batch_size, **way)
    return [
        _warning(fit, plan, num_replicas)
        for fit in plan.fits
        if fit.memory in config_module.strategies(config) and fit.batch_bytes > budget
    ]


def _warning(fit, plan, num_replicas):
    fitting = [f"config.batch_size={fit.largest_batch * num_replicas}"] if fit.largest_batch else []
    fitting += [
        f"config.memory={other.memory} (up to config.batch_size={other.largest_batch * num_replicas})"
        for other in plan.fits
        if other.largest_batch >= plan.batch_size
    ]
    takes, there_are = memory.in_words(fit.batch_bytes), memory.in_words(plan.budget)
    return (
        f"A step of memory={fit.memory!r} on {plan.batch_size} images takes about {takes}, more than the {there_are} that "
        f"there are. What would fit: {', or '.join(fitting) or 'nothing'}. It goes on all the same; config.memory_budget sets "
        "another size, or 'off'."
    )


def _budget(text):
    if text == "off":
        return None
    return memory.parse_bytes(text) if text else devices.capacity()


def _mode(config):
    """What `auto` will come to: XLA on one GPU, else the plain graph, as Keras chooses."""
    on_gpu = bool(tf.config.list_physical_devices("GPU"))
    return "xla" if config.mode == "xla" or (config.mode == "auto" and on_gpu and config.distribute == "none") else "graph"
