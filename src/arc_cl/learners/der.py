"""DER: one backbone a task, side by side; the older ones are frozen.

    L = CE(z, y) + CE(a, y'),   y' = 0 for any old class, 1 … s for the s new ones

z is the head on the features of all backbones, a an auxiliary head, made anew for each task, on
those of the newest one, which begins as a copy of the one before. In the first task L = CE(z, y).

*Deviations* from the release: exemplars of small classes (see `sticky_quota`). As there, nothing
is masked or pruned, and no weights are aligned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arc_cl.backbones.branches import Branches
from arc_cl.contracts import TaskInfo, TrainingImages, TrainingPlan
from arc_cl.learners._classifier import Classifier
from arc_cl.learners._exemplars import Exemplars
from arc_cl.learners._expansion import expand, expansion_loss
from arc_cl.learners._schedules import SGDTraining, sgd_plan


@dataclass(frozen=True, kw_only=True)
class Settings(SGDTraining):
    """Settings of DER."""

    memory: int = 2000
    """Exemplars kept, in total or a class; 0 keeps none."""
    sticky_quota: bool = False
    """A class with too few images lowers the quota of those after it, as released."""


class DER:
    """The learner; see the module."""

    def __init__(self, backbone: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self._exemplars = Exemplars(
            settings.memory, settings.memory_rule, sticky_quota=settings.sticky_quota
        )
        self._network = nn.ModuleDict(
            {"backbone": Branches(backbone), "exemplars": self._exemplars}
        )
        self._old_classes = 0

    def begin_task(self, task: TaskInfo, generator: torch.Generator) -> None:
        self._exemplars.check(task)
        expand(self._network, task, generator)
        self._old_classes = task.old_classes

    def plan(self, task: TaskInfo) -> TrainingPlan:
        return sgd_plan(self.settings, task, self._network.parameters())

    def loss(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return expansion_loss(self._network, images_BCHW, labels_B, self._old_classes, weight=1.0)

    def end_task(self, task: TaskInfo, images: TrainingImages, generator: torch.Generator) -> None:
        self._network.eval()
        self._exemplars.update(task, images, self.adaptable().features)

    def rehearsal(self) -> Tensor:
        return self._exemplars.numbers()

    def distances_to_means(self, features_BD: Tensor) -> Tensor:
        """Squared distances [B,K] to the class means; the nearest is the other answer."""
        return self._exemplars.distances(features_BD)

    def adaptable(self) -> Classifier:
        return Classifier(self._network)

    def modules(self) -> nn.Module:
        return self._network


def create(backbone: nn.Module, settings: Settings) -> DER:
    return DER(backbone, settings)
