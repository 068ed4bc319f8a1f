"""What TensorFlow and Keras know but do not export: the only file that reaches into their private modules.

Three things that a recomputation needs stand here, each a small context:

- `ordering`: "run this after that", said so that the executor (control dependencies) or XLA (data dependencies) obeys;
- `OpWatch`: which outside tensors a function used, and whether it drew random numbers that cannot be drawn again;
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
from tensorflow.python.client import device_lib
from tensorflow.python.eager import record
from tensorflow.python.framework import op_callbacks
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph

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


def stop_recording():
    """A context in which no gradient tape of this thread records."""
    return record.stop_recording()


OUTSIDE = ("Placeholder", "PlaceholderWithDefault", "Const")  # what a graph makes of a tensor from outside of it


class OpWatch:
    """A context that sees every operation run (eagerly) or made (in a graph) in this thread.

    Attributes:
        unreplayable: the type of the first stateful random operation seen, or `None`.
    """

    def __init__(self, inputs):
        self.unreplayable = None
        self._known = {tensor._id for tensor in inputs}
        self._outside = {}
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def __enter__(self):
        op_callbacks.add_op_callback(self._see)
        return self

    def __exit__(self, *exception):
        op_callbacks.remove_op_callback(self._see)

    def _see(self, op_type, inputs, attrs, outputs, op_name=None, graph=None):
        op_type = tf.compat.as_str(op_type)
        if op_type == "RngReadAndSkip" or "seed2" in map(tf.compat.as_str, (attrs or ())[::2]):
            self.unreplayable = self.unreplayable or op_type
        if graph is not self._graph:
            return outputs  # the body of a loop or branch: what it takes from outside is an input of the loop's own operation
        for tensor in inputs:
            if tensor._id not in self._known and (tensor.dtype.is_floating or tensor.dtype.is_complex):
                self._outside[tensor._id] = tensor
        if op_type not in OUTSIDE:
            self._known.update(tensor._id for tensor in outputs)
        return outputs  # `None` would reach the callback of an enclosing recomputation in their place

    def captured(self):
        """Differentiable tensors that the function took from outside its arguments and that a gradient may be asked of."""
        tensors = self._outside.values()
        if self._graph is not None and any(tensor.op.type in OUTSIDE for tensor in tensors):
            for outside, inside in getattr(self._graph, "captures", ()):
                if inside._id in self._outside:
                    self._graph.capture(outside)  # was unrecorded when the function did it; now tapes learn of it
        # In a graph of TensorFlow 1 there is no tape to ask, and any tensor but a constant may be differentiated by.
        return [
            tensor
            for tensor in tensors
            if (self._graph is not None and tensor.op.type != "Const") or record.should_record_backprop([tensor])
        ]


def attach_gradient(results, sources, gradients):
    """The tensors `results`, whose gradient with respect to `sources` is what `gradients(*upstream)` returns, and no other.

    Args:
        results: a flat list of tensors, computed unrecorded.
        sources: a flat list of tensors.
        gradients: takes an upstream gradient, perhaps `None`, for each result; returns one, or `None`, for each source.
    """

    # The results are inputs too: `custom_gradient` searches the graph behind its results for variables, and so ends there.
    @tf.custom_gradient
    def attached(*tensors):
        def grad(*upstream, variables=None):
            flat = [None] * len(results) + gradients(*upstream)
            return flat if variables is None else (flat, [None] * len(variables))

        return list(tensors[: len(results)]), grad

    return attached(*results, *sources)


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

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        if value is not None:
            return value
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
        return _second_run(self._context, self._graph, SecondRun(self._before, self.original_scope))


class SecondRun(keras.StatelessScope):
    """Keras variables as they were before the first run. Assignments inside are forgotten when the context ends."""

    def __init__(self, before, outer):
        super().__init__(collect_losses=True)
        self.state_mapping = dict(before)
        self._outer = outer

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        return self._outer.get_current_value(variable) if value is None and self._outer is not None else value


@contextlib.contextmanager
def _second_run(context, first_graph, scope):
    with contextlib.ExitStack() as stack:
        stack.enter_context(_resources_through(first_graph))
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
def _resources_through(first_graph):
    """Lets the gradient of a loop's body read variables: by the handles that the body captured.

    TensorFlow builds that gradient in a graph of its own, which can take in tensors of the body's graph, but not (with
    "Tensor ... which captures ... is in list of captures but has no output") handles from outside of both.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if graph is first_graph or not isinstance(first_graph, WhileBodyFuncGraph) or not hasattr(graph, "capture"):
        yield
        return
    handles = {id(outside): inside for outside, inside in first_graph.captures if outside.dtype == tf.resource}
    capture = graph.capture

    def capture_through(tensor, *args, **kwargs):
        if id(tensor) not in handles:
            return capture(tensor, *args, **kwargs)
        captured = capture(handles[id(tensor)])
        captured._record_tape(tensor)
        return captured

    graph.capture = capture_through
    try:
        yield
    finally:
        del graph.capture


@contextlib.contextmanager
def _keras_attribute(name, value):
    previous = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        global_state.set_global_attribute(name, previous)
