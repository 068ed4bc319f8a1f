import keras
import numpy as np
import pytest
import tensorflow as tf

from densenets.optimizer import TorchSGD


def test_follows_torchs_update_rule_through_a_change_of_learning_rate(float64):
    rng = np.random.default_rng(0)
    weight, velocity = rng.normal(size=5), np.zeros(5)
    variable = keras.Variable(weight)
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.125, 0.015625])
    optimizer = TorchSGD(schedule, momentum=0.9, weight_decay=0.05)
    for step in range(7):
        gradient = rng.normal(size=5)
        optimizer.apply([tf.constant(gradient)], [variable])
        # torch.optim.SGD(nesterov=True, dampening=0), written out
        decayed = gradient + 0.05 * weight
        velocity = 0.9 * velocity + decayed
        weight = weight - (0.125 if step <= 3 else 0.015625) * (decayed + 0.9 * velocity)
        np.testing.assert_allclose(variable.numpy(), weight, rtol=1e-12)


def test_agrees_with_torch_itself(float64):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    rng = np.random.default_rng(0)
    start = rng.normal(size=5)
    ours, theirs = keras.Variable(start), torch.nn.Parameter(torch.tensor(start))
    optimizer = TorchSGD(0.125, momentum=0.9, weight_decay=0.05)
    torch_optimizer = torch.optim.SGD([theirs], lr=0.125, momentum=0.9, weight_decay=0.05, nesterov=True)
    for _ in range(5):
        gradient = rng.normal(size=5)
        optimizer.apply([tf.constant(gradient)], [ours])
        theirs.grad = torch.tensor(gradient)
        torch_optimizer.step()
        np.testing.assert_allclose(ours.numpy(), theirs.detach().numpy(), rtol=1e-12)


def test_config_round_trip():
    optimizer = TorchSGD(0.2, momentum=0.8, weight_decay=1e-3)
    loaded = TorchSGD.from_config(optimizer.get_config())
    assert loaded.get_config() == optimizer.get_config()
