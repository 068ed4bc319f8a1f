"""Image data sets as `tf.data` pipelines, prepared as the paper prepares them (arXiv:1608.06993, section 4.1).

Everything depends on the seed and on the number of the step alone, so that training can go on in the middle of an epoch, and
gives every device its share of the same batches.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from sklearn import datasets as sklearn_datasets
from sklearn.model_selection import train_test_split

from densenets import augmentation
from densenets.devices import ALONE

SHUFFLE_BUFFER = 16_384  # encoded images, of a data set that memory does not hold; its files are shuffled too


@dataclasses.dataclass(frozen=True)
class Description:
    """What is known of a data set before it is read. Images are normalised to `(image - mean) / deviation`."""

    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    train_split: str = "train"
    test_split: str = "test"
    in_memory: bool = True  # or read from its files in each epoch, images of any size


# CIFAR, ImageNet: the constants of fb.resnet.torch, which the paper's code extends. SVHN: divided by 255, its extra images
# used (section 4.1). Fashion-MNIST, digits: the training images' own mean and deviation.
DATASETS = {
    "digits": Description((8, 8, 1), 10, (4.89,), (6.02,)),
    "fashion_mnist": Description((28, 28, 1), 10, (72.9,), (90.0,)),
    "cifar10": Description((32, 32, 3), 10, (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
    "cifar100": Description((32, 32, 3), 100, (129.3, 124.1, 112.4), (68.2, 65.4, 70.4)),
    "svhn_cropped": Description((32, 32, 3), 10, (0.0,), (255.0,), "train+extra"),
    "imagenet2012": Description(
        (224, 224, 3), 1000, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375), "train", "validation", in_memory=False
    ),
}


class DataError(OSError):
    """A data set that cannot be had, or cannot be read."""


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
        examples: `examples(split, seed)` gives the `(image, label)` of "train" or "test" as stored; shuffled for a seed that is
            a number, in order for `None`.
        decode: makes the image of what is stored.
        source: where it came from, for the report.
    """

    name: str
    description: Description
    examples: Callable
    decode: Callable
    num_train: int
    num_test: int
    source: str

    def num_steps(self, batch_size, num_replicas=1):
        """The batches of an epoch. The last may be smaller; it is left out where not every device would have an image."""
        full, rest = divmod(self.num_train, batch_size)
        return full + (rest >= num_replicas)

    def train_epoch(self, batch_size, *, seed=0, epoch=0, augment=False, share=ALONE, skip=0):
        """Epoch number `epoch` without its first `skip` batches: `(images, labels)`, in an order of its own.

        The order and the augmentation depend on `seed` and `epoch` alone, whatever the share.
        """
        state = np.random.SeedSequence([seed, epoch]).generate_state(1)[0]
        examples = self.examples("train", int(state)).enumerate()
        examples = examples.take(self.num_steps(batch_size, share.all_replicas) * batch_size).skip(skip * batch_size)

        def prepare(position, stored, label):
            image = self.decode(stored)
            if not augment:
                return self._plain(image), label
            return self._normalised(self._augmented(image, tf.stack([tf.cast(state, tf.int64), position]))), label

        return _batches(_own(examples, self.num_train, batch_size, share), prepare, batch_size, share)

    def test_batches(self, batch_size, share=ALONE):
        """The whole test set in order: `(images, labels, weights)`.

        The weights are 1; on many devices some images at the end may be there twice, then with the weight 0, so that no device
        is without.
        """
        total = -(-self.num_test // share.all_replicas) * share.all_replicas
        examples = self.examples("test", None).repeat().take(total).enumerate()

        def prepare(position, stored, label):
            return self._plain(self.decode(stored)), label, tf.cast(position < self.num_test, tf.float32)

        return _batches(_own(examples, total, batch_size, share), prepare, batch_size, share)

    def _plain(self, image):
        return self._normalised(
            image if self.description.in_memory else augmentation.central_crop(image, self.description.shape)
        )

    def _augmented(self, image, seed):
        if self.description.in_memory:
            return augmentation.pad_crop_flip(tf.cast(image, tf.float32), self.description.mean, seed)
        return augmentation.resized_crop_flip_jitter(image, self.description.shape, seed)

    def _normalised(self, image):
        image = (tf.cast(image, tf.float32) - self.description.mean) / self.description.deviation
        return tf.ensure_shape(image, self.description.shape)


# === Batches ===


def _own(examples, total, batch_size, share):
    """Those of the numbered `examples`, `total` in all, that belong to this process's share of their batch."""
    if share.num_workers == 1:
        return examples

    def mine(position, _):
        size = tf.minimum(total - position // batch_size * batch_size, batch_size)
        start, stop = (size * worker // share.num_workers for worker in (share.worker, share.worker + 1))
        place = position % batch_size
        return (start <= place) & (place < stop)

    return examples.filter(mine)


def _batches(examples, prepare, batch_size, share):
    """Batches of the prepared `examples`, one for each device of the process in turn."""
    data = examples.map(
        lambda position, example: prepare(position, *example), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    data = data.batch(batch_size // share.num_workers)
    if share.num_replicas > 1:

        def split(*batch):
            size, n = tf.shape(batch[0], tf.int64)[0], share.num_replicas
            return tf.data.Dataset.range(n).map(lambda i: tuple(t[size * i // n : size * (i + 1) // n] for t in batch))

        data = data.flat_map(split)
    return data.prefetch(tf.data.AUTOTUNE)


# === Finding a data set ===


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
        DataError: where the data set is neither found nor can be downloaded, or its files are broken.
    """
    if name not in DATASETS:
        raise ValueError(f"`dataset` must be one of {', '.join(DATASETS)}; got {name!r}.")
    return _load_digits() if name == "digits" else _load_tfds(name, data_dir)


def _load_digits():
    images, labels = sklearn_datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32)
    split = train_test_split(images, labels.astype(np.int64), test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = split
    arrays = {"train": (train_images, train_labels), "test": (test_images, test_labels)}
    return _in_memory("digits", arrays, "scikit-learn's digits, a fifth of them for testing")


def _load_tfds(name, data_dir):
    description = DATASETS[name]
    builder = tfds.builder(name, data_dir=data_dir)
    try:
        builder.download_and_prepare()
    except Exception as error:
        raise DataError(
            f"The data set {name!r} was not found in {builder.data_dir} and could not be downloaded "
            f"({type(error).__name__}: {str(error)[:200]}). Name the directory that holds it with `data_dir` "
            "(--config.data_dir=DIR) or TFDS_DATA_DIR, or prepare it on a machine with a network: "
            f"tfds build {name} --data_dir=DIR"
        ) from error
    splits = {"train": description.train_split, "test": description.test_split}
    source = f"tensorflow-datasets {builder.info.full_name}"
    if not description.in_memory:
        return _from_files(name, builder, splits, source)
    try:
        read = {key: _arrays(builder.as_dataset(split=split, as_supervised=True)) for key, split in splits.items()}
    except Exception as error:
        raise DataError(
            f"The data set {name!r} in {builder.data_dir} cannot be read ({type(error).__name__}: {str(error)[:200]}). "
            "Remove that directory and prepare it anew."
        ) from error
    return _in_memory(name, read, source)


def _arrays(examples):
    """All images and all labels."""
    batches = list(examples.batch(1000).as_numpy_iterator())
    return [np.concatenate(parts) for parts in zip(*batches, strict=True)]


def _in_memory(name, arrays, source):
    with tf.device("CPU:0"):
        tensors = {key: tuple(map(tf.convert_to_tensor, arrays[key])) for key in ("train", "test")}

    def examples(split, seed):
        images, labels = tensors[split]
        places = tf.data.Dataset.range(len(labels))
        if seed is not None:
            places = places.shuffle(len(labels), seed=seed)
        return places.map(lambda i: (tf.gather(images, i), tf.gather(labels, i)))

    sizes = [len(tensors[split][1]) for split in ("train", "test")]
    return Data(name, DATASETS[name], examples, tf.identity, *sizes, source)


def _from_files(name, builder, splits, source):
    options = tf.data.Options()
    options.deterministic = True

    def examples(split, seed):
        shuffled = seed is not None
        data = builder.as_dataset(
            split=splits[split],
            as_supervised=True,
            shuffle_files=shuffled,
            decoders={"image": tfds.decode.SkipDecoding()},
            read_config=tfds.ReadConfig(shuffle_seed=seed, try_autocache=False),
        )
        data = data.with_options(options)
        return data.shuffle(SHUFFLE_BUFFER, seed=seed) if shuffled else data

    decode = builder.info.features["image"].decode_example
    sizes = [builder.info.splits[splits[split]].num_examples for split in ("train", "test")]
    return Data(name, DATASETS[name], examples, decode, *sizes, source)
