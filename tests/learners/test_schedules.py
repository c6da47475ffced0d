"""What the learners that train by SGD share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from arc_cl.contracts import TaskInfo
from arc_cl.errors import ConfigurationError
from arc_cl.learners._schedules import SGDTraining, multi_step, sgd_plan

VALUES: dict[str, Any] = {"lr": 0.1, "epochs_first": 3, "epochs": 2, "batch_size": 4}
FIRST = TaskInfo(index=0, seen_classes=2, new_classes=2, tasks=2, classes=4)
LATER = TaskInfo(index=1, seen_classes=4, new_classes=2, tasks=2, classes=4)


@pytest.mark.parametrize("milestones", [(), (2,), (1, 2), (3, 3), (0, 9)])
def test_factors_are_those_of_torch(milestones: tuple[int, ...]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = MultiStepLR(optimizer, list(milestones), gamma=0.3)
    factors = multi_step(5, milestones, 0.3)
    for factor in factors:
        assert factor == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert len(factors) == 5


def test_first_and_later_tasks_have_their_own_plan() -> None:
    settings = SGDTraining(
        **VALUES, weight_decay_first=0.3, weight_decay=0.2, milestones_first=(1,), milestones=(0,)
    )
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    first, later = (sgd_plan(settings, task, layer.parameters()) for task in (FIRST, LATER))
    assert first.schedule == pytest.approx((1.0, 0.1, 0.1))
    assert later.schedule == pytest.approx((0.1, 0.1))
    assert (first.groups[0].weight_decay, later.groups[0].weight_decay) == (0.3, 0.2)
    assert (first.optimizer, first.momentum, first.batch_size) == ("sgd", 0.9, 4)
    assert [id(each) for each in first.groups[0].parameters] == [id(layer.weight)]


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 0.0},
        {"lr": float("nan")},
        {"epochs": 0},
        {"epochs_first": -1},
        {"batch_size": 0},
        {"momentum": 1.0},
        {"weight_decay": -0.1},
        {"weight_decay_first": -0.1},
        {"lr_decay": 0.0},
        {"milestones": (3, -1)},
        {"memory": -1},
    ],
)
def test_wrong_values_are_refused_by_name(changes: dict[str, Any]) -> None:
    name = next(iter(changes))
    with pytest.raises(ConfigurationError, match=rf"{name}=.*expected.*change {name}"):
        SGDTraining(**{**VALUES, **changes})
