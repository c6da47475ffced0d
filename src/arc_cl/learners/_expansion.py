"""What DER and MEMO share: a branch more and a wider head a task, and an auxiliary head.

The network holds `backbone` (`Branches`), `head`, and after the first task `auxiliary`, which is
in its state for those who go on in the midst of a task.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arc_cl.backbones.branches import Branches
from arc_cl.backbones.heads import feature_count, grow_linear
from arc_cl.contracts import TaskInfo
from arc_cl.learners._classifier import Classifier, grow_head
from arc_cl.learners._losses import auxiliary_targets


def expand(network: nn.ModuleDict, task: TaskInfo, generator: torch.Generator) -> None:
    """Make room for a task: a branch, its features in the head, its classes, its auxiliary head."""
    branches = _branches(network)
    if task.index:
        branches.grow()
    grow_head(network, task.seen_classes, generator)
    if task.index:
        width = feature_count(branches.newest)
        network["auxiliary"] = grow_linear(None, width, task.new_classes + 1, generator, branches)


def expansion_loss(
    network: nn.ModuleDict,
    images_BCHW: Tensor,
    labels_B: Tensor,
    old_classes: int,
    weight: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the head plus `weight` times that of the auxiliary head, if there is one."""
    classifier = Classifier(network)
    features_BD = classifier.features(images_BCHW)
    classification = cross_entropy(classifier.classify(features_BD), labels_B)
    if "auxiliary" not in network:
        return classification, {"loss": classification.detach()}
    logits_BA = network["auxiliary"](_branches(network).newest_features(features_BD))
    auxiliary = cross_entropy(logits_BA, auxiliary_targets(labels_B, old_classes))
    loss = classification + weight * auxiliary
    return loss, {
        "loss": loss.detach(),
        "classification": classification.detach(),
        "auxiliary": auxiliary.detach(),
    }


def _branches(network: nn.ModuleDict) -> Branches:
    branches = network["backbone"]
    assert isinstance(branches, Branches)
    return branches
