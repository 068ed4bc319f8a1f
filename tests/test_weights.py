"""Checkpoints of Keras Applications and torchvision: the same outputs here, and a clear error for whatever does not fit."""

import functools

import h5py
import keras
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf
from helpers import images, relative_error

import densenets
from densenets import weights

NAMES = ["DenseNet121", "DenseNet169", "DenseNet201"]


def randomised(model, seed=0):
    """`model` with random weights everywhere, moving averages too; variances stay positive, activations moderate."""
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        noise = rng.normal(size=variable.shape)
        fan_in = np.prod(variable.shape[:-1]) if len(variable.shape) > 1 else 1
        positive = variable.name in ("gamma", "moving_variance")
        variable.assign(np.exp(0.1 * noise) if positive else noise * (2 / fan_in) ** 0.5 if fan_in > 1 else 0.1 * noise)
    return model


def small(**kwargs):
    return densenets.DenseNet((2, 2), 4, **({"input_shape": (32, 32, 3), "classes": 3} | kwargs))


def outputs(model, size=64):
    x = images(4, size, dtype=model.dtype)
    return [model(x, training=False), model(x, training=True)]


def keras_application(name, dtype, include_top=True):
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    return _keras_application(name, dtype, include_top)


@functools.cache
def _keras_application(name, dtype, include_top):
    build = getattr(keras.applications, name)
    return randomised(build(weights=None, input_shape=(64, 64, 3), include_top=include_top, classes=7))


# === Keras Applications ===


@pytest.mark.parametrize("ending", [".h5", ".weights.h5", ".keras"])
@pytest.mark.parametrize("include_top", [True, False])
def test_files_of_keras_applications_give_the_same_outputs_in_float64(tmp_path, ending, include_top):
    theirs = keras_application("DenseNet121", "float64", include_top)
    path = tmp_path / f"theirs{ending}"
    theirs.save_weights(path) if ending == ".weights.h5" else theirs.save(path)
    ours = densenets.DenseNet121(weights=path, input_shape=(64, 64, 3), include_top=include_top, classes=7)
    assert relative_error(ours.predict(images(2, 64), verbose=0), theirs.predict(images(2, 64), verbose=0)) < 1e-12
    before = theirs.get_weights()
    assert relative_error(outputs(ours), outputs(theirs)) < 1e-12
    theirs.set_weights(before)  # the training mode moved the averages of a model that other tests use


@pytest.mark.parametrize("name", NAMES)
def test_every_network_of_keras_applications_gives_the_same_outputs_in_float32(tmp_path, name):
    theirs = keras_application(name, "float32")
    theirs.save(tmp_path / "theirs.h5")
    ours = getattr(densenets, name)(weights=tmp_path / "theirs.h5", input_shape=(64, 64, 3), classes=7)
    assert ours.count_params() == theirs.count_params()
    before = theirs.get_weights()
    assert relative_error(outputs(ours), outputs(theirs)) < 1e-5
    theirs.set_weights(before)


def test_weights_go_back_to_keras_applications(tmp_path):
    ours = randomised(densenets.DenseNet121(weights=None, input_shape=(64, 64, 3), classes=7))
    weights.save(ours, tmp_path / "ours.h5")
    theirs = keras.applications.DenseNet121(weights=None, input_shape=(64, 64, 3), classes=7)
    theirs.load_weights(tmp_path / "ours.h5")
    assert relative_error(outputs(theirs)[0], outputs(ours)[0]) < 1e-3  # but for their epsilon
    assert not list(tmp_path.glob("partial*"))


# === torchvision and timm ===


def torch_outputs(network, size=64):
    import torch

    x = torch.from_numpy(np.array(images(4, size)).transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        return [network.double().train(training)(x).numpy() for training in (False, True)]


@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_state_dicts_give_the_same_outputs_in_float64(tmp_path, float64, library, ending):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")
    source = pytest.importorskip(library)
    if library == "timm":
        network = source.create_model("densenet121", num_classes=7)
    else:
        network = source.models.densenet121(num_classes=7)
    torch.manual_seed(0)
    for name, tensor in network.state_dict().items():
        if "running_var" in name:
            tensor.copy_(torch.exp(0.1 * torch.randn_like(tensor)))
        elif tensor.ndim == 1:
            tensor.add_(0.1 * torch.randn_like(tensor))
    state = {name: tensor.double() for name, tensor in network.state_dict().items()}
    path = tmp_path / f"theirs{ending}"
    if ending == ".pth":
        torch.save(state, path)
    else:
        import safetensors.torch

        safetensors.torch.save_file(state, path)
    ours = densenets.DenseNet121(weights=path, input_shape=(64, 64, 3), classes=7, classifier_activation=None)
    assert relative_error([np.asarray(y) for y in outputs(ours)], torch_outputs(network)) < 1e-12

    weights.save(ours, tmp_path / "ours.safetensors")
    import safetensors.torch

    missing, surplus = network.load_state_dict(safetensors.torch.load_file(tmp_path / "ours.safetensors"), strict=False)
    assert surplus == []
    assert all(name.endswith("num_batches_tracked") for name in missing)


def torch_names(model, dotted=False):
    """The model's arrays as a state dict of torchvision, the names spelled out here once more."""
    found = {}
    roles = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}

    def add(module, layer):
        for v in layer.weights:
            array = v.numpy()
            axes = {1: (0,), 2: (1, 0), 4: (3, 2, 0, 1)}[array.ndim]
            found[f"{module}.{roles.get(v.name, {'kernel': 'weight'}.get(v.name, v.name))}"] = array.transpose(axes)

    add("features.conv0", model.get_layer("conv1").conv)
    add("features.norm0", model.get_layer("conv1").norm)
    for b in (1, 2):
        for number, dense_layer in enumerate(model.get_layer(f"conv{b + 1}").dense_layers, start=1):
            for i in (1, 2):
                prefix, dot = f"features.denseblock{b}.denselayer{number}.", "." if dotted else ""
                add(f"{prefix}norm{dot}{i}", dense_layer.norms[i - 1])
                add(f"{prefix}conv{dot}{i}", dense_layer.convs[i - 1])
    add("features.transition1.norm", model.get_layer("pool2").norm)
    add("features.transition1.conv", model.get_layer("pool2").conv)
    add("features.norm5", model.get_layer("bn"))
    add("classifier", model.get_layer("predictions"))
    return found | {"features.norm5.num_batches_tracked": np.array(3)}


@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("ending", [None, ".npz", ".safetensors"])
def test_names_of_torchvision_are_known(tmp_path, dotted, ending):
    model, other = randomised(small()), small()
    source = torch_names(model, dotted)
    if ending == ".npz":
        np.savez(source_path := tmp_path / "state.npz", **source)
        source = source_path
    elif ending == ".safetensors":
        safetensors.numpy.save_file({k: np.ascontiguousarray(v) for k, v in source.items()}, tmp_path / "state.safetensors")
        source = tmp_path / "state.safetensors"
    assert weights.load(other, source) == "torchvision"
    assert relative_error(other.get_weights(), model.get_weights()) == 0


# === This package's own ===


@pytest.mark.parametrize("ending", [".weights.h5", ".keras", ".npz", ".safetensors", ".h5"])
@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_own_files_go_from_one_strategy_to_another(tmp_path, ending, stem):
    model = randomised(small(stem=stem, memory="naive"))
    other = small(stem=stem, memory="shared")
    path = tmp_path / f"model{ending}"
    if ending in (".weights.h5", ".keras"):
        (model.save_weights if ending == ".weights.h5" else model.save)(path)
        expected = "densenets"
    else:
        weights.save(model, path)
        expected = "torchvision" if ending == ".safetensors" else "keras_applications"
    assert weights.load(other, path) == expected
    assert relative_error(other.get_weights(), model.get_weights()) == 0


def test_a_classifier_is_left_out_for_a_model_without_one(tmp_path):
    model = randomised(small())
    weights.save(model, tmp_path / "model.npz")
    other = small(include_top=False)
    weights.load(other, tmp_path / "model.npz")
    assert relative_error(other.get_weights(), model.get_weights()[:-2]) == 0


def test_a_model_that_was_used_already_takes_on_the_epsilon(tmp_path, float64):
    model, other = randomised(small()), small()
    other.compile("sgd", "sparse_categorical_crossentropy")
    x = images(2, 32)
    other.predict(x, verbose=0)
    weights.save(model, tmp_path / "model.h5")
    weights.load(other, tmp_path / "model.h5")
    expected = small()
    weights.load(expected, tmp_path / "model.h5")
    assert relative_error(other.predict(x, verbose=0), expected(x)) < 1e-12
    assert other.get_layer("conv2").get_config()["epsilon"] == 1.001e-5
    other.save(tmp_path / "model.keras")
    assert relative_error(keras.models.load_model(tmp_path / "model.keras")(x), expected(x)) < 1e-12


# === What does not fit ===


def wrong_variant(path):
    weights.save(densenets.DenseNet((2, 3), 4, input_shape=(32, 32, 3), classes=3), path)


def wrong_growth_rate(path):
    weights.save(densenets.DenseNet((2, 2), 5, input_shape=(32, 32, 3), classes=3), path)


def wrong_classes(path):
    weights.save(small(classes=4), path)


def one_missing(path):
    arrays = {name: v.numpy() for name, v in weights._variables(small()).items()}
    del arrays["conv3_block2_1_bn/beta"]
    np.savez(path, **arrays)


def cut_off(path):
    weights.save(small(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def not_weights(path):
    path.write_text("not weights")


CASES = [
    (wrong_variant, ".npz", r"surplus: conv3_block3_0_bn/gamma; .*; \.\.\."),
    (wrong_variant, ".h5", r"surplus: "),
    (wrong_variant, ".safetensors", r"surplus: features.denseblock2.denselayer3.conv1.weight; "),
    (wrong_growth_rate, ".npz", r"of another shape: conv1_conv/kernel \(7, 7, 3, 10\) instead of \(7, 7, 3, 8\); "),
    (wrong_growth_rate, ".h5", r"of another shape: conv1_conv/kernel \(7, 7, 3, 10\) instead of \(7, 7, 3, 8\); "),
    (wrong_classes, ".npz", r"2 of another shape: predictions/kernel \(16, 4\) instead of \(16, 3\); predictions/bias"),
    (one_missing, ".npz", r"1 missing: conv3_block2_1_bn/beta\.$"),
    *[(cut_off, ending, "cannot be read as a") for ending in (".npz", ".h5", ".safetensors")],
    *[(not_weights, ending, "cannot be read as a") for ending in (".npz", ".h5", ".safetensors", ".keras", ".weights.h5")],
]


@pytest.mark.parametrize(("write", "ending", "message"), CASES)
def test_what_does_not_fit_is_told_and_leaves_the_model_untouched(tmp_path, write, ending, message):
    path = tmp_path / f"wrong{ending}"
    write(path)
    model = randomised(small())
    before = model.get_weights()
    with pytest.raises(weights.WeightsError, match=message):
        weights.load(model, path)
    assert relative_error(model.get_weights(), before) == 0
    assert model.get_layer("conv2").epsilon == 1e-5


@pytest.mark.parametrize("ending", [".weights.h5", ".keras"])
def test_own_files_of_another_variant_are_told(tmp_path, ending):
    path = tmp_path / f"other{ending}"
    other = densenets.DenseNet((2, 3), 4, input_shape=(32, 32, 3), classes=3)
    (other.save_weights if ending == ".weights.h5" else other.save)(path)
    with pytest.raises(weights.WeightsError, match="surplus: layers/dense_block_1/dense_layers/dense_layer_2/"):
        weights.load(small(), path)


def test_torch_files_execute_no_code(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    torch.save({"features.conv0.weight": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(weights.WeightsError, match="cannot be read"):
        weights.load(small(), tmp_path / "evil.pth")
    assert not (tmp_path / "executed").exists()


def test_paths_and_models_that_cannot_be_meant():
    with pytest.raises(weights.WeightsError, match="There is no file of weights /nowhere.h5"):
        weights.load(small(), "/nowhere.h5")
    with pytest.raises(weights.WeightsError, match=r"must end in \.h5, .*; got weights.txt"):
        weights.load(small(), "weights.txt")
    with pytest.raises(weights.WeightsError, match="`path` must end in .h5, .safetensors, .npz and not in .weights.h5"):
        weights.save(small(), "model.weights.h5")
    with pytest.raises(weights.WeightsError, match="`model` must have dense blocks among its layers"):
        weights.load(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), "weights.h5")


# === ImageNet ===


def test_imagenet_weights_are_fetched_by_name_and_hash(tmp_path, monkeypatch):
    """Keras' own table of addresses and hashes is the judge of ours; nothing is downloaded."""
    asked = {}

    class Asked(BaseException):
        pass

    def get_file(name, origin=None, cache_subdir=None, file_hash=None, **kwargs):
        asked[name] = (origin, file_hash)
        raise Asked

    from keras.src.utils import file_utils

    monkeypatch.setattr(file_utils, "get_file", get_file)
    for name in NAMES:
        for include_top in (True, False):
            with pytest.raises(Asked):
                getattr(keras.applications, name)(weights="imagenet", include_top=include_top)
    expected = dict(asked)
    asked.clear()
    monkeypatch.setattr(keras.utils, "get_file", get_file)
    for name in NAMES:
        for include_top in (True, False):
            with pytest.raises(Asked):
                getattr(densenets, name)(weights="imagenet", include_top=include_top)
    assert len(expected) == 6
    assert asked == expected


def test_imagenet_weights_that_cannot_be_had_are_told(monkeypatch):
    def get_file(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(keras.utils, "get_file", get_file)
    with pytest.raises(weights.WeightsError, match="could not be downloaded from https://.*no network.*`weights=` its path"):
        densenets.DenseNet121(weights="imagenet")
    with pytest.raises(ValueError, match="`weights='imagenet'` is published for DenseNet-121, 169 and 201 only"):
        densenets.DenseNet264(weights="imagenet")
    with pytest.raises(ValueError, match="`classes` must be 1000 with `weights='imagenet'` and `include_top`; got 10"):
        densenets.DenseNet121(weights="imagenet", classes=10)
    with pytest.raises(ValueError, match="3 channels"):
        densenets.DenseNet121(weights="imagenet", include_top=False, input_shape=(64, 64, 1))


def test_preprocessing_is_that_of_keras_applications():
    x = tf.cast(images(1, 4), "float32") * 50 + 128
    assert relative_error(densenets.preprocess_input(x), keras.applications.densenet.preprocess_input(x)) == 0
    assert densenets.decode_predictions is keras.applications.densenet.decode_predictions


def test_names_in_an_h5_may_be_bytes_with_slashes_as_the_published_files_have_them(tmp_path):
    model, other = randomised(small()), small()
    weights.save(model, tmp_path / "model.h5")
    with h5py.File(tmp_path / "model.h5") as new, h5py.File(tmp_path / "old.h5", "w") as old:
        names = [name.replace("conv1_", "conv1/").replace("predictions", "fc1000") for name in new.attrs["layer_names"]]
        old.attrs["layer_names"] = [name.encode() for name in names]
        for name, group in zip(names, (new[name] for name in new.attrs["layer_names"]), strict=True):
            roles = [path.split("/")[1] for path in group.attrs["weight_names"]]
            written = old.create_group(name)
            written.attrs["weight_names"] = [f"{name}/{role}:0".encode() for role in roles]
            for role, path in zip(roles, group.attrs["weight_names"], strict=True):
                written[f"{name}/{role}:0"] = np.asarray(group[path])
    assert weights.load(other, tmp_path / "old.h5") == "keras_applications"
    assert relative_error(other.get_weights(), model.get_weights()) == 0


def test_h5_holds_what_keras_looks_for(tmp_path):
    weights.save(small(), tmp_path / "model.h5")
    with h5py.File(tmp_path / "model.h5") as h5:
        assert list(h5.attrs["layer_names"][:3]) == ["conv1_conv", "conv1_bn", "conv2_block1_0_bn"]
