import keras
import numpy as np
import pytest

import densenets

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
}


@pytest.mark.parametrize("name", densenets.list_models())
def test_parameters_equal_the_published_count(name):
    model = densenets.create_model(name)
    counted = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert counted == PARAMETERS[name]
    printed = densenets.published(name).parameters
    digits = len(str(printed).partition(".")[2])
    assert round(counted / 1e6, digits) == printed


@pytest.mark.parametrize("variant", ["DenseNet121", "DenseNet169", "DenseNet201"])
@pytest.mark.parametrize("include_top", [True, False])
def test_parameters_equal_keras_applications(variant, include_top):
    theirs = getattr(keras.applications, variant)(weights=None, include_top=include_top)
    assert getattr(densenets, variant)(include_top=include_top).count_params() == theirs.count_params()


def test_create_model_takes_overrides():
    model = densenets.create_model("densenet_bc_100_12", depth=10, classes=3, memory="naive")
    assert model.output_shape == (None, 3)
    assert model.name == "densenet_bc_100_12"
    assert [layer.memory for layer in model.layers if hasattr(layer, "memory")] == ["naive"] * 3
