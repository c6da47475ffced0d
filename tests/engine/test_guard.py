"""A lent model comes back unchanged, whatever happened to it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from arc_cl.engine.guard import lent


def spoil(model: nn.Sequential) -> None:
    model.train()
    model[1].eval()
    model.requires_grad_(False)
    model(torch.randn(4, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
            parameter.grad = torch.ones_like(parameter)
    random.random()


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_restored(fails: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.eval()
    model[0].bias.requires_grad_(False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    cpu, python = torch.get_rng_state(), random.getstate()
    try:
        with lent(model):
            spoil(model)
            if fails:
                raise KeyError("on purpose")
    except KeyError:
        assert fails
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert [part.training for part in model.modules()] == [False] * 3
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), cpu)
    assert random.getstate() == python
