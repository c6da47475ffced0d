"""What the learners that train by SGD share: settings, schedule, plan.

Rate of epoch e: lr · decay^(number of milestones ≤ e), epochs counted from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from arc_cl.contracts import ParameterGroup, TaskInfo, Training, TrainingPlan
from arc_cl.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class SGDTraining(Training):
    """Fields of every learner that trains its network by SGD and may keep exemplars."""

    momentum: float = 0.9
    """Of SGD."""
    weight_decay_first: float = 5e-4
    """Weight decay in the first task."""
    weight_decay: float = 2e-4
    """Weight decay in each later task."""
    milestones_first: tuple[int, ...] = ()
    """Epochs of the first task at which the rate falls."""
    milestones: tuple[int, ...] = ()
    """Epochs of each later task at which the rate falls."""
    lr_decay: float = 0.1
    """Factor on the rate at each milestone."""
    memory: int = 0
    """Exemplars kept, in total or a class; 0 keeps none."""
    memory_rule: Literal["total", "per_class"] = "total"
    """Whether `memory` is shared by all classes seen or granted to each."""

    def __post_init__(self) -> None:
        _need(self.lr > 0, "lr", self.lr, "a rate above 0")
        for name in ("epochs_first", "epochs", "batch_size"):
            value = getattr(self, name)
            _need(value >= 1, name, value, "a whole number of at least 1")
        _need(0 <= self.momentum < 1, "momentum", self.momentum, "at least 0 and below 1")
        for name in ("weight_decay_first", "weight_decay", "memory"):
            value = getattr(self, name)
            _need(value >= 0, name, value, "0 or more")
        _need(self.lr_decay > 0, "lr_decay", self.lr_decay, "a factor above 0")
        for name in ("milestones_first", "milestones"):
            value = getattr(self, name)
            _need(all(each >= 0 for each in value), name, value, "epochs, counted from 0")


def epochs_of(settings: Training, task: TaskInfo) -> int:
    return settings.epochs if task.index else settings.epochs_first


def multi_step(epochs: int, milestones: Sequence[int], decay: float) -> tuple[float, ...]:
    """One rate factor an epoch, falling by `decay` at each milestone."""
    return tuple(
        float(decay ** sum(milestone <= epoch for milestone in milestones))
        for epoch in range(epochs)
    )


def sgd_plan(
    settings: SGDTraining, task: TaskInfo, parameters: Iterable[nn.Parameter]
) -> TrainingPlan:
    """SGD on all parameters that require gradients, at one rate."""
    first = task.index == 0
    group = ParameterGroup(
        parameters=tuple(parameter for parameter in parameters if parameter.requires_grad),
        lr=settings.lr,
        weight_decay=settings.weight_decay_first if first else settings.weight_decay,
    )
    return TrainingPlan(
        groups=(group,),
        optimizer="sgd",
        momentum=settings.momentum,
        batch_size=settings.batch_size,
        schedule=multi_step(
            epochs_of(settings, task),
            settings.milestones_first if first else settings.milestones,
            settings.lr_decay,
        ),
    )


def _need(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ConfigurationError(f"{name}={value!r}: expected {expected}; change {name}")
