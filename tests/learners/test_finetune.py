"""Finetune, without and with exemplars."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arc_cl.contracts import TaskInfo
from arc_cl.errors import ConfigurationError
from arc_cl.learners.finetune import Finetune, Settings, create

VALUES: dict[str, Any] = {"lr": 0.1, "epochs_first": 2, "epochs": 1, "batch_size": 4}
SIZES = (3, 2, 1)  # a task need not be as large as the one before


class Backbone(nn.Module):
    """Images [B,1,2,4] to six features."""

    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 6)
        nn.init.uniform_(self.mix.weight, -1, 1, generator=torch.Generator().manual_seed(0))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return torch.tanh(self.mix(images_BCHW.flatten(1)))


@dataclass
class Images:
    """Five images a class, numbered class after class."""

    count: int = 5

    def of_class(self, position: int) -> Tensor:
        return torch.arange(self.count) + self.count * position

    def apply(self, function: Callable[[Tensor], Tensor], numbers_N: Tensor) -> Tensor:
        with torch.inference_mode():
            return function(self.pixels(numbers_N))

    def pixels(self, numbers_N: Tensor) -> Tensor:
        every = torch.randn(60, 1, 2, 4, generator=torch.Generator().manual_seed(1))
        return every[numbers_N]


def info(stage: int) -> TaskInfo:
    return TaskInfo(
        index=stage,
        seen_classes=sum(SIZES[: stage + 1]),
        new_classes=SIZES[stage],
        tasks=len(SIZES),
        classes=sum(SIZES),
    )


def begun(learner: Finetune, stages: int = 2) -> Finetune:
    """A learner with the last of so many tasks begun, those before it ended at once."""
    for stage in range(stages):
        if stage:
            learner.end_task(info(stage - 1), Images(), torch.Generator())
        learner.begin_task(info(stage), torch.Generator().manual_seed(stage))
    return learner


def gradient_of_head(learner: Finetune, labels: Tensor) -> Tensor:
    loss, numbers = learner.loss(Images().pixels(labels), labels)
    torch.autograd.backward(loss)
    assert not numbers["loss"].requires_grad
    gradient = learner.adaptable().head().weight.grad
    assert gradient is not None
    return gradient


def test_without_memory_old_rows_get_no_gradient_but_they_decay() -> None:
    learner = begun(create(Backbone(), Settings(**VALUES)))
    gradient = gradient_of_head(learner, torch.tensor([3, 4, 4]))
    assert gradient[:3].abs().max() == 0
    assert gradient[3:].abs().min() > 0
    (group,) = learner.plan(info(1)).groups
    assert any(each is learner.adaptable().head().weight for each in group.parameters)
    assert group.weight_decay == 2e-4
    assert learner.plan(info(0)).groups[0].weight_decay == 5e-4
    assert learner.rehearsal().tolist() == []


def test_with_memory_old_classes_are_kept_and_count() -> None:
    learner = begun(create(Backbone(), Settings(**VALUES, memory=2, memory_rule="per_class")))
    kept = learner.rehearsal().tolist()
    assert [number // 5 for number in kept] == [0, 0, 1, 1, 2, 2]
    labels = torch.tensor([0, 3, 4, 2])
    classifier = learner.adaptable()
    loss, _ = learner.loss(Images().pixels(labels), labels)
    logits = classifier.classify(classifier.features(Images().pixels(labels)))
    assert loss.item() == pytest.approx(cross_entropy(logits, labels).item())
    assert gradient_of_head(learner, labels).abs().min() > 0


def test_tasks_of_unequal_size_learn_their_own_classes() -> None:
    learner = begun(create(Backbone(), Settings(**VALUES)), stages=3)
    gradient = gradient_of_head(learner, torch.tensor([5, 5]))
    assert gradient.shape == (6, 6)
    assert gradient.abs().max() == 0  # one new class alone: nothing to tell it from


def test_what_somebody_froze_stays_frozen_and_is_not_planned() -> None:
    learner = begun(create(Backbone(), Settings(**VALUES)))
    for parameter in learner.modules()["backbone"].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    learner.end_task(info(1), Images(), torch.Generator())
    learner.begin_task(info(2), torch.Generator())
    head = learner.adaptable().head()
    planned = learner.plan(info(2)).groups[0].parameters
    assert [id(each) for each in planned] == [id(head.weight), id(head.bias)]


def test_a_memory_that_cannot_last_is_refused_before_training() -> None:
    learner = create(Backbone(), Settings(**VALUES, memory=5))
    with pytest.raises(ConfigurationError, match="memory=5"):
        begun(learner, stages=1)
