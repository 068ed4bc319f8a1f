import keras
import numpy as np
import pytest
from helpers import images, relative_error, training_step

import densenets
from densenets import zoo

# Trainable weights, as counted. The papers print them rounded, to the digits that `published` gives.
PARAMETERS = {
    "densenet_40_12": 1_019_722,
    "densenet_100_12": 6_979_642,
    "densenet_100_24": 27_249_082,
    "densenet_bc_100_12": 769_162,
    "densenet_bc_250_24": 15_324_406,
    "densenet_bc_190_40": 25_624_430,
    "wide_densenet_bc_40_36": 1_542_682,
    "wide_densenet_bc_40_48": 2_733_130,
    "wide_densenet_bc_40_60": 4_261_690,
    "densenet_121": 7_978_856,
    "densenet_169": 14_149_480,
    "densenet_201": 20_013_928,
    "densenet_264": 33_337_704,
    "densenet_161": 28_681_000,
    "densenet_232_48": 55_570_984,
    "densenet_264_48": 72_686_632,
    "cosine_densenet_264_32": 33_337_704,
    "cosine_densenet_264_48": 72_686_632,
}
# Multiply-adds for one image, as counted.
FLOPS = {
    "densenet_40_12": 264_812_928,
    "densenet_100_12": 1_769_516_448,
    "densenet_100_24": 6_889_347_744,
    "densenet_bc_100_12": 287_929_692,
    "densenet_bc_250_24": 5_418_785_724,
    "densenet_bc_190_40": 9_301_945_740,
    "wide_densenet_bc_40_36": 647_298_936,
    "wide_densenet_bc_40_48": 1_149_867_168,
    "wide_densenet_bc_40_60": 1_795_836_360,
    "densenet_121": 2_834_161_664,
    "densenet_169": 3_359_843_328,
    "densenet_201": 4_291_365_888,
    "densenet_264": 5_751_653_376,
    "densenet_161": 7_727_907_072,
    "densenet_232_48": 10_119_129_600,
    "densenet_264_48": 12_850_693_632,
    "cosine_densenet_264_32": 5_751_653_376,
    "cosine_densenet_264_48": 12_850_693_632,
}


def rounded(value, like):
    """`value` to as many digits as `like` is printed with."""
    return round(value, len(str(like).partition(".")[2]))


def test_every_published_variant_is_there():
    assert densenets.list_models() == list(PARAMETERS)
    assert densenets.list_models("*bc_???_*") == ["densenet_bc_100_12", "densenet_bc_250_24", "densenet_bc_190_40"]
    assert densenets.list_models("vit*") == []


@pytest.mark.parametrize("name", densenets.list_models())
def test_parameters_and_flops_equal_the_published_count(name):
    model = densenets.create_model(name)
    counted = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert counted == PARAMETERS[name]
    published = densenets.published(name)
    if published.parameters is not None:
        assert rounded(counted / 1e6, published.parameters) == published.parameters
    else:
        assert "does not print" in published.note
    assert densenets.count_flops(model) == FLOPS[name]
    if published.flops is not None:
        assert rounded(FLOPS[name] / 1e9, published.flops) == published.flops


@pytest.mark.parametrize("variant", ["DenseNet121", "DenseNet169", "DenseNet201"])
@pytest.mark.parametrize("include_top", [True, False])
def test_parameters_equal_keras_applications(variant, include_top):
    theirs = getattr(keras.applications, variant)(weights=None, include_top=include_top)
    assert getattr(densenets, variant)(weights=None, include_top=include_top).count_params() == theirs.count_params()


def test_create_model_takes_overrides():
    model = densenets.create_model("densenet_bc_100_12", depth=10, classes=3, memory="naive")
    assert model.output_shape == (None, 3)
    assert model.name == "densenet_bc_100_12"
    assert [layer.memory for layer in model.layers if hasattr(layer, "memory")] == ["naive"] * 3


@pytest.mark.parametrize("name", [name for name in densenets.list_models() if PARAMETERS[name] < 30e6])
def test_every_variant_has_the_gradients_of_plain_layers(name, float64):
    size = 96 if "blocks" in zoo.VARIANTS[name].arguments else 8  # enough pixels behind stride 32 for a variance
    arguments = {"input_shape": (size, size, 3), "classes": 10, "classifier_activation": None}
    results = []
    for memory in ("naive", "shared"):
        keras.utils.set_random_seed(0)
        model = densenets.create_model(name, memory=memory, **arguments)
        results.append((training_step(model, images(4, size), "eager"), model.get_weights()))
    assert relative_error(*results) < 1e-12
