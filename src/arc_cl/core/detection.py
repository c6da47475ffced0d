"""Out-of-task detection: the two assumptions, from the softmax alone (paper §3.2).

    c = max softmax(z)                      over all K classes
    ĉ = max softmax(z of the past classes)  re-normalised over them
    w = c / ĉ                               where the argmax lies in the newest task

Shapes: B batch, K classes seen. Everything works on log-softmax, so that logits of any size, and
-inf for masked classes, are answered right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from arc_cl.core.partition import TaskPartition
from arc_cl.core.settings import ARCSettings


@dataclass(frozen=True)
class Detection:
    """What the softmax says of each row."""

    classes: Tensor  # [B] int64, argmax of the logits; the lowest index among equals
    newest: Tensor  # [B] bool, the argmax lies in the newest task
    confidence: Tensor  # [B] c
    past_confidence: Tensor  # [B] ĉ; NaN where no past class is open
    ratio: Tensor  # [B] w (or c, by the `ratio` setting); NaN where it has no meaning


def at_least_float32(logits: Tensor) -> Tensor:
    """Half precision is too coarse for statistics; everything else stays what it is."""
    return logits if logits.dtype == torch.float64 else logits.to(torch.float32)


def detect(
    logits_BK: Tensor, partition: TaskPartition, settings: ARCSettings | None = None
) -> Detection:
    """Confidence and ratio of each row of logits."""
    logits_BK = at_least_float32(logits_BK)
    newest_K = task_indices(partition, logits_BK.device) == partition.newest
    best_B, classes_B = logits_BK.max(dim=1)
    confidence_B = (best_B - logits_BK.logsumexp(dim=1)).exp()
    newest_B = newest_K[classes_B]
    if partition.num_tasks == 1:
        nothing_B = torch.full_like(confidence_B, float("nan"))
        return Detection(classes_B, newest_B, confidence_B, nothing_B, nothing_B)
    past_BK = logits_BK.masked_fill(newest_K, -torch.inf)
    past_B = (past_BK.amax(dim=1) - past_BK.logsumexp(dim=1)).exp()
    ratio_B = confidence_B / past_B
    if settings is not None and settings.ratio == "confidence":
        ratio_B = confidence_B
    ratio_B = ratio_B.masked_fill(~newest_B, float("nan"))
    return Detection(classes_B, newest_B, confidence_B, past_B, ratio_B)


def confident_past(found: Detection, partition: TaskPartition, settings: ARCSettings) -> Tensor:
    """Assumption 1: rows to learn from."""
    if not settings.retention or (partition.num_tasks == 1 and not settings.adapt_first_task):
        return torch.zeros_like(found.newest)
    confident_B = found.confidence > settings.beta
    # With one task only, that task is the newest: `adapt_first_task` asks for its samples.
    if settings.past_only and partition.num_tasks > 1:
        confident_B = confident_B & ~found.newest
    return confident_B


def doubtful_newest(ratio_B: Tensor, partition: TaskPartition, settings: ARCSettings) -> Tensor:
    """Assumption 2: rows that look wrongly pulled to the newest task (elsewhere w is NaN)."""
    if not settings.correction or partition.num_tasks == 1:
        return torch.zeros_like(ratio_B, dtype=torch.bool)
    return ratio_B < settings.gamma


def task_indices(partition: TaskPartition, device: torch.device) -> Tensor:
    """The task of each class [K] as a tensor."""
    return torch.tensor(partition.task_of_class, device=device)
