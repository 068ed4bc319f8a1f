"""Recomputation: keep a function's inputs, run it again in the backward pass.

`recompute(fn)` computes what `fn` computes and has the gradients that `fn` has, but nothing that `fn` makes on the way is
kept for the backward pass. There, `fn` runs a second time, after the incoming gradient has arrived, and that run is
differentiated. (Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.)

It replaces `tf.contrib.layers.recompute_grad`, which went away with TensorFlow 1, and differs from `tf.recompute_grad` in
what users of that function met (tensorflow #36981, #57205): state moves once, keyword arguments work in graphs, the
recomputation waits for the gradient in plain graphs too, and what cannot be right is refused.

How it is done: `fn` runs, eagerly unrecorded; then one gradient is attached from everything that `fn` was computed from
(arguments, the variables it read, tensors it closed over) to its results. Second derivatives differentiate the second run;
forward mode finds `fn` itself (`backend.attach_gradient`).
"""

import functools
import inspect
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from densenets import backend
from densenets.backend import is_differentiable


def recompute(fn: Callable | None = None, *, use_data_dep: bool | None = None, tupleize_grads: bool | None = None) -> Callable:
    """Makes `fn` keep only its inputs, and run again in the backward pass.

    Use it as `recompute(fn)`, `@recompute` or `@recompute(use_data_dep=True)`. The result is right in eager execution,
    `tf.function`, `jit_compile=True`, a `tf.compat.v1` graph, loops, under `tf.distribute` and with mixed precision.

    What `fn` may do:

    - Take positional and keyword arguments, nested as `tf.nest` allows. A positional argument holds tensors only (or NumPy
      arrays or variables, which are converted); keyword arguments may be anything.
    - Return a tensor or a structure of tensors.
    - Read variables, create them in its first call, and call Keras layers. Keras variables that it assigns (moving
      averages, seed generators) change once; the second run finds them as the first did, so dropout draws the same mask.
    - Close over tensors: they get their gradients.
    - Take an argument `is_recomputing`: it is given `False` in the first run and `True` in the second. A function that
      assigns a plain `tf.Variable` needs it, to do so once.

    What it must not do, and is told so: draw random numbers from stateful operations (`tf.random.normal`,
    `tf.random.Generator`; they cannot be drawn again: use `keras.random` with a `SeedGenerator`, or `tf.random.stateless_*`),
    read other variables in the second run than in the first, or call `add_loss` (wrap the layer with
    `densenets.layers.Recompute` for that).

    Args:
        fn: the function, or a Keras layer.
        use_data_dep: how the second run is ordered after the incoming gradient: `True` by a data dependency, which XLA
            respects; `False` by control dependencies; `None` as suits what is being traced.
        tupleize_grads: whether all gradients are computed before any is handed on; `None` as suits what is being traced: in
            plain graphs, where the executor would put off the gradients of variables and keep what they are made from.

    Returns:
        A function with the arguments and the results of `fn`.

    Raises:
        TypeError: in the call, for an argument that is no tensor, or a result without one.
        ValueError: in the call, for a function that cannot be run again.
    """
    if fn is None:
        return functools.partial(recompute, use_data_dep=use_data_dep, tupleize_grads=tupleize_grads)
    if not callable(fn):
        raise TypeError(f"recompute: `fn` must be a function or a layer, got {fn!r}.")

    @functools.wraps(fn, updated=())
    def wrapper(*args, **kwargs):
        results, losses = run(fn, args, kwargs, use_data_dep, tupleize_grads)
        if losses:
            raise ValueError(
                f"{_name(fn)} calls `add_loss` inside `recompute`, where the loss would lose its gradient. "
                "Wrap the layer with `densenets.layers.Recompute`, or return the loss as a result."
            )
        return results

    return wrapper


recompute_grad = recompute


def run(fn, args, kwargs, use_data_dep=None, tupleize_grads=None):
    """Runs `fn(*args, **kwargs)` recomputed; returns its results and the losses that layers added on the way."""
    call, tensors = _bind(fn, args, kwargs)
    if tupleize_grads is None:
        tupleize_grads = not (tf.executing_eagerly() or backend.in_xla())
    ops = backend.OpWatch(tensors)
    with backend.FirstRun() as first, ops, backend.unrecorded(), backend.variables_read() as read:
        outputs = call(tensors, is_recomputing=False)
    outputs = outputs, list(first.losses)
    results, is_result = _tensors_of(outputs)
    check_first_run(fn, outputs, results, ops)
    captured, variables = ops.captured(), list(read.watched_variables())
    sources = [*filter(is_differentiable, tensors), *captured, *map(tf.convert_to_tensor, variables)]
    if tf.executing_eagerly() and backend.has_tangents(sources):  # forward mode goes through recorded operations
        with first.second_run() as second:
            return call(tensors, is_recomputing=True), list(second.losses)

    def gradients(*upstream):
        asked = [i for i, dy in enumerate(upstream) if dy is not None and is_differentiable(dy)]
        upstream = [upstream[i] for i in asked]
        with backend.ordering(upstream, use_data_dep) as tie:
            read_again = backend.variables_read()
            with first.second_run() as second, tf.GradientTape() as tape, read_again:
                inputs = [tie(tensor) for tensor in tensors]
                sources = [*filter(is_differentiable, inputs), *captured]
                tape.watch(sources)
                again, _ = _tensors_of((call(inputs, is_recomputing=True), list(second.losses)))
            check_second_run(fn, variables, read_again.watched_variables())
            targets = [again[i] for i in asked]
            grads = dense(tape.gradient(targets, sources + variables, output_gradients=upstream))
        return _together(grads, use_data_dep) if tupleize_grads else grads

    attached = iter(backend.attach_gradient(results, sources, gradients))
    flat = tf.nest.flatten(outputs, expand_composites=True)
    flat = [next(attached) if is_r else leaf for leaf, is_r in zip(flat, is_result, strict=True)]
    return tf.nest.pack_sequence_as(outputs, flat, expand_composites=True)


def dense(grads):
    """Gradients as tensors: those of an embedding's rows are spread out, since a custom gradient takes no others."""
    return [None if grad is None else tf.convert_to_tensor(grad) for grad in grads]


def _together(grads, use_data_dep):
    """Every gradient, none readable before all are computed."""
    with backend.ordering([g for g in grads if g is not None], use_data_dep) as tie:
        return [None if g is None else tie(g) for g in grads]


# === Structures ===


def _bind(fn, args, kwargs):
    """`call(tensors, is_recomputing)`, which runs `fn` on the arguments with their tensors replaced, and those tensors."""
    leaves, is_tensor = _flatten(fn, args, kwargs)
    takes_flag = "is_recomputing" in _parameters(fn) and "is_recomputing" not in kwargs

    def call(tensors, is_recomputing):
        tensors = iter(tensors)
        flat = [next(tensors) if is_t else leaf for leaf, is_t in zip(leaves, is_tensor, strict=True)]
        call_args, call_kwargs = tf.nest.pack_sequence_as((args, kwargs), flat, expand_composites=True)
        return fn(*call_args, **call_kwargs, **({"is_recomputing": is_recomputing} if takes_flag else {}))

    # A tensor given twice must be two, each with its own gradient.
    return call, [tf.identity(leaf) for leaf, is_t in zip(leaves, is_tensor, strict=True) if is_t]


def _flatten(fn, args, kwargs):
    """The leaves of all arguments, tensors converted, and for each whether it is a tensor."""
    positional = tf.nest.flatten(args, expand_composites=True)
    leaves, is_tensor = [], []
    for i, leaf in enumerate(positional + tf.nest.flatten(kwargs, expand_composites=True)):
        if isinstance(leaf, keras.KerasTensor):
            raise TypeError(
                f"{_name(fn)} was given a symbolic Keras tensor. In a Functional model wrap the layer instead: "
                "`densenets.layers.Recompute(layer)(x)`."
            )
        tensor = tf.is_tensor(leaf) or isinstance(leaf, (np.ndarray, tf.Variable, keras.Variable))
        if not tensor and i < len(positional):
            raise TypeError(
                f"{_name(fn)}: positional argument leaf {i} is {leaf!r} ({type(leaf).__name__}), which is no tensor. Pass it "
                "by keyword, or bind it first (`functools.partial`; for a method, `recompute(self.method)`)."
            )
        leaves.append(tf.convert_to_tensor(leaf) if tensor else leaf)
        is_tensor.append(tensor)
    return leaves, is_tensor


def _tensors_of(outputs):
    """The tensors among the leaves of `outputs`, and for each leaf whether it is one."""
    flat = tf.nest.flatten(outputs, expand_composites=True)
    is_result = [tf.is_tensor(leaf) for leaf in flat]
    return [tensor for tensor, is_r in zip(flat, is_result, strict=True) if is_r], is_result


# === Refusals ===


def _parameters(fn):
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):  # built-in functions may have no signature
        return {}


def _name(fn):
    return f"recompute: `{getattr(fn, '__name__', None) or getattr(fn, 'name', None) or type(fn).__name__}`"


def check_first_run(fn, outputs, results, ops):
    """Raises for a function that cannot be run again, or whose `outputs` have no tensors, `results`, to differentiate."""
    if not results:
        raise TypeError(f"{_name(fn)} returned {outputs[0]!r}; it must return a tensor or a structure with tensors.")
    operation = ops.random_operation(results)
    if operation is not None:
        raise ValueError(
            f"{_name(fn)} draws random numbers with the stateful operation {operation}, which cannot be drawn again "
            "in the backward pass. Use `keras.random` with a `keras.random.SeedGenerator`, or `tf.random.stateless_*`."
        )


def check_second_run(fn, first, second):
    """Raises where the variables read in the `second` run are not those of the `first`."""
    first, second = ({v.ref(): v.name for v in variables} for variables in (first, second))
    if first.keys() != second.keys():
        only_first = sorted(name for ref, name in first.items() if ref not in second)
        only_second = sorted(name for ref, name in second.items() if ref not in first)
        raise ValueError(
            f"{_name(fn)} read other trainable variables when it ran again, so its gradients would be wrong. Only in the "
            f"first run: {only_first}; only in the recomputation: {only_second}. Make the choice outside of the function."
        )
