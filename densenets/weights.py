"""Checkpoints in and out: Keras Applications', torchvision's and timm's, this package's own, and NumPy archives.

Between the layouts stand the names that Keras Applications gives its layers: `conv2_block1_1_conv/kernel` is the first
bottleneck of the first block. Every reader gives arrays by these names, and all are held against the model before any is
assigned, so that a file of another network leaves the model as it was.
"""

import os
import pathlib
import re
import tempfile
import zipfile
from collections.abc import Mapping
from typing import Any

import h5py
import keras
import numpy as np
import safetensors.numpy

from densenets import files
from densenets.dense_block import DenseBlock, Transition
from densenets.stem import Stem

HEAD = "predictions"
KINDS = {"conv": ("kernel",), "bn": ("gamma", "beta", "moving_mean", "moving_variance"), HEAD: ("kernel", "bias")}
EPSILON = {"keras_applications": 1.001e-5, "torchvision": 1e-5}  # of the batch norms that a layout's weights were trained with


class WeightsError(ValueError):
    """A source of weights that cannot be read, or that belongs to another network. The model is as it was."""


def load(model: keras.Model, source: str | os.PathLike | Mapping[str, Any]) -> str:
    """Loads weights into a model that `densenets` built.

    The layout is detected. Sources are

    - Keras Applications' files, with and without the classifier: `.h5`, `.weights.h5`, `.keras`;
    - torchvision's and timm's state dicts: `.safetensors`, or `.pth` where PyTorch is installed, whose loader is told to
      execute no code;
    - this package's `.weights.h5` and `.keras`, of a model with any `memory`;
    - NumPy archives (`.npz`) and mappings of arrays, by the names of Keras Applications' or of torchvision's layers.

    A model without a classifier leaves out the source's. The batch norms take on the epsilon that belongs to the weights,
    since results depend on it: Keras Applications' 1.001e-5, torchvision's 1e-5.

    Args:
        model: built by `densenets`.
        source: a path, or a mapping of names to arrays.

    Returns:
        The layout: `"keras_applications"`, `"torchvision"` or `"densenets"`.

    Raises:
        WeightsError: for a source that cannot be read, or that does not fit; the model is left untouched.
    """
    variables = _variables(model)
    layout, arrays = _by_name(source, variables) if hasattr(source, "keys") else _read(pathlib.Path(source), model, variables)
    if layout == "densenets":
        model.load_weights(source)  # compared already
        return layout
    if f"{HEAD}/kernel" not in variables:
        arrays = {name: array for name, array in arrays.items() if not name.startswith(f"{HEAD}/")}
    _compare(arrays, {name: variable.shape for name, variable in variables.items()}, source)
    for name, variable in variables.items():
        variable.assign(arrays[name])
    _set_epsilon(model, EPSILON[layout])
    return layout


def save(model: keras.Model, path: str | os.PathLike) -> None:
    """Writes the weights of a model that `densenets` built, in the layout that the path's ending says.

    - `.h5`: Keras Applications', for the `load_weights` of its networks;
    - `.safetensors`: torchvision's and timm's, for PyTorch's `safetensors.torch.load_file`;
    - `.npz`: a NumPy archive by the names of Keras Applications' layers.

    (`model.save_weights` and `model.save` write this package's own.)

    Raises:
        WeightsError: for another ending.
    """
    path = pathlib.Path(path)
    if path.suffix not in WRITERS or path.name.endswith(".weights.h5"):
        raise WeightsError(f"`path` must end in {', '.join(WRITERS)} and not in .weights.h5; got {path}.")
    arrays = {name: variable.numpy() for name, variable in _variables(model).items()}
    files.replace(path, lambda partial: WRITERS[path.suffix](arrays, partial))


# === ImageNet ===

ADDRESS = "https://storage.googleapis.com/tensorflow/keras-applications/densenet/"
# By the number of layers in each block: the network, and the MD5 of its file with and without the classifier.
PUBLISHED = {
    (6, 12, 24, 16): ("densenet121", "9d60b8095a5708f2dcce2bca79d332c7", "30ee3e1110167f948a6b9946edeeb738"),
    (6, 12, 32, 32): ("densenet169", "d699b8f76981ab1b30698df4c175e90b", "b8c4d4c20dd625c148057b9ff1c1176b"),
    (6, 12, 48, 32): ("densenet201", "1ceb130c1ea1b78c3bf6114dbdfd8807", "c13680b51ded0fb44dff2d8f86ac8bb1"),
}


def imagenet(design, include_top, input_shape, classes, classifier_activation):
    """The name and the hash of Keras Applications' file for a network.

    Args:
        design: (blocks, growth_rate, bottleneck, compression, stem) of the network.
        include_top: as for `densenets.DenseNet`.
        input_shape: as for `densenets.DenseNet`.
        classes: as for `densenets.DenseNet`.
        classifier_activation: as for `densenets.DenseNet`.

    Raises:
        ValueError: for a network that no file fits.
    """
    blocks, *rest = design
    if blocks not in PUBLISHED or rest != [32, True, 0.5, "imagenet"]:
        raise ValueError("`weights='imagenet'` is published for DenseNet-121, 169 and 201 only; use `None` or a path.")
    if input_shape[-1] != 3:
        raise ValueError(f"`input_shape` must have 3 channels with `weights='imagenet'`; got {input_shape[-1]}.")
    if include_top and classes != 1000:
        raise ValueError(f"`classes` must be 1000 with `weights='imagenet'` and `include_top`; got {classes}.")
    if include_top and classifier_activation not in (None, "softmax"):
        raise ValueError(
            "`classifier_activation` must be None or 'softmax' with `weights='imagenet'` and `include_top`; "
            f"got {classifier_activation!r}."
        )
    name, with_top, without = PUBLISHED[blocks]
    return (
        f"{name}_weights_tf_dim_ordering_tf_kernels{'' if include_top else '_notop'}.h5",
        with_top if include_top else without,
    )


def fetch(name, file_hash):
    """The path of a file that Keras Applications publishes, downloaded once.

    Raises:
        WeightsError: where it cannot be.
    """
    try:
        return keras.utils.get_file(name, ADDRESS + name, cache_subdir="models", file_hash=file_hash)
    except Exception as error:  # of the network, in whatever form it comes
        raise WeightsError(
            f"The weights could not be downloaded from {ADDRESS}{name} ({error}). Fetch the file where there is a network, "
            "and give `weights=` its path; or use `weights=None`."
        ) from error


# === The model's variables, by name ===


def _named_layers(model):
    """The layers with weights, in the network's order, each with the name that Keras Applications gives it."""
    for layer in model.layers:
        if isinstance(layer, Stem):
            yield f"{layer.name}_conv", layer.conv
            yield f"{layer.name}_bn", layer.norm
        elif isinstance(layer, DenseBlock):
            for dense_layer in layer.dense_layers:
                for i, (norm, conv) in enumerate(zip(dense_layer.norms, dense_layer.convs, strict=True)):
                    yield f"{layer.name}_{dense_layer.name}_{i}_bn", norm
                    yield f"{layer.name}_{dense_layer.name}_{i + 1}_conv", conv
        elif isinstance(layer, Transition):
            yield f"{layer.name}_bn", layer.norm
            yield f"{layer.name}_conv", layer.conv
        elif layer.weights:
            yield layer.name, layer


def _variables(model):
    if not any(isinstance(layer, DenseBlock) for layer in model.layers):
        raise WeightsError(f"`model` must have dense blocks among its layers, as densenets builds it; {model.name!r} has none.")
    return {f"{name}/{variable.name}": variable for name, layer in _named_layers(model) for variable in layer.weights}


def _set_epsilon(model, epsilon):
    owners = [layer for layer in model.layers if isinstance(layer, (Stem, DenseBlock, Transition))]
    owners += [dense_layer for layer in owners if isinstance(layer, DenseBlock) for dense_layer in layer.dense_layers]
    owners += [layer for _, layer in _named_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]
    if all(layer.epsilon == epsilon for layer in owners):
        return
    for layer in owners:
        layer.epsilon = epsilon
    # What `fit`, `evaluate` and `predict` have traced holds the old one.
    model.train_function = model.test_function = model.predict_function = None


# === Comparison ===

SHOWN = 3  # differences of a kind that a message lists


def _compare(found, wanted, source):
    """Raises for the first differences between the arrays found and the shapes wanted, both by name."""
    shapes = {name: tuple(array.shape) for name, array in found.items()}
    differences = {
        "of another shape": [f"{n} {shapes[n]} instead of {s}" for n, s in wanted.items() if shapes.get(n, s) != s],
        "missing": [name for name in wanted if name not in shapes],
        "surplus": [name for name in shapes if name not in wanted],
    }
    told = [
        f"{len(names)} {kind}: {'; '.join(names[:SHOWN])}{'; ...' if len(names) > SHOWN else ''}."
        for kind, names in differences.items()
        if names
    ]
    if told:
        what = "in the mapping" if hasattr(source, "keys") else f"in {source}"
        raise WeightsError(f"The weights {what} are of another network than the model. {' '.join(told)}")


# === Readers ===


def _read(path, model, variables):
    """The layout of a file, and its arrays by name."""
    readers = {
        ".h5": lambda: _read_h5(path, path, model, variables),
        ".keras": lambda: _read_keras(path, model, variables),
        ".safetensors": lambda: _by_name(_load_safetensors(path), variables),
        ".pth": lambda: _by_name(_load_torch(path), variables),
        ".npz": lambda: _by_name(_load_npz(path), variables),
    }
    if path.suffix not in readers:
        raise WeightsError(f"A file of weights must end in {', '.join(readers)}; got {path}.")
    if not path.is_file():
        raise WeightsError(f"There is no file of weights {path}.")
    try:
        return readers[path.suffix]()
    except WeightsError:
        raise
    except Exception as error:  # each library has its own for a file that is cut off, or is something else
        raise WeightsError(f"{path} cannot be read as a {path.suffix} file of weights: {error}") from error


def _load_npz(path):
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def _load_safetensors(path):
    return safetensors.numpy.load_file(path)


def _load_torch(path):
    try:
        import torch
    except ImportError as error:
        raise WeightsError(f"PyTorch must be installed to read {path}; or convert it to .safetensors.") from error
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    return {name: tensor.numpy() for name, tensor in loaded.get("state_dict", loaded).items()}


def _read_keras(path, model, variables):
    with zipfile.ZipFile(path) as archive, archive.open("model.weights.h5") as file:
        return _read_h5(file, path, model, variables)


def _read_h5(file, path, model, variables):
    with h5py.File(file) as h5:
        root = h5.get("model_weights", h5)
        if "layer_names" in root.attrs:  # as Keras 2 wrote it, and Keras Applications publishes it
            groups = [root[name] for name in root.attrs["layer_names"]]
            layers = [[np.asarray(group[name]) for name in group.attrs["weight_names"]] for group in groups]
            return "keras_applications", _by_order(layers, variables)
        arrays = _arrays_of_layers(h5)
    if any(name.startswith("layers/dense_block") for name in arrays):
        _compare(arrays, _own_shapes(model), path)
        return "densenets", arrays
    return "keras_applications", _by_order(_layers_of_keras3(arrays), variables)


def _arrays_of_layers(h5):
    """All arrays of a file that Keras 3 wrote, by their paths in it, without the optimizer's."""
    found = {}

    def visit(name, item):
        if isinstance(item, h5py.Dataset) and name.startswith("layers/"):
            found[name] = np.asarray(item)

    h5.visititems(visit)
    return found


def _own_shapes(model):
    """What the model's own file holds, by path."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_weights(path := os.path.join(directory, "own.weights.h5"))
        with h5py.File(path) as h5:
            return {name: array.shape for name, array in _arrays_of_layers(h5).items()}


def _layers_of_keras3(arrays):
    """The arrays of each layer of a plain model's file: Keras 3 numbers layers of a class in the model's order."""
    layers = {}
    for path, array in arrays.items():
        name, index = re.fullmatch(r"layers/(.*?)/vars/(\d+)", path).groups()
        layers.setdefault(name, {})[int(index)] = array
    number = lambda name: int(re.search(r"(?<=_)\d+$|$", name)[0] or 0)  # noqa: E731
    return [[array for _, array in sorted(layers[name].items())] for name in sorted(layers, key=number)]


def _by_order(layers, variables):
    """Arrays by name from those of layers in the network's order, which is how Keras Applications' files are told apart."""
    names = {kind: [n for n in dict.fromkeys(v.split("/")[0] for v in variables) if n.endswith(kind)] for kind in KINDS}
    found, seen = {}, dict.fromkeys(KINDS, 0)
    for arrays in filter(None, layers):
        kind = {4: "conv", 2: HEAD}.get(arrays[0].ndim, "bn")
        i, seen[kind] = seen[kind], seen[kind] + 1
        name = names[kind][i] if i < len(names[kind]) else HEAD if kind == HEAD else f"{kind} number {i + 1}"
        found |= {f"{name}/{role}": array for role, array in zip(KINDS[kind], arrays, strict=True)}
    return found


# === Names ===

TORCH_LAYERS = {"conv1_conv": "features.conv0", "conv1_bn": "features.norm0", "bn": "features.norm5", HEAD: "classifier"}
TORCH_ROLES = {
    "kernel": "weight",
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}


def _torch_name(name):
    """`conv2_block1_1_conv/kernel` as torchvision has it: `features.denseblock1.denselayer1.conv1.weight`."""
    layer, role = name.split("/")
    block, number, i, kind = re.fullmatch(r"(?:conv|pool)?(\d*)(?:_block(\d+)_(\d))?_?(\w*)", layer).groups()
    if layer in TORCH_LAYERS:
        module = TORCH_LAYERS[layer]
    elif number:
        unit = f"conv{i}" if kind == "conv" else f"norm{int(i) + 1}"
        module = f"features.denseblock{int(block) - 1}.denselayer{number}.{unit}"
    else:
        module = f"features.transition{int(block) - 1}.{'conv' if kind == 'conv' else 'norm'}"
    return f"{module}.{TORCH_ROLES[role]}"


def _by_name(arrays, variables):
    """The layout of arrays by name, and the same arrays by Keras Applications' names."""
    if not any(name.startswith(("features.", "classifier.")) for name in arrays):
        return "keras_applications", {name: np.asarray(array) for name, array in arrays.items()}
    names = {_torch_name(name): name for name in [*variables, f"{HEAD}/kernel", f"{HEAD}/bias"]}
    found = {}
    for name, array in arrays.items():
        name = re.sub(r"(norm|conv)\.(\d)\.", r"\1\2.", name)  # torchvision's first files have a dot before the number
        if not name.endswith(".num_batches_tracked"):
            array = np.asarray(array)
            found[names.get(name, name)] = array.transpose(FROM_TORCH[array.ndim])
    return "torchvision", found


FROM_TORCH = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}  # the axes of a layer's array: OIHW -> HWIO
TO_TORCH = {1: (0,), 2: (1, 0), 4: (3, 2, 0, 1)}


# === Writers ===


def _write_h5(arrays, path):
    layers = {}
    for name in arrays:
        layers.setdefault(name.split("/")[0], []).append(name)
    with h5py.File(path, "w") as h5:
        h5.attrs["layer_names"] = list(layers)
        h5.attrs["backend"], h5.attrs["keras_version"] = "tensorflow", keras.__version__
        for layer, names in layers.items():
            group = h5.create_group(layer)
            group.attrs["weight_names"] = names
            for name in names:
                group[name] = arrays[name]


def _write_safetensors(arrays, path):
    named = {_torch_name(name): np.ascontiguousarray(array.transpose(TO_TORCH[array.ndim])) for name, array in arrays.items()}
    safetensors.numpy.save_file(named, path)


WRITERS = {".h5": _write_h5, ".safetensors": _write_safetensors, ".npz": lambda arrays, path: np.savez(path, **arrays)}
