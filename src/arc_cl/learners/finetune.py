"""Finetune: train the whole network on each task in turn.

Without exemplars, as released (the paper's text grants it a memory, neither code base does):
cross-entropy among the classes of the task alone, so old rows of the head receive no gradient;
weight decay still shrinks them. With a `memory` the kept images of old classes are trained on
again and the cross-entropy is over all classes seen: the whole loss where that is given is

    L = CE(z, y) over classes ≥ K_old (memory = 0), over all K classes (memory > 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arc_cl.contracts import TaskInfo, TrainingImages, TrainingPlan
from arc_cl.learners._classifier import Classifier, grow_head
from arc_cl.learners._exemplars import Exemplars
from arc_cl.learners._losses import local_cross_entropy
from arc_cl.learners._schedules import SGDTraining, sgd_plan


@dataclass(frozen=True, kw_only=True)
class Settings(SGDTraining):
    """Settings of Finetune."""

    sticky_quota: bool = False
    """A class with too few images lowers the quota of those after it, as released."""


class Finetune:
    """The learner; see the module."""

    def __init__(self, backbone: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self._exemplars = Exemplars(
            settings.memory, settings.memory_rule, sticky_quota=settings.sticky_quota
        )
        self._network = nn.ModuleDict({"backbone": backbone, "exemplars": self._exemplars})
        self._first_class = 0

    def begin_task(self, task: TaskInfo, generator: torch.Generator) -> None:
        self._exemplars.check(task)
        grow_head(self._network, task.seen_classes, generator)
        self._first_class = 0 if self.settings.memory else task.old_classes

    def plan(self, task: TaskInfo) -> TrainingPlan:
        return sgd_plan(self.settings, task, self._network.parameters())

    def loss(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        classifier = self.adaptable()
        logits_BK = classifier.classify(classifier.features(images_BCHW))
        loss = local_cross_entropy(logits_BK, labels_B, self._first_class)
        return loss, {"loss": loss.detach()}

    def end_task(self, task: TaskInfo, images: TrainingImages, generator: torch.Generator) -> None:
        self._network.eval()
        self._exemplars.update(task, images, self.adaptable().features)

    def rehearsal(self) -> Tensor:
        return self._exemplars.numbers()

    def adaptable(self) -> Classifier:
        return Classifier(self._network)

    def modules(self) -> nn.Module:
        return self._network


def create(backbone: nn.Module, settings: Settings) -> Finetune:
    return Finetune(backbone, settings)
