"""Image data sets as `tf.data` pipelines, prepared as the paper prepares them (arXiv:1608.06993, section 4.1)."""

import dataclasses

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from sklearn import datasets as sklearn_datasets
from sklearn.model_selection import train_test_split

PADDING = 4  # pixels of zeros on each side, of which a random crop of the original size is taken


@dataclasses.dataclass(frozen=True)
class Description:
    """What is known of a data set before it is read. Images are normalised to `(image - mean) / deviation`."""

    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    train_split: str = "train"


# CIFAR: the constants of fb.resnet.torch, which the paper's code extends. SVHN: divided by 255, its extra images used
# (section 4.1). Fashion-MNIST, digits: the training images' own mean and deviation.
DATASETS = {
    "digits": Description((8, 8, 1), 10, (4.89,), (6.02,)),
    "fashion_mnist": Description((28, 28, 1), 10, (72.9,), (90.0,)),
    "cifar10": Description((32, 32, 3), 10, (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
    "cifar100": Description((32, 32, 3), 100, (129.3, 124.1, 112.4), (68.2, 65.4, 70.4)),
    "svhn_cropped": Description((32, 32, 3), 10, (0.0,), (255.0,), "train+extra"),
}


class DataNotFoundError(FileNotFoundError):
    """A data set is neither on this machine nor can it be downloaded."""


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set in memory's reach: `train` and `test` yield `(image, label)`, images as stored."""

    name: str
    description: Description
    train: tf.data.Dataset
    test: tf.data.Dataset
    num_train: int
    num_test: int
    source: str

    def train_batches(self, batch_size, *, seed=0, augment=False):
        """One epoch of shuffled batches, the same for the same `seed`, another order each epoch; the last may be smaller."""
        seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).batch(2)
        data = self.train.cache().shuffle(min(self.num_train, 60_000), seed=seed)
        data = data.map(self._normalise, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        if augment:
            data = tf.data.Dataset.zip(data, seeds)
            data = data.map(self._augment, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return data.batch(batch_size).prefetch(tf.data.AUTOTUNE)

    def test_batches(self, batch_size):
        """The whole test set, in order."""
        data = self.test.cache().map(self._normalise, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return data.batch(batch_size).prefetch(tf.data.AUTOTUNE)

    def _normalise(self, image, label):
        image = (tf.cast(image, tf.float32) - self.description.mean) / self.description.deviation
        return image, label

    def _augment(self, example, seed):
        """Zero padding, a random crop and a horizontal flip, of the normalised image."""
        image, label = example
        image = tf.pad(image, [[PADDING, PADDING], [PADDING, PADDING], [0, 0]])
        image = tf.image.stateless_random_crop(image, self.description.shape, seed)
        return tf.image.stateless_random_flip_left_right(image, seed + 1), label


def load(name, data_dir=None):
    """Finds a data set, downloads it if need be.

    Args:
        name: one of `DATASETS`. `"digits"`, 1,797 handwritten digits of 8x8 pixels, comes with scikit-learn and needs no
            network; the others are prepared by tensorflow-datasets.
        data_dir: the directory of tensorflow-datasets' data; by default `$TFDS_DATA_DIR` or `~/tensorflow_datasets`.

    Returns:
        `Data`.

    Raises:
        ValueError: for an unknown name.
        DataNotFoundError: where the data set is neither found nor can be downloaded.
    """
    if name not in DATASETS:
        raise ValueError(f"`dataset` must be one of {', '.join(DATASETS)}; got {name!r}.")
    return _load_digits() if name == "digits" else _load_tfds(name, data_dir)


def _load_digits():
    images, labels = sklearn_datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32)
    split = train_test_split(images, labels.astype(np.int64), test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = split
    train = tf.data.Dataset.from_tensor_slices((train_images, train_labels))
    test = tf.data.Dataset.from_tensor_slices((test_images, test_labels))
    source = "scikit-learn's digits, a fifth of them for testing"
    return Data("digits", DATASETS["digits"], train, test, len(train_images), len(test_images), source)


def _load_tfds(name, data_dir):
    description = DATASETS[name]
    builder = tfds.builder(name, data_dir=data_dir)
    try:
        builder.download_and_prepare()
        train, test = builder.as_dataset(split=[description.train_split, "test"], as_supervised=True)
    except Exception as error:
        raise DataNotFoundError(
            f"The data set {name!r} was not found in {builder.data_dir} and could not be downloaded "
            f"({type(error).__name__}: {str(error)[:200]}). Name the directory that holds it with `data_dir` "
            "(--config.data_dir=DIR) or TFDS_DATA_DIR, or prepare it on a machine with a network: "
            f"tfds build {name} --data_dir=DIR"
        ) from error
    sizes = [int(train.cardinality()), int(test.cardinality())]
    return Data(name, description, train, test, *sizes, f"tensorflow-datasets {builder.info.full_name}")
