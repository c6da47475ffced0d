"""One batch of ARC: logits, detection, one gradient step, new logits. `decide` then answers.

This is the definition. `replay` is a faster way to the same result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arc_cl.core.decision import Observation
from arc_cl.core.detection import confident_past, detect
from arc_cl.core.head import HeadState
from arc_cl.core.partition import TaskPartition
from arc_cl.core.retention import retention_gradient
from arc_cl.core.settings import ARCSettings


def advance(
    state: HeadState, features_BD: Tensor, partition: TaskPartition, settings: ARCSettings
) -> Observation:
    """Look at one batch of features in the head's dtype, and move `state` by at most one step."""
    features_BD, finite_B = without_nonfinite(features_BD)
    note_rows(state, features_BD, finite_B)
    logits_BK = state.logits(features_BD, partition.num_classes)
    found = detect(logits_BK, partition, settings)
    retained_B = confident_past(found, partition, settings) & finite_B
    if retained_B.any():
        labels_M = found.classes[retained_B]
        _retain(state, features_BD[retained_B], logits_BK[retained_B], labels_M, settings)
        if settings.recompute:
            logits_BK = state.logits(features_BD, partition.num_classes)
    # c and w say nothing of a row that was not finite.
    return Observation(
        logits=logits_BK,
        confidence=found.confidence.masked_fill(~finite_B, torch.nan),
        ratio=found.ratio.masked_fill(~finite_B, torch.nan),
        retained=retained_B,
    )


def step_by_step(
    state: HeadState,
    features_ND: Tensor,
    partition: TaskPartition,
    settings: ARCSettings,
    batch_size: int,
) -> Observation:
    """`advance` over consecutive batches."""
    batches = features_ND.split(batch_size)
    return Observation.join([advance(state, batch, partition, settings) for batch in batches])


def without_nonfinite(features_BD: Tensor) -> tuple[Tensor, Tensor]:
    """Features with NaN and infinite entries read as 0, and which rows [B] had none."""
    finite_BD = features_BD.isfinite()
    finite_B = finite_BD.all(dim=1)
    if finite_B.all():
        return features_BD, finite_B
    return features_BD.where(finite_BD, torch.zeros_like(features_BD)), finite_B


def note_rows(state: HeadState, features_BD: Tensor, finite_B: Tensor) -> None:
    """Count what this batch brings, before its step: bad rows, and norms for the relative step."""
    good = int(finite_B.sum())
    state.nonfinite_rows += len(features_BD) - good
    state.norm_rows += good
    state.norm_total += features_BD[finite_B].double().square().sum().item()


def _retain(
    state: HeadState,
    features_MD: Tensor,
    logits_MK: Tensor,
    labels_M: Tensor,
    settings: ARCSettings,
) -> None:
    """One step on the mean loss of the M retained rows; undone where it drifts too far."""
    gradient_MK = retention_gradient(logits_MK, labels_M, settings) / len(labels_M)
    if settings.weight_decay:  # decay reaches the rows of unseen classes too
        unseen = len(state.weight) - gradient_MK.shape[1]
        gradient_MK = torch.nn.functional.pad(gradient_MK, (0, unseen))
    gradients = {"weight": gradient_MK.T @ features_MD, "bias": gradient_MK.sum(dim=0)}
    before = state.snapshot() if settings.max_drift is not None else None
    state.descend(gradients, settings)
    if before is not None and settings.max_drift is not None and state.drift() > settings.max_drift:
        state.weight, state.bias, state.memory = before.weight, before.bias, before.memory
        state.steps = before.steps
        state.undone_steps += 1
