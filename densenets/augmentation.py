"""Data augmentation, one image at a time, from a seed: the same seed gives the same image."""

import itertools
import math

import tensorflow as tf

PADDING = 4  # pixels on each side, of which a random crop of the original size is taken


def pad_crop_flip(image, mean, seed):
    """CIFAR's (arXiv:1608.06993, section 4.1): 4 pixels of padding, a random crop of the original size, a horizontal flip.

    Args:
        image: [H, W, C].
        mean: the value of the padding, which is zero in the normalised image, for each channel.
        seed: two integers.
    """
    size = tf.shape(image)
    padded = tf.pad(image - mean, [[PADDING, PADDING], [PADDING, PADDING], [0, 0]]) + mean
    image = tf.image.stateless_random_crop(padded, size, seed)
    return tf.image.stateless_random_flip_left_right(image, seed + 1)


# === ImageNet, as fb.resnet.torch, whose data loader the paper's code uses ===

AREA = (0.08, 1.0)  # of a crop, as a share of the image's
ASPECT = (3 / 4, 4 / 3)
JITTER = 0.4  # of brightness, contrast and saturation
LIGHTING = 0.1  # the deviation of the shift along the principal components of the images' colours (of values 0 to 1)
GRAY = (0.299, 0.587, 0.114)
EIGENVALUES = (0.2175, 0.0188, 0.0045)
EIGENVECTORS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))


def central_crop(image, shape):
    """Scales the shorter side to 256 for a crop of 224, in proportion for others, and takes the centre."""
    height, width, _ = shape
    size = tf.cast(tf.shape(image)[:2], tf.float32)
    scale = max(height, width) * 256 / 224 / tf.reduce_min(size)
    image = tf.image.resize(image, tf.cast(tf.round(size * scale), tf.int32), method="bicubic", antialias=True)
    return tf.clip_by_value(tf.image.resize_with_crop_or_pad(image, height, width), 0, 255)


def resized_crop_flip_jitter(image, shape, seed):
    """A crop of random area and aspect, scaled to `shape`; colours jittered and shifted; a horizontal flip."""
    seeds = tf.unstack(tf.random.experimental.stateless_split(tf.cast(seed, tf.int32), 4), num=4)
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.shape(image),
        tf.zeros([1, 0, 4]),
        seeds[0],
        min_object_covered=0.0,
        aspect_ratio_range=ASPECT,
        area_range=AREA,
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    image = tf.image.resize(tf.slice(image, begin, size), shape[:2], method="bicubic", antialias=True)
    image = _lighting(_jitter(tf.clip_by_value(image, 0, 255), seeds[1]), seeds[2])
    return tf.image.stateless_random_flip_left_right(image, seeds[3])


def _jitter(image, seed):
    """Brightness, contrast and saturation in a random order, each blended by a random share with what has none."""
    shares = tf.random.stateless_uniform([3], seed, 1 - JITTER, 1 + JITTER)

    def gray(image):
        return tf.reduce_sum(image * GRAY, axis=-1, keepdims=True)

    adjust = [
        lambda image: image * shares[0],
        lambda image: image * shares[1] + tf.reduce_mean(gray(image)) * (1 - shares[1]),
        lambda image: image * shares[2] + gray(image) * (1 - shares[2]),
    ]

    def in_order(order):
        result = image
        for i in order:
            result = adjust[i](result)
        return result

    orders = [lambda order=order: in_order(order) for order in itertools.permutations(range(3))]
    which = tf.random.stateless_uniform([], seed + 1, 0, math.factorial(3), tf.int32)
    return tf.switch_case(which, orders)


def _lighting(image, seed):
    """Adds a random mixture of the principal components of the training images' colours (Krizhevsky et al., 2012)."""
    weights = tf.random.stateless_normal([3], seed, stddev=LIGHTING) * EIGENVALUES
    return image + 255 * tf.linalg.matvec(tf.constant(EIGENVECTORS), weights)
