"""The Adam class that each part of Megatron-Core takes."""

import pytest
import torch

from megatron_rl.backend import optimizer

import megatron.core.optimizer as megatron_optimizer  # isort: skip
from megatron.core.optimizer import distrib_optimizer  # isort: skip


class FusedAdam(torch.optim.Optimizer):
    """Stands for a package's fused Adam, which is none of torch's classes."""


@pytest.mark.parametrize("installed", [("apex",), ("transformer_engine", "apex"), ("transformer_engine",)])
def test_both_of_megatrons_optimizers_take_the_chosen_adam(monkeypatch, installed):
    """Each of the two modules imports its own class, and the distributed optimizer asserts on the other's."""
    classes = {name: type(f"{name}Adam", (FusedAdam,), {}) for name in installed}
    monkeypatch.setattr(optimizer, "_adam_class", lambda name: classes.get(name))
    monkeypatch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", True)
    monkeypatch.setattr(megatron_optimizer, "Adam", classes[installed[0]])
    monkeypatch.setattr(distrib_optimizer, "Adam", classes[installed[0]])
    for name in installed:
        assert optimizer.choose_kernel(name) == name
        assert megatron_optimizer.Adam is distrib_optimizer.Adam is classes[name]
        assert not megatron_optimizer.USING_PYTORCH_OPTIMIZER
    assert optimizer.choose_kernel("auto") == installed[0]
