"""What TensorFlow and Keras know but do not export: the only file that reaches into their private modules.

What a recomputation needs stands here:

- `ordering`: "run this after that", said so that the executor (control dependencies) or XLA (data dependencies) obeys;
- `OpWatch`: which outside tensors a function used, and whether it drew random numbers that cannot be drawn again;
- `with_gradient`, `attach_gradient`: a gradient of one's own, and the plain function for whoever asks in another way;
- `FirstRun` and `SecondRun`: Keras state (moving averages, seeds, losses, the training flag, autocasting) that must move
  in the first run of a function and must be found as it was in the second.
"""

import contextlib
import copy

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import initialize_all_variables
from keras.src.layers.layer import CallContext
from tensorflow.compiler.tf2xla.python.xla import dynamic_update_slice
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.client import device_lib
from tensorflow.python.eager import context, forwardprop_util, record
from tensorflow.python.framework import op_callbacks
from tensorflow.python.ops import control_flow_util, variable_scope
from tensorflow.python.ops.control_flow_v2_func_graphs import CondBranchFuncGraph, WhileBodyFuncGraph

# === Order ===


def in_xla() -> bool:
    """Whether what is being traced will be compiled by XLA (`jit_compile=True`, at any level above)."""
    if tf.executing_eagerly():
        return False
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


@contextlib.contextmanager
def ordering(events, use_data_dep=None):
    """Orders what is computed inside after `events`; yields the function that ties the inputs to them.

    In a graph, everything inside gets a control dependency. XLA drops those, so there every tied tensor is computed from
    the events: a zero, made from them in a way that the compiler cannot see through, is added to it. Eagerly the order is
    the program's.

    Args:
        events: tensors that must exist first, such as the incoming gradients.
        use_data_dep: `True` or `False` to choose the means; `None` chooses by what is being traced.
    """
    events = [tf.convert_to_tensor(e) for e in events]
    if use_data_dep is None:
        use_data_dep = in_xla()
    if tf.executing_eagerly() or not events:
        yield tf.identity
    elif use_data_dep:
        zero = _opaque_zero(events)
        yield lambda tensor: _add_zero(tensor, zero)
    else:
        with tf.control_dependencies(events):
            yield tf.identity


def _opaque_zero(events):
    """A float32 scalar, always 0, that no compiler can compute before `events`; infinities and NaN do not leak into it."""
    first = [tf.cast(tf.math.real(tf.reshape(e, [-1])[:1]), tf.float32) for e in events]
    return tf.add_n([tf.reduce_sum(tf.where(tf.math.is_finite(f), 0.0 * f, 0.0)) for f in first])


def _add_zero(tensor, zero):
    if tensor.dtype.is_floating or tensor.dtype.is_complex or tensor.dtype.is_integer:
        return tensor + tf.cast(zero, tensor.dtype)
    if tensor.dtype.is_bool:
        return tf.logical_or(tensor, tf.cast(zero, tf.bool))
    return tf.identity(tensor)


def after(tensor, *events):
    """`tensor`, readable only once `events` (tensors, or `None`) are there: in graphs. XLA needs `after_in_xla`."""
    events = [event for event in events if event is not None]
    if not events or tf.executing_eagerly() or in_xla():
        return tensor
    with tf.control_dependencies(events):
        return tf.identity(tensor)


def after_in_xla(vector, event):
    """`vector`, computed from `event` (if any) where XLA compiles: what follows cannot come earlier. For small tensors."""
    return _add_zero(vector, _opaque_zero([event])) if event is not None and in_xla() else vector


@tf.RegisterGradient("XlaDynamicUpdateSlice")
def _dynamic_update_slice_gradient(op, upstream):
    """Lets a backward pass that updated a buffer in place be differentiated in turn. TensorFlow has no gradient for it."""
    _, update, start = op.inputs
    kept = dynamic_update_slice(upstream, tf.zeros_like(update), start)
    return kept, tf.slice(upstream, start, tf.shape(update)), None


class Buffer:
    """Rows that are written at the end and read from the start, [rows, pixels].

    In XLA it has its full size from the start and is updated in place: otherwise the compiler turns the first rows of a
    concatenation back into earlier concatenations, and keeps them all.
    """

    def __init__(self, rows):
        self.rows, self._size = rows, rows.shape[0]

    @classmethod
    def holding(cls, rows, capacity):
        """A buffer for `capacity` rows that begins with `rows`."""
        if not in_xla():
            return cls(rows)
        buffer = cls(dynamic_update_slice(tf.zeros([capacity, tf.shape(rows)[1]], rows.dtype), rows, [0, 0]))
        buffer._size = rows.shape[0]
        return buffer

    def append(self, rows, event=None):
        """Writes `rows` behind the last; returns all."""
        if in_xla():
            self.rows = dynamic_update_slice(self.rows, rows, [self._size, 0])
        else:
            self.rows = tf.concat([after(self.rows, event), rows], 0)
        self._size += rows.shape[0]
        return self.rows

    def add_to_first(self, rows):
        """Adds `rows` to the first ones, and forgets those behind."""
        first = tf.slice(self.rows, constant(0, 0), constant(rows.shape[0], -1)) + rows
        self.rows = dynamic_update_slice(self.rows, first, [0, 0]) if in_xla() else first


def constant(*values):
    """`values` as an int32 vector; in a graph always the same one, for a trace holds thousands of them."""
    if tf.executing_eagerly():
        return tf.constant(values, tf.int32)
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "_densenets_constants"):
        graph._densenets_constants = {}
    known = graph._densenets_constants
    if values not in known:
        with tf.control_dependencies(None):
            known[values] = tf.constant(values, tf.int32)
    return known[values]


def widened(tensor):
    """A half-precision tensor in float32, any other as it is: for statistics and sums."""
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor


# === Devices ===


def gpu_memory_limit() -> int | None:
    """The bytes that TensorFlow's allocator may take on the first GPU; `None` where it does not tell."""
    limits = [device.memory_limit for device in device_lib.list_local_devices() if device.device_type == "GPU"]
    return limits[0] if limits else None


# === What a function touches ===


def variables_read():
    """A context whose `watched_variables()` are the trainable variables that were read in it, recorded or not."""
    return record.VariableWatcher()


OUTSIDE = ("Placeholder", "PlaceholderWithDefault", "Const")  # what a graph makes of a tensor from outside of it


class OpWatch:
    """A context that sees every operation run (eagerly) or made (in a graph) in this thread."""

    def __init__(self, inputs):
        self._known = {tensor._id for tensor in inputs}
        self._outside = {}
        self._random = {}  # by the id of a tensor that depends on a stateful random operation, that operation's type
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def __enter__(self):
        op_callbacks.add_op_callback(self._see)
        # First, since a callback may hand on nothing in place of the outputs, as `tf.debugging.enable_check_numerics` does.
        callbacks = context.context().op_callbacks
        callbacks.insert(0, callbacks.pop())
        return self

    def __exit__(self, *exception):
        op_callbacks.remove_op_callback(self._see)

    def _see(self, op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if graph is not self._graph:
            return outputs  # the body of a loop or branch: what it takes from outside, and draws, is the loop's own operation's
        op_type = tf.compat.as_str(op_type)
        for tensor in inputs:
            if tensor._id not in self._known and is_differentiable(tensor):
                self._outside[tensor._id] = tensor
        origins = [self._random[tensor._id] for tensor in inputs if tensor._id in self._random]
        origin = origins[0] if origins else random_operation(op_type, attrs, graph)
        if origin is not None:
            self._random.update((tensor._id, origin) for tensor in outputs)
            if op_type.startswith("Assign") and inputs[0]._id not in self._known:
                self._random[inputs[0]._id] = origin  # a variable, unless this gives it its first value
        if op_type not in OUTSIDE:
            self._known.update(tensor._id for tensor in outputs)
        return outputs

    def random_operation(self, results):
        """The type of a stateful random operation that one of `results` depends on, or `None`."""
        return next((self._random[tensor._id] for tensor in results if tensor._id in self._random), None)

    def captured(self):
        """Differentiable tensors that the function took from outside its arguments and that a derivative may be asked of."""
        # In a graph of TensorFlow 1 there is no tape to ask, and any tensor but a constant may be differentiated by.
        return [
            tensor
            for tensor in self._outside.values()
            if (self._graph is not None and tensor.op.type != "Const")
            or record.should_record_backprop([tensor])
            or has_tangents([tensor])
        ]


def is_differentiable(tensor):
    """Whether a tensor's values can have gradients."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def random_operation(op_type, attrs, graph):
    """The type of the stateful random operation that an operation is or, through the functions it calls, holds; or `None`.

    Args:
        op_type: of the operation, or the name of a function.
        attrs: its attributes, names and values in turn.
        graph: where it stands; `None` if it runs eagerly.
    """
    attrs = dict(zip(map(tf.compat.as_str, (attrs or ())[::2]), (attrs or ())[1::2], strict=True))
    if op_type == "RngReadAndSkip" or "seed2" in attrs:
        return op_type
    functions = [op_type]
    for value in attrs.values():
        if isinstance(value, attr_value_pb2.AttrValue):
            functions += [f.name for f in [value.func, *value.list.func] if f.name]
    for name in functions:
        definition = _function_definition(name, graph)
        for node in definition.node_def if definition is not None else ():
            inner = [part for attr in node.attr.items() for part in attr]
            found = random_operation(node.op, inner, graph)
            if found is not None:
                return found
    return None


def _function_definition(name, graph):
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            return function.cached_definition
        graph = getattr(graph, "outer_graph", None)
    known = context.context()
    return known.get_function_def(name) if known.has_function(name) else None


# === A gradient of one's own ===
#
# A gradient that is written by hand says what one backward pass is, and no more. Whoever asks in another way (a second
# derivative, forward mode, a vectorised loop, a graph that was saved and read back) must find the function itself.
#
# In a graph that is had for nothing: every operation of the forward pass is recorded, since recording keeps no memory there,
# and the gradient stands on one operation alone, behind them. What rewrites the graph and loses it finds the plain function.
#
# Eagerly a recorded operation keeps its tensors. So the forward pass runs unrecorded there, and again, recorded, where
# somebody watches that one backward pass does not serve.


def unrecorded():
    """A context in which no tape records operations that run eagerly, and so none keeps what they are computed from."""
    return record.stop_recording() if tf.executing_eagerly() else contextlib.nullcontext()


def has_tangents(tensors):
    """Whether forward-mode differentiation (`tf.autodiff.ForwardAccumulator`) goes through one of `tensors`."""
    return bool(forwardprop_util.pack_tangents(list(tensors)).tangents)


def is_watched(tensors):
    """Whether a tape or forward-mode differentiation watches one of `tensors`."""
    return record.should_record_backprop(list(tensors)) or has_tangents(tensors)


def with_gradient(forward, sources, backward):
    """The results of `forward()`, whose gradient with respect to `sources` is what `backward` returns.

    Args:
        forward: returns its results, a structure of tensors, and whatever `backward` needs of the way there. It may run
            again, and so changes no state.
        sources: a flat list of the tensors that it computes from.
        backward: takes what `forward` returned second and the upstream gradients, `None` where there is none, in the structure
            of the results; returns a gradient, or `None`, for each source. Differentiable itself.
    """
    eager = tf.executing_eagerly()
    if eager and has_tangents(sources):
        return forward()[0]
    with unrecorded():
        results, saved = forward()

    def gradients(*upstream):
        again = eager and is_watched([*sources, *(dy for dy in upstream if dy is not None)])
        return backward(forward()[1] if again else saved, tf.nest.pack_sequence_as(results, upstream))

    return tf.nest.pack_sequence_as(results, attach_gradient(tf.nest.flatten(results), sources, gradients))


def attach_gradient(results, sources, gradients):
    """The tensors `results`, whose gradient with respect to `sources` is what `gradients(*upstream)` returns, and no other.

    Args:
        results: a flat list of tensors, computed in a context `unrecorded()`.
        sources: a flat list of tensors.
        gradients: takes an upstream gradient, perhaps `None`, for each result; returns one, or `None`, for each source.
    """

    def grad(*upstream):
        upstream = [None if dy is None else tf.convert_to_tensor(dy) for dy in upstream[: len(results)]]
        return list(gradients(*upstream))

    if tf.executing_eagerly():
        with record.stop_recording():
            outputs = [tf.raw_ops.Identity(input=result) for result in results]
        record.record_operation("densenets", outputs, list(sources), grad)
        return outputs
    if has_tangents(sources):
        return list(results)

    def padded(*upstream):
        return [None] * len(results) + grad(*upstream)

    inputs = [*results, *map(tf.convert_to_tensor, sources)]
    graph = tf.compat.v1.get_default_graph()
    # The graph holds the function, and both go together; TensorFlow's registry of gradients would hold it for good.
    with graph._override_gradient_function({"IdentityN": lambda op, *upstream: padded(*upstream)}), record.stop_recording():
        outputs = tf.raw_ops.IdentityN(input=inputs)
    record.record_operation("densenets", outputs, inputs, padded)
    return outputs[: len(results)]


# === Keras state ===


class FirstRun(keras.StatelessScope):
    """Runs a function once for real: every assignment to a Keras variable happens, once, when the context ends.

    Attributes:
        losses: what `add_loss` was given inside; it belongs to the caller now.
    """

    def __init__(self):
        super().__init__(collect_losses=True)
        self._before = {}
        self._assigned = {}
        self._context = _keras_context()
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._names = _VariableNames()

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        if value is not None:
            return _as_read(variable, value)
        if self.original_scope is not None:
            return self.original_scope.get_current_value(variable)
        if variable._value is None:  # built inside: a variable must exist before it is read
            with _keras_attribute("stateless_scope", None):
                initialize_all_variables()
        return None

    def add_update(self, update):
        variable, value = update
        if not tf.executing_eagerly() and value.graph is not self._graph:
            raise ValueError(
                f"The recomputed function changes the variable {variable.path!r} inside a loop or a branch, where its "
                "earlier values cannot be kept for the recomputation. Wrap the body of the loop with `recompute` instead."
            )
        if id(variable) not in self._before:
            current = self.get_current_value(variable)
            self._before[id(variable)] = tf.identity(variable._value) if current is None else current
        self._assigned[id(variable)] = variable
        super().add_update(update)

    def __exit__(self, *exception):
        super().__exit__(*exception)
        if exception[0] is None:
            for variable in self._assigned.values():
                variable.assign(self.state_mapping[id(variable)])

    def second_run(self):
        """A context in which the function finds Keras as it was at the start of this run, and changes nothing."""
        return _second_run(self._context, self._graph, self._names, SecondRun(self._before, self.original_scope))


class SecondRun(keras.StatelessScope):
    """Keras variables as they were before the first run. Assignments inside are forgotten when the context ends."""

    def __init__(self, before, outer):
        super().__init__(collect_losses=True)
        self.state_mapping = dict(before)
        self._outer = outer

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        if value is not None:
            return _as_read(variable, value)
        return None if self._outer is None else self._outer.get_current_value(variable)


def _as_read(variable, value):
    """`value`, which stands for a variable's, with a gradient that goes to the variable, as that of a read does.

    A weight that is assigned in a call and read after that (as `SpectralNormalization` does) so has its gradient.
    """
    if not variable.trainable or variable._value is None:
        return value
    [value] = attach_gradient([tf.stop_gradient(value)], [tf.convert_to_tensor(variable._value)], lambda dy: [dy])
    return value


class _VariableNames:
    """Where `tf.compat.v1.get_variable` stood in naming variables, so that a second run is given those of the first."""

    def __init__(self):
        self._scope = None
        if not tf.compat.v1.executing_eagerly_outside_functions():
            self._scope = tf.compat.v1.get_variable_scope()
            self._counts = dict(variable_scope.get_variable_scope_store().variable_scopes_count)

    @contextlib.contextmanager
    def again(self):
        if self._scope is None:
            yield
            return
        store = variable_scope.get_variable_scope_store()
        with tf.compat.v1.variable_scope(self._scope, reuse=True, auxiliary_name_scope=False):
            now, store.variable_scopes_count = store.variable_scopes_count, self._counts.copy()
            try:
                yield
            finally:
                store.variable_scopes_count = now


@contextlib.contextmanager
def _second_run(context, first_graph, names, scope):
    with contextlib.ExitStack() as stack:
        stack.enter_context(_captures_through(first_graph))
        stack.enter_context(names.again())
        for name, value in context.items():
            stack.enter_context(_keras_attribute(name, value))
        yield stack.enter_context(scope)


def _keras_context():
    """What a layer inherits from the layers around it: the training flag (as it stands now) and the autocast dtype.

    Where nothing is around, an empty call context stands in, so that a layer that runs again does not take itself for the
    outermost one and clear the losses of the first run.
    """
    call = global_state.get_global_attribute("current_call_ctx")
    call = CallContext(entry_layer=None) if call is None else copy.copy(call)
    return {"current_call_ctx": call, "autocast_scope": global_state.get_global_attribute("autocast_scope")}


@contextlib.contextmanager
def _captures_through(first_graph):
    """Lets the gradient of a loop's body or a branch read what is outside of both: by what the body or branch captured.

    TensorFlow builds that gradient in a graph of its own, which can take in tensors of the body's graph, but not variables, or
    tensors made eagerly, from outside ("which captures ... is in list of captures but has no output"; "Tensor.graph is
    undefined when eager execution is enabled").
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if graph is first_graph or not isinstance(first_graph, (WhileBodyFuncGraph, CondBranchFuncGraph)):
        yield
        return
    capture = graph.capture

    def capture_through(tensor, *args, **kwargs):
        inside = _captured_by(first_graph, tensor)
        if inside is None:
            return capture(tensor, *args, **kwargs)
        captured = capture(inside)
        captured._record_tape(tensor)
        return captured

    graph.capture = capture_through
    try:
        yield
    finally:
        del graph.capture


def _captured_by(graph, tensor):
    """What `graph` took in `tensor` as, by itself or by way of the graphs around it; `None` if it did not."""
    captures = {id(outside): inside for outside, inside in getattr(graph, "captures", ())}
    if id(tensor) in captures:
        return captures[id(tensor)]
    outer = getattr(graph, "outer_graph", None)
    return None if outer is None else captures.get(id(_captured_by(outer, tensor)))


@contextlib.contextmanager
def _keras_attribute(name, value):
    previous = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        global_state.set_global_attribute(name, previous)
