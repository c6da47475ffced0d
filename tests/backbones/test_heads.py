"""The growing head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from arc_cl.backbones.heads import feature_count, grow_linear
from arc_cl.errors import CompatibilityError


def fresh(features: int, classes: int, seed: int = 0, old: nn.Linear | None = None) -> nn.Linear:
    return grow_linear(old, features, classes, torch.Generator().manual_seed(seed))


def test_old_rows_are_kept_and_new_ones_are_drawn() -> None:
    old = fresh(8, 3)
    nn.init.constant_(old.bias, 0.5)
    new = fresh(8, 5, seed=1, old=old)
    assert torch.equal(new.weight[:3], old.weight)
    assert new.bias.tolist() == [0.5, 0.5, 0.5, 0, 0]
    assert new.weight[3:].abs().min() > 0
    assert new.weight is not old.weight


def test_it_depends_on_its_generator_alone() -> None:
    before = torch.get_rng_state()
    assert torch.equal(fresh(8, 3).weight, fresh(8, 3).weight)
    assert not torch.equal(fresh(8, 3).weight, fresh(8, 3, seed=1).weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_takes_the_type_of_the_old_head() -> None:
    assert fresh(4, 3, old=fresh(4, 2).double()).weight.dtype == torch.float64


def test_the_first_head_takes_the_type_of_its_backbone() -> None:
    backbone = nn.Linear(2, 4).double()
    head = grow_linear(None, 4, 2, torch.Generator().manual_seed(0), like=backbone)
    assert head.weight.dtype == head.bias.dtype == torch.float64
    without = grow_linear(None, 4, 2, torch.Generator().manual_seed(0), like=nn.Flatten())
    assert torch.equal(without.weight.double(), head.weight)


def test_it_grows_in_features_too() -> None:
    old = fresh(4, 3)
    new = fresh(8, 5, seed=1, old=old)
    assert torch.equal(new.weight[:3, :4], old.weight)
    assert new.weight[:3, 4:].abs().min() > 0
    assert new.weight[3:].abs().min() > 0


@pytest.mark.parametrize(("features", "classes"), [(7, 5), (8, 2)])
def test_it_cannot_shrink(features: int, classes: int) -> None:
    with pytest.raises(CompatibilityError, match="cannot grow"):
        fresh(features, classes, old=fresh(8, 3))


def test_a_backbone_must_say_its_width() -> None:
    with pytest.raises(CompatibilityError, match="num_features"):
        feature_count(nn.Linear(2, 2))


def test_new_heads_are_distributed_as_released(golden: Path) -> None:
    files = sorted(golden.glob("head_init_seed*.json"))
    assert files
    for row in (row for file in files for row in json.loads(file.read_text())["rows"]):
        head = fresh(row["in_features"], row["out"])
        assert row["bound"] * 0.98 < head.weight.abs().max().item() <= row["bound"]
        assert head.weight.std().item() == pytest.approx(row["std"], rel=0.1)
        assert head.bias.abs().max().item() == row["bias_max"]
