"""The training loop: one for a single device, for several and for several machines, with Keras' callbacks on it.

Keras' own `fit` fails under `MultiWorkerMirroredStrategy` before its first step (keras #20585). The loop knows no config; it
steps a compiled classifier through the batches that it is given. A loss is the mean over the images of the whole batch, on
however many devices they lie.
"""

import contextlib
import math
import signal
import time

import keras
import numpy as np
import tensorflow as tf

from densenets import backend, checkpoints, devices

CHECKPOINT_SECONDS = 600  # between checkpoints within an epoch; there is one at the end of each
DISPLAY_SECONDS = 0.5  # between looks at the loss, for which the device must be waited for


class DivergedError(RuntimeError):
    """The loss is not a number any more."""


class PreemptedError(RuntimeError):
    """The process was told to end (SIGTERM); the state is saved."""


class Loop:
    """A compiled model that steps on the devices of a strategy.

    Args:
        model: compiled under `strategy.scope()` with an optimizer and a loss that takes logits.
        strategy: of `tf.distribute`; the default strategy for one device.

    Attributes:
        step: the number of steps taken.
        history: by metric, a list of numbers, one for each epoch.
    """

    def __init__(self, model, strategy=None):
        self.model = model
        self.strategy = strategy or tf.distribute.get_strategy()
        self.num_replicas = self.strategy.num_replicas_in_sync
        with self.strategy.scope():
            model.optimizer.build(model.trainable_variables)
        self._train = self._test = self._share = None
        self.restart()

    def restart(self):
        """Forgets all progress (the weights are the caller's)."""
        self.step, self.history = 0, {}

    # === Steps ===

    def train_step(self, batch):
        """One step on `(images, labels)`; returns tensors: the loss, the number of right answers, that of images."""
        if self._train is None:
            self._train = self._compiled(self._train_replica, batch)
        return self._train(*batch)

    def evaluate(self, batches):
        """Loss and accuracy over batches `(images, labels, weights)`."""
        totals = np.zeros(3)
        for batch in batches:
            if self._test is None:
                self._test = self._compiled(self._test_replica, batch)
            totals += [float(value) for value in self._test(*batch)]
        return {"loss": totals[0] / totals[2], "accuracy": totals[1] / totals[2]}

    def _train_replica(self, images, labels):
        model, optimizer = self.model, self.model.optimizer
        count = self._total(tf.shape(images)[0])
        with tf.GradientTape() as tape:
            logits = backend.widened(model(images, training=True))
            losses = model.loss.call(labels, logits)
            loss = tf.reduce_sum(losses) / tf.cast(count, losses.dtype)
            scaled = optimizer.scale_loss(loss)
        weights = model.trainable_variables
        grads = tape.gradient(scaled, [weight.value for weight in weights])
        if self.num_replicas > 1 and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            # Every replica must find the same gradients finite; the optimizer sums over them once more.
            grads = [self._total(grad) / self.num_replicas for grad in grads]
        optimizer.apply(grads, weights)
        return self._total(loss), self._total(tf.reduce_sum(_is_right(labels, logits))), count

    def _test_replica(self, images, labels, weights):
        logits = backend.widened(self.model(images, training=False))
        losses = self.model.loss.call(labels, logits)
        right = tf.reduce_sum(_is_right(labels, logits) * weights)
        return [self._total(v) for v in (tf.reduce_sum(losses * tf.cast(weights, losses.dtype)), right, tf.reduce_sum(weights))]

    def share_averages(self):
        """Makes the moving averages, which each replica has of its own images, the mean of all replicas'.

        They are linear in the images: it does not matter how often this is done.
        """
        if self.num_replicas == 1:
            return
        averages = [v.value for v in self.model.non_trainable_variables if tf.as_dtype(v.dtype).is_floating]

        def share():
            for average in averages:
                mean = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, average.read_value())
                average.assign(mean)

        if self._share is None:
            self._share = tf.function(lambda: self.strategy.run(share))
        self._share()

    def _total(self, value):
        """The sum over the replicas."""
        if self.num_replicas == 1:
            return value
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)

    def _compiled(self, replica_step, batch):
        """`replica_step` as the model was compiled to run, for batches of any size like `batch`."""
        if self.num_replicas > 1:

            def one_step_on_data(*batch):
                return self.strategy.experimental_local_results(self.strategy.run(replica_step, batch))[0]

            return one_step_on_data if self.model.run_eagerly else tf.function(one_step_on_data)
        if self.model.run_eagerly:
            return replica_step

        def one_step_on_data(*batch):  # the name of Keras' own, which `memory.watch_xla` looks for
            return replica_step(*batch)

        signature = [tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype) for tensor in batch]
        return tf.function(one_step_on_data, input_signature=signature, jit_compile=bool(self.model.jit_compile))

    # === Training ===

    def fit(self, batches, *, epochs, steps_per_epoch, evaluate, checkpoint=None, callbacks=()):
        """Trains until `epochs * steps_per_epoch` steps are taken.

        Goes on where the file `checkpoint` says, if it is there, and keeps it up to date: after each epoch, every ten minutes
        and when told to end.

        Args:
            batches: `batches(step)` gives the batches from a step on, endlessly.
            epochs: how many, those of earlier calls included.
            steps_per_epoch: how long each is.
            evaluate: `evaluate(self)` gives the metrics of the test set, as numbers by name.
            checkpoint: a path that all processes see, or `None`.
            callbacks: Keras callbacks.

        Returns:
            `history`.

        Raises:
            DivergedError: where the loss is not finite; what is saved is from before.
            PreemptedError, KeyboardInterrupt: after saving, for SIGTERM and SIGINT.
            checkpoints.CheckpointError: for a checkpoint that cannot be gone on from.
        """
        self._restore(checkpoint)
        self.model.stop_training = False
        first_epoch, done = divmod(self.step, steps_per_epoch)
        callbacks = keras.callbacks.CallbackList(callbacks, model=self.model, epochs=epochs, steps=steps_per_epoch)
        iterator = iter(batches(self.step))
        with _signals() as signals:
            callbacks.on_train_begin()
            for epoch in range(first_epoch, epochs):
                callbacks.on_epoch_begin(epoch)
                logs = self._train_epoch(iterator, range(done, steps_per_epoch), callbacks, checkpoint, signals)
                logs |= {f"val_{name}": value for name, value in evaluate(self).items()}
                for name, value in logs.items():
                    self.history.setdefault(name, []).append(value)
                callbacks.on_epoch_end(epoch, logs)
                self._save(checkpoint)
                self._end_if_told(signals)
                if self.model.stop_training:
                    break
                done = 0
            callbacks.on_train_end()
        return self.history

    def _train_epoch(self, iterator, indices, callbacks, checkpoint, signals):
        """The steps `indices` of an epoch; returns its metrics. Within the epoch it saves now and then, and ends when told."""
        totals = self._totals if indices.start else _Totals()
        learning_rate = float(self.model.optimizer.learning_rate)
        saved = time.monotonic()
        for index in indices:
            callbacks.on_train_batch_begin(index)
            start = time.perf_counter()
            batch = next(iterator)
            totals.wait += time.perf_counter() - start
            totals.add(self.train_step(batch))
            self.step += 1
            callbacks.on_train_batch_end(index, totals.look(self.step))
            last = index + 1 == indices.stop  # then the epoch is finished first
            if not last and (signals or time.monotonic() - saved > CHECKPOINT_SECONDS):
                totals.look(self.step, now=True)
                if self.strategy.cluster_resolver is None:  # else the others would have to save at this step too
                    self.share_averages()
                self._save(checkpoint, totals)
                self._end_if_told(signals)
                saved = time.monotonic()
        self.share_averages()
        return totals.look(self.step, now=True) | totals.speed() | {"learning_rate": learning_rate}

    def _end_if_told(self, signals):
        if signals:
            told = PreemptedError(f"Told to end, and saved at step {self.step}.")
            raise KeyboardInterrupt if signals[0] == signal.SIGINT else told

    # === State ===

    @property
    def _variables(self):
        return [*self.model.variables, *self.model.optimizer.variables]

    def _save(self, path, totals=None):
        if path is not None and devices.is_chief(self.strategy):
            progress = {"step": self.step, "history": self.history, "totals": totals.state() if totals else None}
            checkpoints.save(path, self._variables, progress)

    def _restore(self, path):
        self._totals = _Totals()
        progress = checkpoints.restore(path, self._variables) if path is not None else None
        if progress:
            self.step, self.history = progress["step"], progress["history"]
            self._totals = _Totals(progress["totals"])
        # None gets on before the others have read their file.
        steps = devices.in_all_processes(self.strategy, self.step)
        if len(steps) > 1:
            raise checkpoints.CheckpointError(
                f"The workers would go on from different steps, {steps}. All must see one workdir."
            )


class _Totals:
    """Sums over the steps of an epoch. Looking at them waits for the device; so it is done now and then."""

    def __init__(self, state=None):
        self.loss, self.right, self.count = state or (0.0, 0, 0)  # the loss times the images
        self.wait = 0.0
        self.start, self.before = time.perf_counter(), self.count
        self._pending, self._looked, self._logs = [], 0.0, {}

    def state(self):
        return [self.loss, self.right, self.count]

    def add(self, results):
        self._pending.append(results)

    def look(self, step, now=False):
        """The means so far, as of the last look. Raises `DivergedError`, which names the step."""
        if now or time.monotonic() - self._looked > DISPLAY_SECONDS:
            first = step - len(self._pending) + 1
            for number, (loss, right, count) in enumerate(self._pending, start=first):
                loss, count = float(loss), int(count)
                if not math.isfinite(loss):
                    raise DivergedError(f"The loss is {loss} at step {number}")
                self.loss, self.right, self.count = self.loss + loss * count, self.right + int(right), self.count + count
            self._pending, self._looked = [], time.monotonic()
            self._logs = {"loss": self.loss / self.count, "accuracy": self.right / self.count}
        return self._logs

    def speed(self):
        seconds = time.perf_counter() - self.start
        return {"images_per_second": (self.count - self.before) / seconds, "data_wait": self.wait / seconds}


def _is_right(labels, logits):
    return tf.cast(tf.argmax(logits, -1, labels.dtype) == labels, tf.float32)


@contextlib.contextmanager
def _signals():
    """Collects the signals that ask a process to end; a second one of the keyboard ends it at once.

    Outside a program's main thread, where none can be caught, the list stays empty.
    """
    caught, before = [], {}

    def catch(number, frame):
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)

    with contextlib.suppress(ValueError):
        before = {number: signal.signal(number, catch) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
