import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath

from densenets import augmentation, data


def test_digits_need_no_network():
    digits = data.load("digits")
    assert (digits.num_train, digits.num_test) == (1437, 360)
    images, labels = zip(*digits.examples("train", None).as_numpy_iterator(), strict=True)
    assert np.shape(images) == (1437, 8, 8, 1)
    assert set(labels) == set(range(10))
    # The table's constants are the training images' own.
    assert np.mean(images) == pytest.approx(digits.description.mean[0], abs=0.005)
    assert np.std(images) == pytest.approx(digits.description.deviation[0], abs=0.005)


def test_batches_are_normalised_and_cover_the_epoch():
    batches = list(data.load("digits").train_epoch(64, seed=1).as_numpy_iterator())
    assert [len(images) for images, _ in batches] == [64] * 22 + [29]
    images = np.concatenate([images for images, _ in batches])
    assert images.mean() == pytest.approx(0, abs=0.01)
    assert images.std() == pytest.approx(1, abs=0.01)


def test_order_depends_on_seed_and_epoch_alone_and_can_be_gone_on_from_anywhere():
    digits = data.load("digits")

    def epoch(**options):
        return [images for images, _ in digits.train_epoch(100, **options).as_numpy_iterator()]

    for augment in (False, True):
        first, again, other, later, rest = (
            epoch(augment=augment, **options)
            for options in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {"seed": 1, "epoch": 1}, {"seed": 1, "skip": 9})
        )
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        assert not np.array_equal(first[0], other[0])
        assert not np.array_equal(first[0], later[0])
        assert all(np.array_equal(a, b) for a, b in zip(first[9:], rest, strict=True))
    plain = [np.concatenate(epoch(seed=seed)).reshape(1437, -1) for seed in (1, 2)]
    assert np.array_equal(*(np.sort(images, axis=0) for images in plain))  # every image once


def test_augmentation_pads_with_the_mean_crops_and_flips():
    image = tf.reshape(tf.range(1.0, 65.0), [8, 8, 1])
    padded = np.pad(image.numpy()[..., 0], 4, constant_values=7.0)
    windows = {}
    for top in range(9):
        for left in range(9):
            window = padded[top : top + 8, left : left + 8]
            windows[window.tobytes()] = (top, left, False)
            windows[window[:, ::-1].tobytes()] = (top, left, True)
    seen = set()
    for seed in range(600):
        crop = augmentation.pad_crop_flip(image, (7.0,), tf.constant([seed, 7], tf.int64))
        seen.add(windows[np.ascontiguousarray(crop.numpy()[..., 0]).tobytes()])  # a KeyError here is a wrong crop
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(9))
    assert {flipped for _, _, flipped in seen} == {False, True}


def test_imagenets_crops_have_the_areas_and_aspects_of_the_recipe():
    height, width = 120, 160
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    image = tf.constant(np.stack([rows, columns, np.full_like(rows, 128)], -1), tf.float32)
    areas, aspects, flips = [], [], set()
    saved = augmentation.JITTER, augmentation.LIGHTING
    augmentation.JITTER, augmentation.LIGHTING = 0.0, 0.0  # the colours are the places
    try:
        for seed in range(300):
            crop = augmentation.resized_crop_flip_jitter(image, (24, 24, 3), tf.constant([seed, 3], tf.int64)).numpy()
            tall = (crop[-1, :, 0].mean() - crop[0, :, 0].mean()) * 24 / 23
            wide = (crop[:, -1, 1].mean() - crop[:, 0, 1].mean()) * 24 / 23
            areas.append(tall * abs(wide) / height / width)
            aspects.append(abs(wide) / tall)
            flips.add(wide < 0)
    finally:
        augmentation.JITTER, augmentation.LIGHTING = saved
    assert 0.06 < min(areas) < 0.15  # 0.08, but for pixels cut off
    assert 0.85 < max(areas) <= 1.02
    assert 0.7 < min(aspects) < 0.85
    assert 1.2 < max(aspects) < 1.45
    assert flips == {False, True}


def test_imagenets_colours_are_jittered_and_shifted_as_far_as_the_recipe_says():
    image = tf.fill([16, 16, 3], 100.0)
    changed = np.stack([augmentation._jitter(image, tf.constant([seed, 0])).numpy()[0, 0] for seed in range(200)])
    # Gray stays gray; brightness alone moves an even image, by up to 40%.
    np.testing.assert_allclose(changed, changed[:, :1].repeat(3, 1), rtol=1e-4)
    assert 58 < changed.min() < 66
    assert 134 < changed.max() < 142
    shifts = np.stack([augmentation._lighting(image, tf.constant([seed, 0])).numpy()[0, 0] - 100 for seed in range(2000)])
    vectors = np.array(augmentation.EIGENVECTORS)
    expected = 255**2 * vectors @ np.diag((0.1 * np.array(augmentation.EIGENVALUES)) ** 2) @ vectors.T
    np.testing.assert_allclose(np.cov(shifts.T), expected, rtol=0.15)


def test_imagenets_test_crop_is_the_centre_of_a_shorter_side_of_256():
    rows, columns = np.meshgrid(np.arange(512), np.arange(1024), indexing="ij")
    image = tf.constant(np.stack([rows / 2, columns / 4, rows * 0], -1), tf.float32)
    crop = augmentation.central_crop(image, (224, 224, 3)).numpy()
    assert crop.shape == (224, 224, 3)
    # Halved to 256 x 512 and cut: the rows 16 to 239, the columns 144 to 367.
    np.testing.assert_allclose(crop[[0, -1], 100, 0], [16, 239], atol=0.6)
    np.testing.assert_allclose(crop[100, [0, -1], 1], [72, 183.5], atol=0.6)


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10", "cifar100", "svhn_cropped"])
def test_tfds_data_sets_load_with_the_described_shape(name, monkeypatch, tmp_path):
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", lambda self, **_: None)
    with tfds.testing.mock_data(num_examples=10):
        loaded = data.load(name, data_dir=tmp_path)
        for batch in (next(iter(loaded.train_epoch(4, augment=True))), next(iter(loaded.test_batches(4)))):
            assert batch[0].shape == (4, *data.DATASETS[name].shape)
            assert np.all((batch[1] >= 0) & (batch[1] < data.DATASETS[name].classes))


def test_real_cifar10_has_the_published_mean_and_deviation():
    directory = os.environ.get("TFDS_DATA_DIR", "")
    if not os.path.isdir(os.path.join(directory, "cifar10")):
        pytest.skip("CIFAR-10 is not in TFDS_DATA_DIR")
    cifar = data.load("cifar10")
    assert (cifar.num_train, cifar.num_test) == (50_000, 10_000)
    images = next(cifar.train_epoch(10_000).as_numpy_iterator())[0]
    assert np.abs(images.mean(axis=(0, 1, 2))).max() < 0.05
    assert np.abs(images.std(axis=(0, 1, 2)) - 1).max() < 0.05


def test_absent_data_is_one_clear_error(monkeypatch, tmp_path):
    def offline(self, **_):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", offline)
    with pytest.raises(data.DataError, match=r"'cifar100' was not found in .*cifar100.*tfds build cifar100") as error:
        data.load("cifar100", data_dir=tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "Name or service not known" in str(error.value)


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="`dataset` must be one of digits, .*; got 'mnist'"):
        data.load("mnist")


def prepare(name, data_dir, splits, example):
    """A data set as tfds prepares it, of 20 examples in each of its `splits`; returns its directory."""
    builder = tfds.builder(name, data_dir=data_dir)
    pathlib.Path(builder.data_dir).mkdir(parents=True)
    infos = []
    for split in splits:
        with tf.io.TFRecordWriter(f"{builder.data_dir}/{name}-{split}.tfrecord-00000-of-00001") as writer:
            for number in range(20):
                encoded = builder.info.features.encode_example(example(number))
                writer.write(builder.info.features.serialize_example(encoded))
        template = tfds.core.ShardedFileTemplate(
            data_dir=epath.Path(builder.data_dir),
            dataset_name=name,
            split=split,
            filetype_suffix="tfrecord",
        )
        infos.append(tfds.core.SplitInfo(name=split, shard_lengths=[20], num_bytes=0, filename_template=template))
    builder.info.set_splits(tfds.core.splits.SplitDict(infos))
    builder.info.write_to_directory(builder.data_dir)
    return pathlib.Path(builder.data_dir)


def test_a_broken_file_is_told_with_its_place(tmp_path):
    directory = prepare(
        "fashion_mnist", tmp_path, ("train", "test"), lambda n: {"image": np.full((28, 28, 1), n, np.uint8), "label": 3}
    )
    assert data.load("fashion_mnist", data_dir=tmp_path).num_train == 20
    [path] = directory.glob("*train*")
    broken = bytearray(path.read_bytes())
    broken[len(broken) // 2] ^= 1
    path.write_bytes(broken)
    with pytest.raises(data.DataError, match=f"'fashion_mnist' in {directory} cannot be read .DataLossError.*prepare it anew"):
        data.load("fashion_mnist", data_dir=tmp_path)


def test_imagenet_is_read_from_its_files_in_an_order_of_the_seed(tmp_path):
    def example(number):
        image = np.full((40, 60 + number, 3), 10 * number, np.uint8)  # of many sizes
        return {"image": image, "label": number, "file_name": f"{number}.jpeg"}

    prepare("imagenet2012", tmp_path, ("train", "validation"), example)
    imagenet = data.load("imagenet2012", data_dir=tmp_path)
    assert (imagenet.num_train, imagenet.num_test) == (20, 20)

    def epoch(**options):
        return [(images, list(labels)) for images, labels in imagenet.train_epoch(8, **options).as_numpy_iterator()]

    first, again, other = epoch(seed=1, augment=True), epoch(seed=1, augment=True), epoch(seed=1, augment=True, epoch=1)
    assert [images.shape for images, _ in first] == [(8, 224, 224, 3), (8, 224, 224, 3), (4, 224, 224, 3)]
    assert sorted(label for _, labels in first for label in labels) == list(range(20))
    for one, same, _ in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(one[0], same[0])
        assert one[1] == same[1]
    assert first[0][1] != other[0][1]
    rest = epoch(seed=1, augment=True, skip=1)
    np.testing.assert_array_equal(rest[0][0], first[1][0])
    [batch] = imagenet.test_batches(20)
    assert list(batch[1].numpy()) == list(range(20))
    # An even image stays one: its value by the mean and deviation of the recipe.
    expected = (10 * np.arange(20)[:, None] - np.array([123.675, 116.28, 103.53])) / np.array([58.395, 57.12, 57.375])
    np.testing.assert_allclose(batch[0].numpy()[:, 100, 100], expected, atol=0.05)
