"""Extractors that grow by a branch, and a vision transformer split for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from arc_cl.backbones.branches import Branches, split
from arc_cl.errors import CompatibilityError


def vit(seed: int = 0, **changes: Any) -> VisionTransformer:
    """Images [B,3,16,16] to 12 features, weights from a seed."""
    shape: dict[str, Any] = {
        "img_size": 16,
        "patch_size": 8,
        "embed_dim": 12,
        "depth": 2,
        "num_heads": 2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return VisionTransformer(**{**shape, "num_classes": 0, **changes}).eval()


def images(count: int = 4, size: int = 16) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(7))


def normed() -> nn.Module:
    """A branch with batch norm, whose mode matters."""
    branch = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    branch.num_features = 4  # type: ignore[assignment]
    return branch


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"global_pool": "avg"},
        {"global_pool": "avg", "fc_norm": False},
        {"reg_tokens": 2, "depth": 3},
        {"class_token": False, "global_pool": "max"},
    ],
)
def test_trunk_and_branch_are_the_whole(changes: dict[str, Any]) -> None:
    backbone = vit(**changes)
    whole, size = backbone(images()), parameters(backbone)
    trunk, branch = split(backbone)
    assert torch.equal(Branches(branch, trunk)(images()), whole)
    assert parameters(trunk) + parameters(branch) == size


def test_split_as_released(golden: Path) -> None:
    files = sorted(golden.glob("memo_vit_tiny_seed*.npz"))
    assert files
    for path in files:
        data = {name: torch.from_numpy(value) for name, value in np.load(path).items()}
        blocks = sum(name.endswith("norm1.weight") for name in data)
        shape: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": blocks}
        trunk, branch = split(vit(**shape, num_heads=3).double())
        trunk.body.load_state_dict(part(data, "base/", without="base/norm"))
        branch.block.load_state_dict(part(data, "spec/last_block."))
        branch.norm.load_state_dict(part(data, "spec/norm."))
        tokens = trunk(data["x"].double())
        torch.testing.assert_close(tokens, data["base_tokens"], rtol=0, atol=1e-9)
        torch.testing.assert_close(branch(tokens), data["features"], rtol=0, atol=1e-9)


def part(data: dict[str, Tensor], prefix: str, without: str = "-") -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value.double()
        for name, value in data.items()
        if name.startswith(prefix) and not name.startswith(without)
    }


def test_redrawing_concerns_the_block_alone() -> None:
    _, branch = split(vit(embed_dim=96, num_heads=4))
    parameters = dict(branch.named_parameters())
    for name in ("norm.weight", "block.norm1.weight"):
        nn.init.constant_(parameters[name], 3.0)
    before = torch.get_rng_state()
    branch.redraw(torch.Generator().manual_seed(1))
    weight, bias = parameters["block.mlp.fc2.weight"], parameters["block.mlp.fc2.bias"]
    first = weight.clone()
    assert torch.equal(torch.get_rng_state(), before)
    assert parameters["norm.weight"].unique().tolist() == [3.0]
    assert parameters["block.norm1.weight"].unique().tolist() == [1.0]
    bound = (4 * 96) ** -0.5
    assert 0.98 * bound < first.abs().max() <= bound
    assert bias.abs().min() > 0
    branch.redraw(torch.Generator().manual_seed(2))
    assert not torch.equal(weight, first)


class Overriding(VisionTransformer):
    def forward_features(self, x: Tensor, *_: object, **__: object) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("backbone", "match"),
    [
        (nn.Linear(2, 2), "not timm's VisionTransformer"),
        (Overriding(16, 8, embed_dim=12, depth=2, num_heads=2, num_classes=0), "VisionTransformer"),
        (vit(depth=1), "single block"),
        (vit(num_classes=5), "head of 5 classes"),
        (vit(global_pool="map"), "global_pool is 'map'"),
    ],
)
def test_what_cannot_be_split_is_refused(backbone: nn.Module, match: str) -> None:
    with pytest.raises(CompatibilityError, match=match):
        split(backbone)


def test_a_new_branch_copies_the_newest_and_stands_beside_it() -> None:
    branches = Branches(normed())
    nn.init.constant_(next(branches.newest.parameters()), 0.25)
    branches.grow()
    assert branches.num_features == 8
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    features = branches.eval()(rows)
    assert torch.equal(features[:, :4], features[:, 4:])
    with torch.no_grad():
        next(branches.newest.parameters()).add_(1)
    moved = branches(rows)
    assert torch.equal(moved[:, :4], features[:, :4])
    assert torch.equal(moved[:, 4:], branches.newest_features(moved))
    assert not torch.equal(moved[:, 4:], features[:, 4:])


def test_what_is_frozen_learns_nothing_and_stays_in_eval_mode() -> None:
    trunk = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    branches = Branches(normed(), trunk)
    branches.train()
    branches(torch.randn(5, 3)).sum().backward()
    assert trunk.training
    branches.grow()
    assert branches.newest.training
    before = {name: value.clone() for name, value in branches.state_dict().items()}
    for _ in range(2):  # the flags survive the switching of whole modes
        features = branches.eval().train()(torch.randn(5, 3))
    assert features.grad_fn is not None
    old, shared = branches.branches[0], branches.trunk(torch.randn(5, 3))
    assert not shared.requires_grad
    assert not old(shared).requires_grad
    changed = {n for n, value in branches.state_dict().items() if not value.equal(before[n])}
    assert changed
    assert all(name.startswith("branches.1.1.") for name in changed)
    assert all(p.grad is None for p in (*trunk.parameters(), *old.parameters()))


def test_a_new_branch_learns_where_the_first_was_given_to_learn() -> None:
    first = normed()
    next(first.parameters()).requires_grad_(False)
    branches = Branches(first)
    branches.requires_grad_(False)  # whoever froze it since
    branches.grow()
    assert [p.requires_grad for p in branches.newest.parameters()] == [False, True, True, True]
    assert not any(p.requires_grad for p in first.parameters())
