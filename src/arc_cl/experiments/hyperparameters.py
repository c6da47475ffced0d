"""Values that the paper's authors released, each in exactly one place. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReleasedARC:
    """ARC's values in one configuration file of the release (`exps/<learner>_<data>.json`)."""

    lr: float
    beta: float
    gamma: float
    temperature: float
    label_smoothing: float
    batch_size: int


FINETUNE_CIFAR100 = ReleasedARC(
    lr=3e-6, beta=0.8, gamma=1.5, temperature=1.1, label_smoothing=0.1, batch_size=16
)
