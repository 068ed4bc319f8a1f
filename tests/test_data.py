import os

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from densenets import data


def test_digits_need_no_network():
    digits = data.load("digits")
    assert (digits.num_train, digits.num_test) == (1437, 360)
    images, labels = zip(*digits.train.as_numpy_iterator(), strict=True)
    assert np.shape(images) == (1437, 8, 8, 1)
    assert set(labels) == set(range(10))
    # The table's constants are the training images' own.
    assert np.mean(images) == pytest.approx(digits.description.mean[0], abs=0.005)
    assert np.std(images) == pytest.approx(digits.description.deviation[0], abs=0.005)


def test_batches_are_normalised_and_cover_the_epoch():
    batches = list(data.load("digits").train_batches(64, seed=1).as_numpy_iterator())
    assert [len(images) for images, _ in batches] == [64] * 22 + [29]
    images = np.concatenate([images for images, _ in batches])
    assert images.mean() == pytest.approx(0, abs=0.01)
    assert images.std() == pytest.approx(1, abs=0.01)


def test_order_depends_on_the_seed_alone_and_changes_by_epoch():
    digits = data.load("digits")

    def epochs(seed, augment):
        batches = digits.train_batches(100, seed=seed, augment=augment).repeat(2)
        return np.concatenate([images for images, _ in batches.as_numpy_iterator()]).reshape(2, -1)

    for augment in (False, True):
        first, again, other = epochs(1, augment), epochs(1, augment), epochs(2, augment)
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)
        assert not np.array_equal(first[0], first[1])


def test_augmentation_pads_with_the_mean_crops_and_flips():
    digits = data.load("digits")
    image = tf.reshape(tf.range(1.0, 65.0), [8, 8, 1])
    padded = np.pad(image.numpy()[..., 0], 4)
    windows = {}
    for top in range(9):
        for left in range(9):
            window = padded[top : top + 8, left : left + 8]
            windows[window.tobytes()] = (top, left, False)
            windows[window[:, ::-1].tobytes()] = (top, left, True)
    seen = set()
    for seed in range(600):
        crop, label = digits._augment((image, 3), tf.constant([seed, 7], tf.int64))
        assert label == 3
        seen.add(windows[np.ascontiguousarray(crop.numpy()[..., 0]).tobytes()])  # a KeyError here is a wrong crop
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(9))
    assert {flipped for _, _, flipped in seen} == {False, True}


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10", "cifar100", "svhn_cropped"])
def test_tfds_data_sets_load_with_the_described_shape(name, monkeypatch, tmp_path):
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", lambda self, **_: None)
    with tfds.testing.mock_data(num_examples=10):
        loaded = data.load(name, data_dir=tmp_path)
        images, labels = next(loaded.train_batches(4, augment=True).as_numpy_iterator())
        assert images.shape == (4, *data.DATASETS[name].shape)
        assert np.all((labels >= 0) & (labels < data.DATASETS[name].classes))


def test_real_cifar10_has_the_published_mean_and_deviation():
    directory = os.environ.get("TFDS_DATA_DIR", "")
    if not os.path.isdir(os.path.join(directory, "cifar10")):
        pytest.skip("CIFAR-10 is not in TFDS_DATA_DIR")
    cifar = data.load("cifar10")
    assert (cifar.num_train, cifar.num_test) == (50_000, 10_000)
    images = next(cifar.train_batches(10_000).as_numpy_iterator())[0]
    assert np.abs(images.mean(axis=(0, 1, 2))).max() < 0.05
    assert np.abs(images.std(axis=(0, 1, 2)) - 1).max() < 0.05


def test_absent_data_is_one_clear_error(monkeypatch, tmp_path):
    def offline(self, **_):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", offline)
    with pytest.raises(data.DataNotFoundError, match=r"'cifar100' was not found in .*cifar100.*tfds build cifar100") as error:
        data.load("cifar100", data_dir=tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "Name or service not known" in str(error.value)


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="`dataset` must be one of digits, .*; got 'mnist'"):
        data.load("mnist")
