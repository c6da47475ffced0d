"""MEMO: a specialised last block a task on a shared vision transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from arc_cl.contracts import TaskInfo
from arc_cl.errors import CompatibilityError, ConfigurationError
from arc_cl.learners.memo import MEMO, Settings, create

VALUES: dict[str, Any] = {"lr": 0.1, "epochs_first": 1, "epochs": 1, "batch_size": 8, "memory": 8}
TASKS = tuple(
    TaskInfo(index=stage, seen_classes=2 * stage + 2, new_classes=2, tasks=3, classes=6)
    for stage in range(3)
)


class Images:
    """Three images a class, numbered class after class."""

    pixels = torch.randn(18, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(6).repeat_interleave(3)

    def of_class(self, position: int) -> Tensor:
        return torch.arange(3) + 3 * position

    def apply(self, function: Callable[[Tensor], Tensor], numbers_N: Tensor) -> Tensor:
        with torch.no_grad():
            return function(self.pixels[numbers_N])


def vit() -> VisionTransformer:
    shape: dict[str, Any] = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "num_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return VisionTransformer(**shape, depth=3, num_classes=0).eval()


def made(**changes: Any) -> MEMO:
    return create(vit(), Settings(**{**VALUES, **changes}))


def begin(learner: MEMO, task: TaskInfo) -> MEMO:
    learner.begin_task(task, torch.Generator().manual_seed(task.index))
    return learner


def train(learner: MEMO, task: TaskInfo) -> set[str]:
    """Two steps; the parameters that moved."""
    before = {name: value.clone() for name, value in learner.modules().named_parameters()}
    (group,) = learner.plan(task).groups
    optimizer = torch.optim.SGD(group.parameters, lr=group.lr, weight_decay=group.weight_decay)
    rows = Images.labels < task.seen_classes
    for _ in range(2):
        loss, _ = learner.loss(Images.pixels[rows], Images.labels[rows])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    after = learner.modules().named_parameters()
    return {name for name, value in after if not torch.equal(value, before[name])}


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_it_begins_as_the_pre_trained_network() -> None:
    learner = begin(made(), TASKS[0])
    assert torch.equal(learner.adaptable().features(Images.pixels), vit()(Images.pixels))


def test_as_released_it_begins_with_a_random_block_under_the_final_norm() -> None:
    one, other = (begin(made(specialised_init="random"), TASKS[0]) for _ in range(2))
    features = one.adaptable().features(Images.pixels)
    assert torch.equal(features, other.adaptable().features(Images.pixels))
    assert not torch.allclose(features, vit()(Images.pixels))
    kept = vit().state_dict()
    state = one.modules().state_dict()
    for name, value in kept.items():
        shared = not name.startswith(("norm.", "blocks.2."))
        ours = f"backbone.trunk.body.{name}" if shared else f"backbone.branches.0.{name}"
        if not name.startswith("blocks.2."):
            assert torch.equal(state[ours], value), name
    begin(one, TASKS[1])  # later blocks copy the newest
    state = one.modules().state_dict()
    name = "block.mlp.fc1.weight"
    first, second = (state[f"backbone.branches.{i}.{name}"] for i in range(2))
    assert torch.equal(first, second)


def test_the_shared_part_learns_first_and_then_no_more() -> None:
    learner = begin(made(), TASKS[0])
    moved = train(learner, TASKS[0])
    assert any(name.startswith("backbone.trunk.body.blocks.0") for name in moved)
    assert "backbone.trunk.body.patch_embed.proj.weight" in moved
    for task in TASKS[1:]:
        learner.end_task(TASKS[task.index - 1], Images(), torch.Generator())
        begin(learner, task)
        moved = train(learner, task)
        own = f"backbone.branches.{task.index}."
        assert any(name.startswith(own) for name in moved)
        assert all(name.startswith((own, "head.", "auxiliary.")) for name in moved)


def test_it_holds_no_dead_parameters() -> None:
    learner, whole = begin(made(), TASKS[0]), size(vit())
    assert size(learner.modules()) == whole + 2 * (8 + 1)
    begin(learner, TASKS[1])
    branch = size(vit().blocks[-1]) + size(vit().norm)
    heads = 4 * (2 * 8 + 1) + 3 * (8 + 1)
    assert size(learner.modules()) == whole + branch + heads


def test_the_auxiliary_loss_has_its_weight() -> None:
    numbers = []
    for weight in (0.0, 0.5):
        learner = begin(begin(made(alpha_aux=weight), TASKS[0]), TASKS[1])
        numbers.append(learner.loss(Images.pixels[:9], Images.labels[:9])[1])
    assert torch.equal(numbers[0]["loss"], numbers[0]["classification"])
    parts = numbers[1]["classification"] + 0.5 * numbers[1]["auxiliary"]
    assert numbers[1]["loss"].item() == pytest.approx(parts.item())
    with pytest.raises(ConfigurationError, match="alpha_aux=-1"):
        Settings(**VALUES, alpha_aux=-1.0)


@pytest.mark.parametrize("slip", [False, True])
def test_all_new_classes_get_a_mean_but_in_the_released_form(slip: bool) -> None:
    learner = begin(made(last_mean_only=slip), TASKS[0])
    learner.end_task(TASKS[0], Images(), torch.Generator())
    features = Images().apply(learner.adaptable().features, torch.arange(6))
    away = learner.distances_to_means(features)[:, 0]
    assert torch.allclose(away, torch.ones(6), atol=1e-4) == slip  # of a mean that is zero


def test_its_state_goes_round() -> None:
    one, other = begin(made(), TASKS[0]), begin(made(), TASKS[0])
    train(one, TASKS[0])
    one.end_task(TASKS[0], Images(), torch.Generator())
    begin(one, TASKS[1])
    train(one, TASKS[1])
    one.end_task(TASKS[1], Images(), torch.Generator())
    begin(other, TASKS[1])
    other.modules().load_state_dict(one.modules().state_dict())
    for function in (lambda m: m.adaptable().features(Images.pixels), MEMO.rehearsal):
        assert torch.equal(function(one), function(other))


def test_a_backbone_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(CompatibilityError, match="timm's VisionTransformer"):
        create(nn.Linear(2, 2), Settings(**VALUES))
