"""DER: a backbone a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arc_cl.contracts import TaskInfo
from arc_cl.learners.der import DER, Settings, create

VALUES: dict[str, Any] = {"lr": 0.1, "epochs_first": 1, "epochs": 1, "batch_size": 8, "memory": 10}
SIZES = (2, 2, 1)
TASKS = tuple(
    TaskInfo(index=t, seen_classes=sum(SIZES[: t + 1]), new_classes=size, tasks=3, classes=5)
    for t, size in enumerate(SIZES)
)


class Backbone(nn.Module):
    """Images [B,1,2,3] to four features; any module that says its width will do."""

    num_features = 4

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        nn.init.uniform_(self.mix.weight, -1, 1, generator=torch.Generator().manual_seed(0))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features: Tensor = self.norm(self.mix(images_BCHW.flatten(1)))
        return features


class Images:
    """Three images a class, numbered class after class."""

    pixels = torch.randn(15, 1, 2, 3, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(5).repeat_interleave(3)

    def of_class(self, position: int) -> Tensor:
        return torch.arange(3) + 3 * position

    def apply(self, function: Callable[[Tensor], Tensor], numbers_N: Tensor) -> Tensor:
        with torch.no_grad():
            return function(self.pixels[numbers_N])


def begin(learner: DER, task: TaskInfo) -> None:
    learner.begin_task(task, torch.Generator().manual_seed(task.index))


def train(learner: DER, task: TaskInfo, steps: int = 3) -> None:
    (group,) = learner.plan(task).groups
    optimizer = torch.optim.SGD(group.parameters, lr=group.lr, weight_decay=0.1)
    learner.modules().train()
    for _ in range(steps):
        loss, _ = learner.loss(*batch(task))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    learner.modules().eval()


def batch(task: TaskInfo) -> tuple[Tensor, Tensor]:
    rows = Images.labels < task.seen_classes
    return Images.pixels[rows], Images.labels[rows]


def learnt(tasks: int) -> DER:
    """A learner after so many tasks."""
    learner = create(Backbone(), Settings(**VALUES))
    for task in TASKS[:tasks]:
        begin(learner, task)
        train(learner, task)
        learner.end_task(task, Images(), torch.Generator())
    return learner


def state_of(learner: DER) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in learner.modules().state_dict().items()}


def same(one: DER, other: DER) -> bool:
    mine, theirs = state_of(one), state_of(other)
    return mine.keys() == theirs.keys() and all(mine[n].equal(theirs[n]) for n in mine)


def test_features_stand_side_by_side_and_old_ones_never_change() -> None:
    learner = learnt(1)
    old = learner.adaptable().features(Images.pixels)
    for task in TASKS[1:]:
        begin(learner, task)
        start = learner.adaptable().features(Images.pixels)
        assert torch.equal(start[:, -4:], start[:, -8:-4])  # a copy of the one before
        train(learner, task)
        features = learner.adaptable().features(Images.pixels)
        assert features.shape == (15, 4 * task.index + 4)
        assert torch.equal(features[:, : old.shape[1]], old)
        assert not torch.equal(features[:, -4:], start[:, -4:])
        learner.end_task(task, Images(), torch.Generator())
        old = features


def test_the_head_keeps_old_rows_on_old_features() -> None:
    learner = learnt(1)
    old = learner.adaptable().head().weight.clone()
    begin(learner, TASKS[1])
    head = learner.adaptable().head()
    assert (head.in_features, head.out_features) == (8, 4)
    assert torch.equal(head.weight[:2, :4], old)
    assert head.weight[:2, 4:].abs().min() > 0


def test_a_fresh_auxiliary_head_tells_new_classes_from_old_ones() -> None:
    learner = learnt(2)
    assert set(create_and_begin().loss(*batch(TASKS[0]))[1]) == {"loss"}
    before = state_of(learner)["auxiliary.weight"]
    begin(learner, TASKS[2])
    weight, bias = (state_of(learner)[f"auxiliary.{name}"] for name in ("weight", "bias"))
    assert weight.shape == (2, 4)
    assert not torch.equal(weight, before[:2])
    images, labels = batch(TASKS[2])
    loss, numbers = learner.loss(images, labels)
    newest = learner.adaptable().features(images)[:, -4:]
    expected = cross_entropy(newest @ weight.T + bias, (labels == 4).long())
    assert numbers["auxiliary"].item() == pytest.approx(expected.item())
    assert loss.item() == pytest.approx((numbers["classification"] + expected).item())


def create_and_begin() -> DER:
    learner = create(Backbone(), Settings(**VALUES))
    begin(learner, TASKS[0])
    return learner


def test_only_the_newest_backbone_and_the_heads_are_planned() -> None:
    learner = learnt(2)
    begin(learner, TASKS[2])
    planned = {id(each) for each in learner.plan(TASKS[2]).groups[0].parameters}
    names = {n for n, each in learner.modules().named_parameters() if id(each) in planned}
    assert {name.rpartition(".")[0] for name in names} == {
        "backbone.branches.2.mix",
        "backbone.branches.2.norm",
        "head",
        "auxiliary",
    }


def test_its_state_goes_round_and_a_task_can_be_left_in_its_midst() -> None:
    one, other = learnt(1), create_and_begin()
    other.modules().load_state_dict(one.modules().state_dict())
    for learner in (one, other):
        begin(learner, TASKS[1])
    assert same(one, other)
    train(one, TASKS[1], steps=2)
    other.modules().load_state_dict(one.modules().state_dict())
    for learner in (one, other):
        train(learner, TASKS[1], steps=1)
        learner.end_task(TASKS[1], Images(), torch.Generator())
    assert same(one, other)
    assert torch.equal(one.rehearsal(), other.rehearsal())


def test_a_test_time_method_may_ask_for_gradients_in_old_backbones() -> None:
    learner = learnt(2)
    classifier = learner.adaptable()
    norms = dict(classifier.parameters("norms"))
    assert {name.rpartition(".")[0] for name in norms} == {
        "backbone.branches.0.norm",
        "backbone.branches.1.norm",
    }
    for parameter in norms.values():
        parameter.requires_grad_(True)
    torch.autograd.backward(classifier.classify(classifier.features(Images.pixels)).sum())
    assert all(parameter.grad is not None for parameter in norms.values())
    every = dict(classifier.parameters("all"))
    assert not any(name.startswith("auxiliary") for name in every)
