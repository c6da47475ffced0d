"""LAME (Boudiaf et al., CVPR 2022): neighbours in a batch should be given the same classes.

    min over y in the simplex of  Σ_i KL(y_i ‖ p_i) - strength/2 · Σ_ij w_ij y_iᵀy_j
    y_i ← softmax(log p_i + strength · Σ_j w_ij y_j)        until the energy rests

p: softmax of the plain logits; w_ij = 1 where j is one of the `neighbours` nearest rows to i by
the angle between features. Every batch is answered by itself: a batch of one as without LAME.
The decision's logits are log y.
*Deviations*: the energy has a factor of 1/2 before its second term; the update is the exact fixed
point of that. Only the stop looks at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from arc_cl.adapt._answers import answer, check_least, readable
from arc_cl.contracts import Adaptable
from arc_cl.core.decision import Decision
from arc_cl.core.detection import at_least_float32
from arc_cl.core.partition import TaskPartition


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of LAME."""

    neighbours: int = 5
    """Rows of the batch that each row listens to; all others where there are fewer."""
    strength: float = 1.0
    """Weight of the neighbours against the row's own prediction; 0 switches them off."""
    symmetric: bool = False
    """Listen both ways, by half: (w + wᵀ)/2."""
    iterations: int = 100
    """At most so many updates."""
    tolerance: float = 1e-8
    """Stop where the energy changes by no more than this share of itself."""

    def __post_init__(self) -> None:
        check_least(self, 1, "neighbours", "iterations")
        check_least(self, 0, "strength", "tolerance")


class LAME:
    """Keeps nothing from batch to batch."""

    consumes: Literal["features", "images"] = "features"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def start(self, adaptable: Adaptable, partition: TaskPartition) -> None:
        self._adaptable = adaptable
        self._partition = partition

    @torch.no_grad()
    def predict(self, batch: Tensor) -> Decision:
        features_BD, finite_B = readable(batch)
        logits_BK = at_least_float32(self._adaptable.classify(features_BD))
        affinity_BB = self._affinity(at_least_float32(features_BD), finite_B).to(logits_BK)
        log_y_BK = self._smoothed(logits_BK.log_softmax(dim=1), affinity_BB)
        return answer(log_y_BK, self._partition, finite_B)

    def finish(self) -> None:
        del self._adaptable

    def _affinity(self, features_BD: Tensor, finite_B: Tensor) -> Tensor:
        """w [B,B]: rows that are not finite neither listen nor are listened to."""
        directions_BD = normalize(features_BD, dim=1)
        strangers_BB = ~(finite_B[:, None] & finite_B)
        strangers_BB.fill_diagonal_(True)
        nearness_BB = (directions_BD @ directions_BD.T).masked_fill(strangers_BB, -torch.inf)
        nearest = nearness_BB.topk(min(self.settings.neighbours, len(features_BD) - 1), dim=1)
        is_near = (nearest.values > -torch.inf).to(features_BD)
        affinity_BB = torch.zeros_like(nearness_BB).scatter_(1, nearest.indices, is_near)
        return (affinity_BB + affinity_BB.T) / 2 if self.settings.symmetric else affinity_BB

    def _smoothed(self, log_p_BK: Tensor, affinity_BB: Tensor) -> Tensor:
        """log y [B,K]."""
        log_y_BK, energy = log_p_BK, self._energy(log_p_BK, log_p_BK, affinity_BB)
        for _ in range(self.settings.iterations):
            heard_BK = self.settings.strength * (affinity_BB @ log_y_BK.exp())
            log_y_BK = (log_p_BK + heard_BK).log_softmax(dim=1)
            before, energy = energy, self._energy(log_p_BK, log_y_BK, affinity_BB)
            if abs(energy - before) <= self.settings.tolerance * abs(before):
                break
        return log_y_BK

    def _energy(self, log_p_BK: Tensor, log_y_BK: Tensor, affinity_BB: Tensor) -> float:
        y_BK = log_y_BK.exp()
        surprise_BK = (log_y_BK - log_p_BK).masked_fill(y_BK == 0, 0.0)
        agreement_BK = self.settings.strength / 2 * (affinity_BB @ y_BK)
        return float((y_BK * (surprise_BK - agreement_BK)).sum())


def create(settings: Settings) -> LAME:
    return LAME(settings)
