"""One layer of a dense block: the composite function H of the paper (arXiv:1608.06993, section 3), and its weights."""

import keras

BOTTLENECK_WIDTH = 4  # a bottleneck is this many times the growth rate wide (section 3, "Bottleneck layers")


def he_fan_out():
    """He initialisation by the number of outputs, as the paper's code (`fb.resnet.torch`) has it."""
    return keras.initializers.VarianceScaling(2.0, mode="fan_out", distribution="untruncated_normal")


@keras.saving.register_keras_serializable("densenets")
class DenseLayer(keras.Layer):
    """Makes `growth_rate` new features from all earlier ones: BN-ReLU-conv1x1-BN-ReLU-conv3x3, or BN-ReLU-conv3x3.

    Calling it runs both halves on a tensor, or on a list of tensors that belong together. The strategies of `DenseBlock` call
    the halves: `narrow`, from all earlier features down to a few channels, and `grow`, from those to the new features.

    Args:
        growth_rate: the number of new features, k.
        bottleneck: whether a 1x1 convolution to 4k channels comes first (DenseNet-B).
        dropout_rate: the share of values dropped after each convolution.
        epsilon, momentum: of the batch norms.
    """

    def __init__(self, growth_rate, *, bottleneck=True, dropout_rate=0.0, epsilon=1e-5, momentum=0.9, **kwargs):
        super().__init__(**kwargs)
        self.growth_rate = growth_rate
        self.bottleneck = bottleneck
        self.dropout_rate = dropout_rate
        self.epsilon = epsilon
        self.momentum = momentum
        widths = [(BOTTLENECK_WIDTH * growth_rate, 1), (growth_rate, 3)] if bottleneck else [(growth_rate, 3)]
        self.norms, self.convs, self.dropouts = [], [], []
        for i, (channels, size) in enumerate(widths):
            norm = {"epsilon": epsilon, "momentum": momentum, "dtype": self.dtype_policy, "name": f"{i}_bn"}
            conv = {"padding": "same", "use_bias": False, "dtype": self.dtype_policy, "name": f"{i + 1}_conv"}
            self.norms.append(keras.layers.BatchNormalization(**norm))
            self.convs.append(keras.layers.Conv2D(channels, size, kernel_initializer=he_fan_out(), **conv))
            if dropout_rate:
                self.dropouts.append(keras.layers.Dropout(dropout_rate, dtype=self.dtype_policy, name=f"{i + 1}_dropout"))

    def build(self, input_shape):
        shape = self._concatenated(input_shape)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            norm.build(shape)
            conv.build(shape)
            shape = (*shape[:-1], conv.filters)
        for dropout in self.dropouts:
            dropout.build(shape)

    def narrow(self, *features, training):
        """Concatenates `features` [N, H, W, c_i] and takes them through the first BN-ReLU-convolution."""
        x = keras.ops.concatenate(features, axis=-1) if len(features) > 1 else features[0]
        return self._norm_relu_conv(0, x, training)

    def grow(self, narrowed, training):
        """The new features [N, H, W, k] from what `narrow` returned."""
        x = self._drop(0, narrowed, training)
        return self._drop(1, self._norm_relu_conv(1, x, training), training) if self.bottleneck else x

    def call(self, x, training=False):
        features = x if isinstance(x, (list, tuple)) else [x]
        return self.grow(self.narrow(*features, training=training), training=training)

    def _norm_relu_conv(self, i, x, training):
        return self.convs[i](keras.ops.relu(self.norms[i](x, training=training)))

    def _drop(self, i, x, training):
        return self.dropouts[i](x, training=training) if self.dropouts else x

    def compute_output_shape(self, input_shape):
        return (*self._concatenated(input_shape)[:-1], self.growth_rate)

    @staticmethod
    def _concatenated(input_shape):
        if not isinstance(input_shape[0], (list, tuple)):
            return tuple(input_shape)
        return (*input_shape[0][:-1], sum(shape[-1] for shape in input_shape))

    def get_config(self):
        return super().get_config() | {
            "growth_rate": self.growth_rate,
            "bottleneck": self.bottleneck,
            "dropout_rate": self.dropout_rate,
            "epsilon": self.epsilon,
            "momentum": self.momentum,
        }
