"""What all rivals of ARC share: reading a batch, turning logits into a `Decision`, checking values.

`retained` and `corrected` are ARC's detections: they are False here, even for a row that a method
learnt from. Rows with NaN or infinite entries are treated as ARC treats them: answered with those
entries read as 0, confidence and ratio NaN, and never learnt from.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from arc_cl.contracts import Adaptable
from arc_cl.core.decision import Decision, Observation, decide
from arc_cl.core.detection import at_least_float32, detect
from arc_cl.core.partition import TaskPartition
from arc_cl.core.settings import ARCSettings
from arc_cl.core.step import without_nonfinite
from arc_cl.errors import CompatibilityError, ConfigurationError

_OFF = ARCSettings(retention=False, correction=False)


def readable(batch: Tensor) -> tuple[Tensor, Tensor]:
    """A batch of features or images with non-finite entries read as 0; which rows [B] had none."""
    flat, finite_B = without_nonfinite(batch.flatten(1))
    return flat.view(batch.shape), finite_B


def answer(logits_BK: Tensor, partition: TaskPartition, finite_B: Tensor) -> Decision:
    """The best class of each row; confidence and ratio are reported, nothing follows from them."""
    logits_BK = at_least_float32(logits_BK.detach())
    found = detect(logits_BK, partition)
    seen = Observation(
        logits=logits_BK,
        confidence=found.confidence.masked_fill(~finite_B, torch.nan),
        ratio=found.ratio.masked_fill(~finite_B, torch.nan),
        retained=torch.zeros_like(found.newest),
    )
    return decide(seen, partition, _OFF)


def cross_entropy(target_BK: Tensor, logits_BK: Tensor) -> Tensor:
    """-Σ softmax(target) log softmax(logits) of each row [B]; a masked class (-∞) adds nothing.

    Gradients go through both; the entropy of a prediction is that with itself.
    """
    log_p_BK = logits_BK.log_softmax(dim=1)
    finite_BK = log_p_BK.masked_fill(log_p_BK == -torch.inf, 0.0)
    return -(target_BK.softmax(dim=1) * finite_BK).sum(dim=1)


class Rows:
    """A copy of the head's rows of the classes seen so far, in float32 or better."""

    def __init__(self, adaptable: Adaptable, partition: TaskPartition) -> None:
        head, classes = adaptable.head(), partition.num_classes
        if head.out_features < classes:
            raise CompatibilityError(
                f"the tasks hold {classes} classes, but the head has {head.out_features} rows; "
                f"give the partition of the classes that the head was grown for"
            )
        self.weight_KD = at_least_float32(head.weight.detach()[:classes].clone())
        bias = head.bias
        self.bias_K = None if bias is None else at_least_float32(bias.detach()[:classes].clone())

    def logits(self, features_BD: Tensor) -> Tensor:
        return linear(features_BD, self.weight_KD, self.bias_K)


def check(holds: bool, name: str, value: object, expected: str) -> None:
    """A setting must be as expected."""
    if not holds:
        raise ConfigurationError(f"{name} is {value!r}, expected {expected}; choose another value")


def check_least(settings: object, least: float, *names: str) -> None:
    """Each of these settings must be a finite number of at least so much."""
    for name in names:
        value = getattr(settings, name)
        check(least <= value < float("inf"), name, value, f"{least:g} or more")
