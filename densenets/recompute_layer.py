"""`Recompute`: any Keras layer, recomputed in the backward pass."""

import inspect

import keras

from densenets.recompute import run


@keras.saving.register_keras_serializable("densenets")
class Recompute(keras.layers.Wrapper):
    """Wraps a layer, a `Sequential` or a Functional model so that only its inputs are kept for the backward pass.

    ```python
    x = densenets.layers.Recompute(keras.Sequential([...]))(x)
    ```

    The wrapped layer trains as it would alone: moving averages move once, dropout draws the same mask in both runs, its
    losses count once and have their gradients, metrics see each batch once. It saves to and loads from `.keras`. (This is what
    the reporter of tensorflow #36981 tried with `tf.recompute_grad`.)

    Args:
        layer: the layer.
        use_data_dep: as for `densenets.recompute`; `None` chooses by what is being traced.
    """

    def __init__(self, layer, *, use_data_dep=None, **kwargs):
        super().__init__(layer, **kwargs)
        self.use_data_dep = use_data_dep
        self.supports_masking = layer.supports_masking
        self._takes = inspect.signature(layer.call).parameters.keys() & {"training", "mask"}

    def call(self, inputs, *args, training=None, mask=None, **kwargs):
        kwargs |= self._taken(training=training, mask=mask)
        outputs, losses = run(self.layer, (inputs, *args), kwargs, self.use_data_dep)
        for loss in losses:
            self.add_loss(loss)
        return outputs

    def compute_output_spec(self, inputs, *args, training=None, mask=None, **kwargs):
        return self.layer.compute_output_spec(inputs, *args, **kwargs, **self._taken(training=training, mask=mask))

    def compute_mask(self, inputs, previous_mask):
        return self.layer.compute_mask(inputs, previous_mask)

    def _taken(self, **offered):
        return {name: value for name, value in offered.items() if name in self._takes}

    def get_config(self):
        return super().get_config() | {"use_data_dep": self.use_data_dep}
