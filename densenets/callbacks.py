"""What people watch while a network trains, as Keras callbacks."""

import os
import time

import keras
import tensorflow as tf


class Progress(keras.callbacks.Callback):
    """A bar with images a second in a terminal, a line for each epoch elsewhere."""

    def __init__(self, batch_size, log):
        super().__init__()
        self.batch_size, self.log = batch_size, log
        self.bar = None

    def on_epoch_begin(self, epoch, logs=None):
        if os.isatty(1):
            print(f"Epoch {epoch + 1}/{self.params['epochs']}")
            names = ("loss", "accuracy", "images/s")
            self.bar = keras.utils.Progbar(self.params["steps"], stateful_metrics=names)
        self.start, self.done = time.perf_counter(), 0

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        if self.bar is not None:
            speed = self.done * self.batch_size / (time.perf_counter() - self.start)
            self.bar.update(batch + 1, values=[*logs.items(), ("images/s", speed)], finalize=False)

    def on_epoch_end(self, epoch, logs=None):
        if self.bar is not None:
            self.bar.update(self.params["steps"], values=list(logs.items()), finalize=True)
        else:
            self.log(
                f"epoch {epoch + 1}/{self.params['epochs']}: loss {logs['loss']:.4f}, accuracy {logs['accuracy']:.2%}, test "
                f"accuracy {logs['val_accuracy']:.2%}, {logs['images_per_second']:.0f} images/s, learning rate "
                f"{logs['learning_rate']:g}, waiting for data {logs['data_wait']:.1%}"
            )


class Summaries(keras.callbacks.Callback):
    """What TensorBoard shows: every number of each epoch, and some images as the network sees them."""

    def __init__(self, directory, images):
        super().__init__()
        self.writer, self.images = tf.summary.create_file_writer(str(directory)), images

    def on_train_begin(self, logs=None):
        with self.writer.as_default():
            low, high = tf.reduce_min(self.images), tf.reduce_max(self.images)
            tf.summary.image("training images", (self.images - low) / (high - low), step=0, max_outputs=8)

    def on_epoch_end(self, epoch, logs=None):
        with self.writer.as_default():
            for name, value in logs.items():
                tf.summary.scalar(name, value, step=epoch + 1)
        self.writer.flush()

    def on_train_end(self, logs=None):
        self.writer.close()
