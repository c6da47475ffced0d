"""T3A (Iwasawa & Matsuo, NeurIPS 2021): class prototypes from the head and from sure test rows.

    S_k      the head's row of class k, and the features whose pseudo-label is k; of these the
             `supports` ones with the lowest entropy
    c_k      Σ_{s in S_k} s/‖s‖, scaled to length 1
    logits   f·c_k

Pseudo-labels and entropies come from the head as it was trained; a batch joins before it is
answered. No gradients.
*Deviations*: features are scaled as in the authors' code (their text averages them as they are);
the head's row of class k supports class k as in their text (their code gives it to the class that
the head would say). Among equal entropies the earlier one stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappush, heappushpop
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from arc_cl.adapt._answers import Rows, answer, check_least, cross_entropy, readable
from arc_cl.contracts import Adaptable
from arc_cl.core.decision import Decision
from arc_cl.core.partition import TaskPartition

_Support = tuple[float, int, Tensor]
"""Minus its entropy, minus its number in order of arrival (never equal), its direction [D]."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of T3A."""

    supports: int = 100
    """Supports kept a class (the authors choose among 1, 5, 20, 50, 100 and all); 0 keeps all."""

    def __post_init__(self) -> None:
        check_least(self, 0, "supports")


class T3A:
    """Keeps supports as directions; the head that was lent is only read."""

    consumes: Literal["features", "images"] = "features"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @torch.no_grad()
    def start(self, adaptable: Adaptable, partition: TaskPartition) -> None:
        self._partition = partition
        self._rows = Rows(adaptable, partition)
        self._supports: list[list[_Support]] = [[] for _ in range(partition.num_classes)]
        self._arrived = 0
        weight_KD = self._rows.weight_KD
        self._prototypes_KD = torch.zeros_like(weight_KD)
        self._join(weight_KD, torch.arange(len(weight_KD)))

    @torch.no_grad()
    def predict(self, batch: Tensor) -> Decision:
        features_BD, finite_B = readable(batch.to(self._prototypes_KD.dtype))
        trusted_MD = features_BD[finite_B]
        self._join(trusted_MD, self._rows.logits(trusted_MD).argmax(dim=1))
        return answer(features_BD @ self._prototypes_KD.T, self._partition, finite_B)

    def finish(self) -> None:
        del self._rows, self._supports, self._prototypes_KD

    def _join(self, features_MD: Tensor, labels_M: Tensor) -> None:
        logits_MK = self._rows.logits(features_MD)
        entropies_M = cross_entropy(logits_MK, logits_MK)
        labels = labels_M.tolist()
        for label, entropy, direction_D in zip(
            labels, entropies_M.tolist(), normalize(features_MD, dim=1), strict=True
        ):
            # A copy, lest one support keep the whole batch in memory.
            self._keep(self._supports[label], (-entropy, -self._arrived, direction_D.clone()))
            self._arrived += 1
        for label in set(labels):
            directions = torch.stack([direction for _, _, direction in self._supports[label]])
            self._prototypes_KD[label] = normalize(directions.sum(dim=0), dim=0)

    def _keep(self, supports: list[_Support], new: _Support) -> None:
        if self.settings.supports and len(supports) == self.settings.supports:
            heappushpop(supports, new)
        else:
            heappush(supports, new)


def create(settings: Settings) -> T3A:
    return T3A(settings)
