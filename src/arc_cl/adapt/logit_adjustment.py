"""Logits adjusted so that the stream's predicted frequencies come out even. *Assumes they are.*

    q_g(x) ∝ a_g m_g(x),  m_g(x) = Σ_{k in g} softmax(z(x))_k,  g a task or a class
    find a: mean over the window of q_g = 1/G;     answer softmax(z_k + log a_{g(k)})

The division by expected frequencies is logit adjustment (Menon et al., ICLR 2021); that they are
to come out even makes it Sinkhorn's scaling of the window's matrix m: a_g ← a_g (1/G) / mean q_g.
The window holds the last rows of the stream up to the present batch, and rows that say nothing
(m_g = 1/G) as a prior. Where the window is *not* even over the groups (few classes, or one class
after the other) this does harm: a stream of old tasks only is pushed to the new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from arc_cl.adapt._answers import answer, check, check_least, readable
from arc_cl.contracts import Adaptable
from arc_cl.core.decision import Decision
from arc_cl.core.detection import at_least_float32, task_indices
from arc_cl.core.partition import TaskPartition


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of logit adjustment on an even stream."""

    over: Literal["tasks", "classes"] = "tasks"
    """What is to come out evenly often. `classes` gains more on an even stream, and loses more."""
    memory: int = 2000
    """Rows of the stream, the last ones, whose frequencies are made even."""
    prior: float = 5.0
    """Rows a task or class that say nothing, added to the window; keeps the beginning calm."""
    strength: float = 1.0
    """Share of log a that is added; 0 switches the method off."""
    iterations: int = 10
    """Updates of a, a batch; each batch goes on from the a of the one before."""

    def __post_init__(self) -> None:
        check(self.over in ("tasks", "classes"), "over", self.over, "'tasks' or 'classes'")
        check_least(self, 1, "memory", "iterations")
        check_least(self, 0, "strength")
        # Without it a group that nobody predicts would be scaled up without bound.
        check(0 < self.prior < float("inf"), "prior", self.prior, "above 0")


class LogitAdjustment:
    """Remembers of each row of the window what its softmax says of each group."""

    consumes: Literal["features", "images"] = "features"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def start(self, adaptable: Adaptable, partition: TaskPartition) -> None:
        self._adaptable = adaptable
        self._partition = partition
        weight = adaptable.head().weight
        tasks_K = task_indices(partition, weight.device)
        classes_K = torch.arange(partition.num_classes, device=weight.device)
        self._groups_K = tasks_K if self.settings.over == "tasks" else classes_K
        self._members_KG = one_hot(self._groups_K).to(at_least_float32(weight.detach()))
        self._log_scale_G = self._members_KG.new_zeros(self._members_KG.shape[1])
        self._window_NG = self._members_KG.new_zeros(0, self._members_KG.shape[1])

    @torch.no_grad()
    def predict(self, batch: Tensor) -> Decision:
        features_BD, finite_B = readable(batch)
        logits_BK = at_least_float32(self._adaptable.classify(features_BD))
        self._remember(logits_BK[finite_B])
        self._make_even()
        scale_K = self.settings.strength * self._log_scale_G[self._groups_K]
        return answer(logits_BK + scale_K.to(logits_BK), self._partition, finite_B)

    def finish(self) -> None:
        del self._adaptable, self._window_NG

    def _remember(self, logits_MK: Tensor) -> None:
        """log m of the new rows, after those of the window."""
        masses_MG = logits_MK.to(self._members_KG).softmax(dim=1) @ self._members_KG
        new_MG = masses_MG.clamp_min(torch.finfo(masses_MG.dtype).tiny).log()
        self._window_NG = torch.cat([self._window_NG, new_MG])[-self.settings.memory :]

    def _make_even(self) -> None:
        rows, groups = self._window_NG.shape
        silent = self.settings.prior * groups
        for _ in range(self.settings.iterations):
            found_NG = (self._window_NG + self._log_scale_G).softmax(dim=1)
            total_G = found_NG.sum(dim=0) + silent * self._log_scale_G.softmax(dim=0)
            self._log_scale_G = self._log_scale_G - total_G.log() + log((rows + silent) / groups)


def create(settings: Settings) -> LogitAdjustment:
    return LogitAdjustment(settings)
