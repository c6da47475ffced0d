"""iCaRL: exemplars, and distillation from the network as it was before the task.

    L = CE(z, y) over all K classes − mean_b Σ softmax(z'/T) · log softmax(z[:K_old]/T)

z' are the logits of a frozen copy of the network, taken when the task begins. Answers come from
the head, or from the nearest class mean (`distances_to_means`).

*Deviations* from the release: exemplars of small classes (see `sticky_quota`). The teacher is the
network as training left it, unless a coupling of the run has let a test-time method change it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arc_cl.contracts import TaskInfo, TrainingImages, TrainingPlan
from arc_cl.errors import ConfigurationError
from arc_cl.learners._classifier import Classifier, grow_head
from arc_cl.learners._exemplars import Exemplars
from arc_cl.learners._losses import distillation
from arc_cl.learners._schedules import SGDTraining, sgd_plan


@dataclass(frozen=True, kw_only=True)
class Settings(SGDTraining):
    """Settings of iCaRL."""

    memory: int = 2000
    """Exemplars kept, in total or a class; 0 keeps none."""
    temperature: float = 2.0
    """Of both softmaxes of the distillation."""
    sticky_quota: bool = False
    """A class with too few images lowers the quota of those after it, as released."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise ConfigurationError(
                f"temperature={self.temperature}: expected a number above 0; the release takes 2"
            )


class ICaRL:
    """The learner; see the module."""

    def __init__(self, backbone: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self._exemplars = Exemplars(
            settings.memory, settings.memory_rule, sticky_quota=settings.sticky_quota
        )
        self._network = nn.ModuleDict({"backbone": backbone, "exemplars": self._exemplars})
        self._teacher: Classifier | None = None

    def begin_task(self, task: TaskInfo, generator: torch.Generator) -> None:
        self._exemplars.check(task)
        self._teacher = _frozen_copy(self._network) if task.index else None
        grow_head(self._network, task.seen_classes, generator)

    def plan(self, task: TaskInfo) -> TrainingPlan:
        return sgd_plan(self.settings, task, self._network.parameters())

    def loss(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        classifier = self.adaptable()
        logits_BK = classifier.classify(classifier.features(images_BCHW))
        classification = cross_entropy(logits_BK, labels_B)
        if self._teacher is None:
            return classification, {"loss": classification.detach()}
        taught = distillation(
            logits_BK, _answers(self._teacher, images_BCHW), self.settings.temperature
        )
        loss = classification + taught
        return loss, {
            "loss": loss.detach(),
            "classification": classification.detach(),
            "distillation": taught.detach(),
        }

    def end_task(self, task: TaskInfo, images: TrainingImages, generator: torch.Generator) -> None:
        self._teacher = None
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


def create(backbone: nn.Module, settings: Settings) -> ICaRL:
    return ICaRL(backbone, settings)


def _frozen_copy(network: nn.ModuleDict) -> Classifier:
    parts = {name: copy.deepcopy(network[name]) for name in ("backbone", "head")}
    return Classifier(nn.ModuleDict(parts).requires_grad_(False).eval())


@torch.no_grad()
def _answers(teacher: Classifier, images_BCHW: Tensor) -> Tensor:
    return teacher.classify(teacher.features(images_BCHW))
