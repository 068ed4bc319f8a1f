"""Reversible residual blocks: activation memory that does not grow with the number of layers.

A layer takes a pair to a pair, `y1 = x1 + f(x2)` and `y2 = x2 + g(y1)`, and can be undone: `x2 = y2 - g(y1)`,
`x1 = y1 - f(x2)`. So only the last layer's results are kept; the backward pass recovers each layer's inputs from its results
on the way. (Gomez et al., "The Reversible Residual Network", arXiv:1707.04585, section 3 and algorithm 1.)

It replaces `tf.contrib.layers.rev_block`, which went away with TensorFlow 1. What f and g may do is what a function under
`densenets.recompute` may do: both run twice.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from densenets import backend
from densenets.backend import is_differentiable
from densenets.recompute import check_first_run, check_second_run, dense


def rev_block(
    x1: tf.Tensor,
    x2: tf.Tensor,
    f: Callable | Sequence[Callable],
    g: Callable | Sequence[Callable],
    num_layers: int = 1,
    f_side_input: Sequence[tf.Tensor] | None = None,
    g_side_input: Sequence[tf.Tensor] | None = None,
    is_training: bool = True,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Runs a block of `num_layers` reversible layers.

    Args:
        x1: one half of the input.
        x2: the other, of the same shape and dtype.
        f: a function of a tensor that returns one of the same shape, or a list with one for each layer. A single function
            serves every layer, with the weights that it has.
        g: as `f`.
        num_layers: how many layers.
        f_side_input: a list of tensors that `f` takes as a second argument. They have gradients.
        g_side_input: the same for `g`.
        is_training: `False` computes the same without preparing a backward pass of its own.

    Returns:
        `(y1, y2)`, of the shape of `x1` and `x2`.

    Raises:
        ValueError: for lists of another length, halves that differ, or an f or g that changes the shape or dtype.
    """
    layers = _layers(f, g, num_layers)
    x1, x2 = tf.identity(x1), tf.identity(x2)
    if x1.dtype != x2.dtype or not x1.shape.is_compatible_with(x2.shape) or not is_differentiable(x1):
        raise ValueError(f"rev_block: `x1` and `x2` must have one shape and one floating dtype; got {x1} and {x2}.")
    f_side, g_side = (_side(f_side_input), _side(g_side_input))
    if not is_training:
        return _forward(layers, x1, x2, f_side, g_side)

    ops = backend.OpWatch([x1, x2, *(f_side or []), *(g_side or [])])
    with ops, backend.unrecorded(), backend.variables_read() as read:
        first_runs = [(backend.FirstRun(), backend.FirstRun()) for _ in layers]
        results = _forward(layers, x1, x2, f_side, g_side, first_runs)
    check_first_run(f, results, results, ops)
    if any(run.losses for runs in first_runs for run in runs):
        raise ValueError("rev_block: f or g calls `add_loss`, which would lose its gradient. Add the loss outside.")
    extra = [*filter(is_differentiable, [*(f_side or []), *(g_side or [])]), *ops.captured()]
    variables = list(read.watched_variables())
    sources = [x1, x2, *extra, *map(tf.convert_to_tensor, variables)]
    if tf.executing_eagerly() and backend.has_tangents(sources):  # forward mode goes through recorded operations
        return _forward(layers, x1, x2, f_side, g_side, [[run.second_run() for run in runs] for runs in first_runs])

    def gradients(*upstream):
        # From the results as they were handed out, so that a second derivative finds its way back through them.
        dy1, dy2 = (tf.zeros_like(y) if dy is None else dy for dy, y in zip(upstream, (y1, y2), strict=True))
        sums = _Sums(extra, variables)
        state = y1, y2, dy1, dy2
        for layer, runs in zip(reversed(layers), reversed(first_runs), strict=True):
            state = _undo(layer, runs, state, f_side, g_side, sums)
        check_second_run(f, variables, sums.read)
        return [*state[2:], *sums.total()]

    y1, y2 = backend.attach_gradient(results, sources, gradients)
    return y1, y2


def _undo(layer, first_runs, state, f_side, g_side, sums):
    """One layer backwards: from its results and their gradients to its inputs and theirs (algorithm 1 of the paper)."""
    (f, g), (f_run, g_run), (y1, y2, dy1, dy2) = layer, first_runs, state
    # The inputs could be recovered layer after layer before any gradient is there, and all that they need would be kept.
    with backend.ordering([dy1, dy2]) as tie:
        g_y1, back_g = _run_again(g, g_run, tie(y1), g_side, sums)
        x2 = y2 - g_y1
        dx1 = dy1 + back_g(backend.after(dy2, x2))
    with backend.ordering([dx1]) as tie:
        f_x2, back_f = _run_again(f, f_run, tie(x2), f_side, sums)
        x1 = y1 - f_x2
        dx2 = dy2 + back_f(backend.after(dx1, x1))
    return x1, x2, dx1, dx2


def _run_again(fn, first_run, x, side, sums):
    """`fn(x)` by its second run, and the function that takes its gradient to that of `x`, adding the others to `sums`."""
    with first_run.second_run(), tf.GradientTape() as tape, backend.variables_read() as read:
        x = tf.identity(x)
        tape.watch([x, *sums.extra])
        y = _apply(fn, x, side)
    sums.read.extend(read.watched_variables())

    def back(dy):
        dx, *rest = dense(tape.gradient(y, [x, *sums.extra, *sums.variables], output_gradients=dy))
        sums.add(rest)
        # The variables' gradients first: what they are made from is then free before the next layer is recomputed.
        return backend.after(tf.zeros_like(x) if dx is None else dx, *rest)

    return y, back


class _Sums:
    """The gradients of what every layer may use (side inputs, tensors closed over, variables), added up layer by layer."""

    def __init__(self, extra, variables):
        self.extra, self.variables, self.read = extra, variables, []
        self._sums = [None] * (len(extra) + len(variables))

    def add(self, grads):
        self._sums = [a if b is None else b if a is None else a + b for a, b in zip(self._sums, grads, strict=True)]

    def total(self):
        return self._sums


def _forward(layers, x1, x2, f_side, g_side, runs=None):
    """All layers, each f and g in a context of its own from `runs`, a list of pairs; without any, as plain functions."""
    for (f, g), (f_run, g_run) in zip(layers, runs or [(contextlib.nullcontext(),) * 2] * len(layers), strict=True):
        with f_run:
            x1 = x1 + _checked("f", f, x2, f_side)
        with g_run:
            x2 = x2 + _checked("g", g, x1, g_side)
    return x1, x2


def _apply(fn, x, side):
    return fn(x) if side is None else fn(x, side)


def _checked(name, fn, x, side):
    y = _apply(fn, x, side)
    if not tf.is_tensor(y) or y.dtype != x.dtype or not y.shape.is_compatible_with(x.shape):
        got = f"{y.dtype.name} {y.shape}" if tf.is_tensor(y) else repr(y)
        raise ValueError(
            f"rev_block: `{name}` must return a tensor of its input's shape and dtype, {x.dtype.name} {x.shape}; got {got}."
        )
    return y


def _layers(f, g, num_layers):
    """The pairs (f, g), one for each layer."""
    if not isinstance(num_layers, int) or num_layers < 1:
        raise ValueError(f"rev_block: `num_layers` must be a positive integer, got {num_layers!r}.")
    for name, fn in (("f", f), ("g", g)):
        if isinstance(fn, (list, tuple)) and len(fn) != num_layers:
            raise ValueError(f"rev_block: `{name}` lists {len(fn)} functions for `num_layers` = {num_layers}.")
    f, g = (list(fn) if isinstance(fn, (list, tuple)) else [fn] * num_layers for fn in (f, g))
    return list(zip(f, g, strict=True))


def _side(tensors):
    return None if tensors is None else [tf.identity(tensor) for tensor in tf.nest.flatten(tensors)]


@keras.saving.register_keras_serializable("densenets")
class RevBlock(keras.Layer):
    """A block of reversible layers as a Keras layer that owns f and g: `(x1, x2) -> (y1, y2)`.

    Args:
        f, g: Keras layers that keep the shape, or lists with one for each layer. A single one serves every layer.
        num_layers: how many layers.

    Raises:
        TypeError: for an f or g that is no layer.
        ValueError: as `rev_block`.
    """

    def __init__(self, f, g, num_layers=1, **kwargs):
        super().__init__(**kwargs)
        pairs = _layers(f, g, num_layers)
        for layer in (layer for pair in pairs for layer in pair):
            if not isinstance(layer, keras.Layer):
                raise TypeError(f"RevBlock: `f` and `g` must be Keras layers, got {layer!r}. Use `rev_block` for functions.")
        self.num_layers = num_layers
        self.f = list(f) if isinstance(f, (list, tuple)) else f
        self.g = list(g) if isinstance(g, (list, tuple)) else g

    def build(self, input_shape):
        shape, _ = input_shape
        for layer in (layer for pair in _layers(self.f, self.g, self.num_layers) for layer in pair):
            if not layer.built:
                layer.build(shape)

    def call(self, inputs, f_side_input=None, g_side_input=None, training=False):
        f, g = self._functions(training)
        x1, x2 = inputs
        return rev_block(x1, x2, f, g, self.num_layers, f_side_input, g_side_input, is_training=training)

    def forward(self, x1, x2, **kwargs):
        """`(y1, y2)`; the same as calling the layer with the pair."""
        return self((x1, x2), **kwargs)

    def backward(self, y1, y2, f_side_input=None, g_side_input=None):
        """The inverse, in inference: `(x1, x2)` from what `forward` returned."""
        f_side, g_side = _side(f_side_input), _side(g_side_input)
        for f, g in reversed(_layers(*self._functions(False), self.num_layers)):
            y2 = y2 - _checked("g", g, y1, g_side)
            y1 = y1 - _checked("f", f, y2, f_side)
        return y1, y2

    def _functions(self, training):
        """f and g as lists of functions of one or two tensors, one for each layer."""
        pairs = _layers(self.f, self.g, self.num_layers)
        return ([functools.partial(layer, training=training) for layer in layers] for layers in zip(*pairs, strict=True))

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        serialize = keras.saving.serialize_keras_object
        return super().get_config() | {"f": serialize(self.f), "g": serialize(self.g), "num_layers": self.num_layers}

    @classmethod
    def from_config(cls, config):
        deserialize = keras.saving.deserialize_keras_object
        return cls(**(config | {"f": deserialize(config["f"]), "g": deserialize(config["g"])}))
