"""Classifier alignment: Gaussians stand for the classes seen, and move all heads at once.

A class is N(μ, Σ), Σ = covariance + 1e-4·I of its features when its task ended. Of Σ only the
Cholesky factor L is kept, made once: a sample is s·μ + L·ε. Old means are drawn in, for features
have moved since: s = 0.9 + 0.1·(τ + 1)/(t + 1) for a class of task τ after task t. The loss is
the cross-entropy of logits / (mean over tasks of ‖logits of the task‖) / temperature.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arc_cl.errors import DataError

_RIDGE = 1e-4
_LEAST_NORM = 1e-7


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """How the heads learn from samples: SGD, its rate a cosine over the epochs."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    temperature: float
    """0 takes the logits as they are."""


class ClassGaussians(nn.Module):
    """Mean and Cholesky factor of each class; old ones are never made anew."""

    means_KD: Tensor
    factors_KDD: Tensor

    def __init__(self, features: int, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("means_KD", like.new_zeros(0, features))
        self.register_buffer("factors_KDD", like.new_zeros(0, features, features))

    def __len__(self) -> int:
        return len(self.means_KD)

    @torch.no_grad()
    def append(self, features_of_classes: Iterable[Tensor]) -> None:
        """One more class for each tensor [N,D]."""
        means, factors = [self.means_KD], [self.factors_KDD]
        for position, features_ND in enumerate(features_of_classes, start=len(self)):
            mean_D, factor_DD = _gaussian(features_ND, position)
            means.append(mean_D[None].to(self.means_KD))
            factors.append(factor_DD[None].to(self.factors_KDD))
        self.means_KD, self.factors_KDD = torch.cat(means), torch.cat(factors)

    @torch.no_grad()
    def sample(
        self, scales_K: Tensor, count: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """`count` features of each class and their labels, shuffled."""
        means_KD = self.means_KD * scales_K.to(self.means_KD)[:, None]
        noise_KSD = torch.randn(
            len(self), count, means_KD.shape[1], dtype=means_KD.dtype, generator=generator
        )
        order_N = torch.randperm(len(self) * count, generator=generator).to(means_KD.device)
        features_KSD = torch.baddbmm(
            means_KD[:, None], noise_KSD.to(means_KD.device), self.factors_KDD.mT
        )
        return features_KSD.flatten(0, 1)[order_N], order_N // count

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *arguments: object
    ) -> None:
        """The state decides how many classes there are."""
        for name in ("means_KD", "factors_KDD"):
            if (stored := state_dict.get(prefix + name)) is not None:
                own = getattr(self, name)
                setattr(self, name, own.new_empty(len(stored), *own.shape[1:]))
        super()._load_from_state_dict(state_dict, prefix, *arguments)


def mean_scales(task_sizes: Sequence[int]) -> Tensor:
    """The factor [K] of each class's mean: 1 for the newest task, towards 0.9 for older ones."""
    tasks = len(task_sizes)
    scales_T = 0.9 + 0.1 * torch.arange(1, tasks + 1, dtype=torch.float64) / tasks
    return scales_T.repeat_interleave(torch.tensor(task_sizes))


def align(
    head: nn.Linear,
    task_sizes: Sequence[int],
    samples: Iterable[tuple[Tensor, Tensor]],
    how: Alignment,
) -> Tensor:
    """Move `head`, whose rows are the heads of tasks of these sizes; returns the steps' losses.

    `samples` gives the features and labels of one epoch after the other, in the order to take.
    """
    optimizer = torch.optim.SGD(
        head.parameters(), lr=how.lr, momentum=how.momentum, weight_decay=how.weight_decay
    )
    losses = []
    for epoch, (features_ND, labels_N) in enumerate(samples):
        for group in optimizer.param_groups:
            group["lr"] = how.lr * (1 + math.cos(math.pi * epoch / how.epochs)) / 2
        batches = zip(
            features_ND.split(how.batch_size), labels_N.split(how.batch_size), strict=True
        )
        for features_BD, labels_B in batches:
            logits_BK = balanced(head(features_BD), task_sizes, how.temperature)
            loss = cross_entropy(logits_BK, labels_B)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
    optimizer.zero_grad()
    return torch.stack(losses)


def balanced(logits_BK: Tensor, task_sizes: Sequence[int], temperature: float) -> Tensor:
    """Logits over the mean norm of those of each task, over the temperature (0: as they are)."""
    if temperature == 0:
        return logits_BK
    parts = logits_BK.split(list(task_sizes), dim=1)
    norms_BT = torch.stack([torch.linalg.vector_norm(part, dim=1) for part in parts], dim=1)
    return logits_BK / (norms_BT + _LEAST_NORM).mean(dim=1, keepdim=True) / temperature


def _gaussian(features_ND: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """Mean [D] and Cholesky factor [D,D], in float64; one image alone has no spread but 1e-4·I."""
    if len(features_ND) == 0:
        raise DataError(
            f"class {position} has no training images, at least one is needed to describe it; "
            "leave it out of the class order or check the data set"
        )
    features_ND = features_ND.double()
    mean_D = features_ND.mean(dim=0)
    centred_ND = features_ND - mean_D
    covariance_DD = centred_ND.T @ centred_ND / max(len(features_ND) - 1, 1)
    covariance_DD.diagonal().add_(_RIDGE)
    factor_DD, failed = torch.linalg.cholesky_ex(covariance_DD)
    if failed or not factor_DD.isfinite().all():
        raise DataError(
            f"the features of class {position} are not finite numbers; training diverged, so "
            "lower lr and lr_backbone"
        )
    return mean_D, factor_DD
