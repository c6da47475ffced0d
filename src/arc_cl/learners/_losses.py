"""Losses that several learners share; each is a mean over the rows of a batch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy


def local_cross_entropy(logits_BK: Tensor, labels_B: Tensor, first: int) -> Tensor:
    """Cross-entropy among the classes from `first` on: earlier ones take no part."""
    return cross_entropy(logits_BK[:, first:], labels_B - first)


def distillation(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """−Σ softmax(teacher/T) · log softmax(student/T) over the classes that the teacher knows.

    As in the release there is no factor T², so gradients shrink as T grows.
    """
    known_BK = student_BK[:, : teacher_BK.shape[1]]
    return cross_entropy(known_BK / temperature, (teacher_BK / temperature).softmax(dim=1))


def auxiliary_targets(labels_B: Tensor, old_classes: int) -> Tensor:
    """0 for any old class, 1 … s for the s new ones: what an auxiliary head tells apart."""
    return (labels_B - old_classes + 1).clamp(min=0)
