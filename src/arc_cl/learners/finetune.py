"""Finetune: train the whole network on each task in turn, and nothing against forgetting.

First task: cross-entropy over its classes. Later tasks: cross-entropy over the logits of the
*new* classes alone, so old rows of the head receive no gradient (weight decay still shrinks
them). No exemplars, in spite of the paper's text: neither code base keeps any for Finetune.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arc_cl.backbones.heads import feature_count, grow_linear
from arc_cl.contracts import ParameterGroup, TaskInfo, Training, TrainingPlan
from arc_cl.learners._classifier import Classifier


class Finetune:
    """The learner; see the module."""

    def __init__(self, backbone: nn.Module, training: Training) -> None:
        self.training = training
        self._network = nn.ModuleDict({"backbone": backbone})
        self._features = feature_count(backbone)
        self._old_classes = 0

    def begin_task(self, task: TaskInfo, generator: torch.Generator) -> None:
        head = self.adaptable().head() if "head" in self._network else None
        self._network["head"] = grow_linear(head, self._features, task.seen_classes, generator)
        self._old_classes = task.old_classes

    def plan(self, task: TaskInfo) -> TrainingPlan:
        how = self.training
        decay = how.weight_decay_later if task.index else how.weight_decay_first
        group = ParameterGroup(
            parameters=tuple(self._network.parameters()), lr=how.lr, weight_decay=decay
        )
        return TrainingPlan(
            groups=(group,), epochs=how.epochs, batch_size=how.batch_size, momentum=how.momentum
        )

    def loss(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        classifier = self.adaptable()
        logits_BK = classifier.classify(classifier.features(images_BCHW))
        loss = cross_entropy(logits_BK[:, self._old_classes :], labels_B - self._old_classes)
        return loss, {"loss": loss.detach()}

    def end_task(self, task: TaskInfo) -> None:
        """Nothing follows: Finetune remembers nothing."""

    def adaptable(self) -> Classifier:
        return Classifier(self._network)

    def modules(self) -> nn.Module:
        return self._network


def create(backbone: nn.Module, training: Training) -> Finetune:
    return Finetune(backbone, training)
