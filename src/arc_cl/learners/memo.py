"""MEMO: one specialised last block a task, on a vision transformer that all of them share.

    L = CE(z, y) + alpha_aux · CE(a, y'),   y' = 0 for any old class, 1 … s for the s new ones

The shared part (all blocks but the last) learns in the first task only; each later task adds a
copy of the newest last block and final norm, and freezes the older ones. z and a are as in DER.

*Deviations* from the release: the first specialised block is the backbone's own last block, not a
random one (`specialised_init`); all new classes get their mean (`last_mean_only`); no unused
copies of the network are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from arc_cl.backbones.branches import Branch, Branches, split
from arc_cl.contracts import TaskInfo, TrainingImages, TrainingPlan
from arc_cl.errors import ConfigurationError
from arc_cl.learners._classifier import Classifier
from arc_cl.learners._exemplars import Exemplars
from arc_cl.learners._expansion import expand, expansion_loss
from arc_cl.learners._schedules import SGDTraining, sgd_plan


@dataclass(frozen=True, kw_only=True)
class Settings(SGDTraining):
    """Settings of MEMO."""

    memory: int = 2000
    """Exemplars kept, in total or a class; 0 keeps none."""
    alpha_aux: float = 1.0
    """Weight of the auxiliary loss."""
    specialised_init: Literal["pretrained", "random"] = "pretrained"
    """The first specialised block: the backbone's last one, or a random one as released."""
    last_mean_only: bool = False
    """Of the new classes only the last gets a mean for nearest-mean answers, as released."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha_aux < 0:
            raise ConfigurationError(
                f"alpha_aux={self.alpha_aux}: expected 0 or more; the release takes 1"
            )


class MEMO:
    """The learner; see the module. `trunk` and `branch` are what it shares and what it copies."""

    def __init__(self, trunk: nn.Module, branch: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self._exemplars = Exemplars(
            settings.memory, settings.memory_rule, last_mean_only=settings.last_mean_only
        )
        self._network = nn.ModuleDict(
            {"backbone": Branches(branch, trunk), "exemplars": self._exemplars}
        )
        self._old_classes = 0

    def begin_task(self, task: TaskInfo, generator: torch.Generator) -> None:
        self._exemplars.check(task)
        if task.index == 0 and self.settings.specialised_init == "random":
            self._first_branch().redraw(generator)
        expand(self._network, task, generator)
        self._old_classes = task.old_classes

    def plan(self, task: TaskInfo) -> TrainingPlan:
        return sgd_plan(self.settings, task, self._network.parameters())

    def loss(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return expansion_loss(
            self._network, images_BCHW, labels_B, self._old_classes, self.settings.alpha_aux
        )

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

    def _first_branch(self) -> Branch:
        branches = self._network["backbone"]
        assert isinstance(branches, Branches)
        assert isinstance(branches.newest, Branch)
        return branches.newest


def create(backbone: nn.Module, settings: Settings) -> MEMO:
    trunk, branch = split(backbone)
    return MEMO(trunk, branch, settings)
