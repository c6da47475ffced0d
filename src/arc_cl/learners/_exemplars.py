"""Exemplars: which images of old classes are kept, and the nearest-mean answers they give.

Herding, on features divided by their norm: the k-th exemplar of a class is the image f that is
left with the smallest ‖μ − (Σ chosen + f) / k‖, μ the class mean. A class mean for nearest-mean
answers is that of the kept exemplars under the network of today, divided by its norm.

*Deviations* from the release: a class with too few images keeps all of them, and that is all;
`sticky_quota` and `last_mean_only` bring the released behaviour back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from arc_cl.contracts import TaskInfo, TrainingImages
from arc_cl.errors import CompatibilityError, ConfigurationError, DataError

_EPSILON = 1e-8
_BUFFERS = ("numbers_N", "classes_N", "means_KD")


class Exemplars(nn.Module):
    """The kept images by number, class by class in herding order, and the class means.

    With `memory` 0 it stays empty.

    `sticky_quota`: the count of a class with too few images also limits the classes after it
    ("total"), or is an error ("per_class"), as in iCaRL's and DER's released code.
    `last_mean_only`: of the new classes only the last gets its mean, the others stay 0
    ("total"), as in MEMO's released code.
    """

    numbers_N: Tensor
    classes_N: Tensor
    means_KD: Tensor

    def __init__(
        self,
        memory: int,
        rule: Literal["total", "per_class"],
        *,
        sticky_quota: bool = False,
        last_mean_only: bool = False,
    ) -> None:
        super().__init__()
        self.memory, self.rule = memory, rule
        self._sticky_quota = sticky_quota
        self._last_mean_only = last_mean_only and rule == "total"
        self.register_buffer("numbers_N", torch.empty(0, dtype=torch.int64))
        self.register_buffer("classes_N", torch.empty(0, dtype=torch.int64))
        self.register_buffer("means_KD", torch.empty(0, 0))

    def check(self, task: TaskInfo) -> None:
        """Refuse a memory that cannot last for the whole sequence, before anything is trained."""
        if self.memory and self.rule == "total" and self.memory < task.classes:
            raise ConfigurationError(
                f"memory={self.memory} images in total leave none for some of {task.classes} "
                f"classes; give at least {task.classes}, or memory_rule='per_class'"
            )

    def quota(self, classes: int) -> int:
        """Images a class, when so many classes are seen."""
        return self.memory // classes if self.rule == "total" else self.memory

    @torch.no_grad()
    def update(
        self, task: TaskInfo, images: TrainingImages, features: Callable[[Tensor], Tensor]
    ) -> None:
        """Cut old classes to the new quota, choose from the new ones, and take all means anew."""
        if self.memory == 0:
            return
        quota = self.quota(task.seen_classes)
        numbers = [self.of_class(position)[:quota] for position in range(task.old_classes)]
        means = self._means_of_old(numbers, images, features)
        for position in range(task.old_classes, task.seen_classes):
            candidates_N = images.of_class(position).cpu()
            quota = self._checked_quota(quota, len(candidates_N), position)
            features_ND = normalised(images.apply(features, candidates_N))
            chosen_N = herd(features_ND, quota)
            mean_D = _mean(features_ND[chosen_N])
            skipped = self._last_mean_only and position < task.seen_classes - 1
            means.append(torch.zeros_like(mean_D) if skipped else mean_D)
            numbers.append(candidates_N[chosen_N.cpu()])
        counts = torch.tensor([len(numbers_N) for numbers_N in numbers])
        self.numbers_N = torch.cat(numbers)
        self.classes_N = torch.repeat_interleave(torch.arange(task.seen_classes), counts)
        self.means_KD = torch.stack(means)

    def of_class(self, position: int) -> Tensor:
        """Numbers of the kept images of one class, in herding order."""
        return self.numbers_N[self.classes_N == position].cpu()

    def numbers(self) -> Tensor:
        """Numbers of all kept images."""
        return self.numbers_N.cpu()

    def distances(self, features_BD: Tensor) -> Tensor:
        """Squared distances [B,K] of normalised features to the class means; nearest answers."""
        features_BD = normalised(features_BD)
        means_KD = self.means_KD.to(features_BD.device, features_BD.dtype)
        squares_B, squares_K = features_BD.square().sum(dim=1), means_KD.square().sum(dim=1)
        products_BK: Tensor = features_BD @ means_KD.T
        return squares_B[:, None] + squares_K - 2 * products_BK

    @staticmethod
    def _means_of_old(
        numbers: list[Tensor], images: TrainingImages, features: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        if not numbers:
            return []
        features_ND = normalised(images.apply(features, torch.cat(numbers)))
        return [_mean(part) for part in features_ND.split([len(each) for each in numbers])]

    def _checked_quota(self, quota: int, available: int, position: int) -> int:
        if available == 0:
            raise DataError(f"class {position} has no training images; leave the class out")
        if available >= quota or not self._sticky_quota:
            return quota
        if self.rule == "per_class":
            raise CompatibilityError(
                f"class {position} has {available} images, but sticky_quota=True with "
                f"memory_rule='per_class' needs {quota} of each class; set sticky_quota=False"
            )
        return available

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        """The buffers take the sizes of the state first: how many are kept is part of it."""
        for name in _BUFFERS:
            stored = state_dict.get(prefix + name)
            if isinstance(stored, Tensor):
                setattr(self, name, torch.empty_like(stored, device=getattr(self, name).device))
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)


def herd(features_ND: Tensor, count: int) -> Tensor:
    """Rows of the `count` (1 or more) exemplars as they are chosen; all where there are fewer.

    ‖μ − (S + f)/k‖² orders candidates as ‖f‖² − 2 f·(kμ − S) does, so a step is one product.
    """
    mean_D = features_ND.mean(dim=0)
    scores_N = features_ND.square().sum(dim=1)
    residual_D = mean_D.clone()
    chosen = []
    for _ in range(min(count, len(features_ND))):
        best = (scores_N - 2 * features_ND @ residual_D).argmin(dim=0, keepdim=True)
        chosen.append(best)
        scores_N.index_fill_(0, best, torch.inf)
        residual_D += mean_D - features_ND.index_select(0, best)[0]
    return torch.cat(chosen)


def normalised(features_ND: Tensor) -> Tensor:
    """Rows divided by their norm, in float32 at least."""
    kind = torch.promote_types(features_ND.dtype, torch.float32)
    features_ND = features_ND.to(kind)
    norms_N1: Tensor = torch.linalg.vector_norm(features_ND, dim=1, keepdim=True)
    return features_ND / (norms_N1 + _EPSILON)


def _mean(features_ND: Tensor) -> Tensor:
    mean_D = features_ND.mean(dim=0)
    norm: Tensor = torch.linalg.vector_norm(mean_D)
    return mean_D / norm
