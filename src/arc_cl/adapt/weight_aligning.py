"""Weight aligning (WA; Zhao et al., CVPR 2020): new rows of the head no longer than old ones.

    w_k ← (mean over old classes of ‖w‖ / mean over the newest task's classes of ‖w‖) · w_k

for the classes k of the newest task. It needs no data and never changes within a stream.
*Deviations*: theirs is done after each task, before the next is learnt, so that factors build up;
this is the model as it was trained, aligned once. Biases stay, as in common implementations; the
text has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from arc_cl.adapt._answers import Rows, answer, readable
from arc_cl.contracts import Adaptable
from arc_cl.core.decision import Decision
from arc_cl.core.detection import task_indices
from arc_cl.core.partition import TaskPartition


@dataclass(frozen=True, kw_only=True)
class Settings:
    """There is nothing to set."""


class WeightAligning:
    """Answers from an aligned copy of the head."""

    consumes: Literal["features", "images"] = "features"

    @torch.no_grad()
    def start(self, adaptable: Adaptable, partition: TaskPartition) -> None:
        self._partition = partition
        self._rows = Rows(adaptable, partition)
        weight_KD = self._rows.weight_KD
        newest_K = task_indices(partition, weight_KD.device) == partition.newest
        norms_K = torch.linalg.vector_norm(weight_KD, dim=1)
        if partition.num_tasks > 1 and norms_K[newest_K].any():
            ratio = norms_K[~newest_K].mean() / norms_K[newest_K].mean()
            weight_KD[newest_K] *= ratio

    @torch.no_grad()
    def predict(self, batch: Tensor) -> Decision:
        features_BD, finite_B = readable(batch.to(self._rows.weight_KD.dtype))
        return answer(self._rows.logits(features_BD), self._partition, finite_B)

    def finish(self) -> None:
        del self._rows


def create(settings: Settings) -> WeightAligning:
    return WeightAligning()
