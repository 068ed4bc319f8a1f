"""The papers' optimizer: stochastic gradient descent by Torch's rule."""

import keras
import tensorflow as tf

from densenets import backend


@keras.saving.register_keras_serializable("densenets")
class TorchSGD(keras.optimizers.Optimizer):
    """Nesterov momentum without dampening, and weight decay coupled to the gradient, as `optim.sgd` of Torch has them.

        g <- gradient + weight_decay * w
        v <- momentum * v + g
        w <- w - learning_rate * (g + momentum * v)

    It differs from `keras.optimizers.SGD(nesterov=True, weight_decay=...)` in two ways that change training curves: Keras'
    decay is decoupled from the gradient and its momentum, and Keras' velocity contains the learning rate, so that a step of
    the schedule does not reach the momentum collected before it.

    Args:
        learning_rate: a number or a schedule.
        momentum: mu.
        weight_decay: added, times the weight, to every trainable weight's gradient, batch norms' included.
    """

    def __init__(self, learning_rate=0.1, momentum=0.9, weight_decay=1e-4, name="torch_sgd", **kwargs):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.momentum = momentum
        self.coupled_weight_decay = weight_decay

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.velocities = [self.add_variable_from_reference(v, name="velocity") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        learning_rate = keras.ops.cast(learning_rate, variable.dtype)
        gradient = keras.ops.cast(gradient, variable.dtype)
        velocity = self.velocities[self._get_variable_index(variable)]
        # Read after the gradient: a graph's executor would make both products at once, and hold them through the whole step.
        w, v = (backend.after(tf.convert_to_tensor(read), gradient) for read in (variable, velocity))
        gradient = gradient + self.coupled_weight_decay * w
        v = self.momentum * v + gradient
        self.assign(velocity, v)
        self.assign_sub(variable, learning_rate * (gradient + self.momentum * v))

    def get_config(self):
        return super().get_config() | {"momentum": self.momentum, "weight_decay": self.coupled_weight_decay}
