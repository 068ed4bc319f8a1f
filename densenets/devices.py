"""Which devices a program runs on."""

import tensorflow as tf


class DeviceError(ValueError):
    """A device that was asked for is not there."""


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
