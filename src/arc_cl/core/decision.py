"""What ARC answers for a batch or a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from arc_cl.core.correction import candidate_table, choose_task
from arc_cl.core.detection import doubtful_newest, task_indices
from arc_cl.core.partition import TaskPartition
from arc_cl.core.settings import ARCSettings
from arc_cl.errors import ConfigurationError


@dataclass(frozen=True)
class Decision:
    """The classes of B rows, and why. Tensors lie where the features lay."""

    classes: Tensor
    """[B] int64, the answer."""
    logits: Tensor
    """[B,K] what the decision was made from."""
    confidence: Tensor
    """[B] c, the largest softmax value before the step."""
    ratio: Tensor
    """[B] w = c/ĉ; NaN where the argmax is not in the newest task, or there is one task only."""
    retained: Tensor
    """[B] bool, the row was learnt from."""
    corrected: Tensor
    """[B] bool, the row was re-decided (which may confirm it)."""
    tasks: Tensor
    """[B] int64, the task of `classes`."""
    _chosen: Tensor = field(repr=False)  # [B] int64, row of `_candidates`
    _candidates: Tensor = field(repr=False)  # [T+1,K] bool

    def __len__(self) -> int:
        return len(self.classes)

    def top(self, k: int) -> Tensor:
        """The k best classes [B,k] among the candidates, best first; -1 where they run out."""
        if k < 1:
            raise ConfigurationError(f"top({k}): k must be at least 1.")
        width = min(k, self.logits.shape[1])
        open_BK = self._candidates[self._chosen]
        best = self.logits.masked_fill(~open_BK, -torch.inf).topk(width, dim=1)
        classes = best.indices.masked_fill(~open_BK.gather(1, best.indices), -1)
        return torch.nn.functional.pad(classes, (0, k - width), value=-1)


@dataclass(frozen=True)
class Observation:
    """What one or more batches showed, before any correction. Fields as in `Decision`."""

    logits: Tensor  # [B,K] those to decide on
    confidence: Tensor  # [B], like all below of the logits before the step
    ratio: Tensor
    retained: Tensor

    @classmethod
    def join(cls, parts: Sequence[Observation]) -> Observation:
        """Consecutive batches as one."""
        names = [one.name for one in fields(cls)]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def best_classes(logits_BK: Tensor) -> Tensor:
    """The argmax of each row; on the CPU by numpy, which is three times as fast."""
    if logits_BK.device.type == "cpu" and logits_BK.numel():
        return torch.from_numpy(logits_BK.numpy().argmax(axis=1))
    return logits_BK.argmax(dim=1)


def decide(seen: Observation, partition: TaskPartition, settings: ARCSettings) -> Decision:
    """Answer the best class, but re-decide the doubtful rows among the classes of another task."""
    corrected_B = doubtful_newest(seen.ratio, partition, settings)
    chosen_B = torch.full_like(corrected_B, partition.num_tasks, dtype=torch.int64)
    classes_B = best_classes(seen.logits)
    candidates = candidate_table(partition, settings, seen.logits.device)
    rows = corrected_B.nonzero()[:, 0]
    if len(rows):
        logits = seen.logits[rows]
        chosen = choose_task(logits, partition, settings)
        chosen_B[rows] = chosen
        classes_B[rows] = logits.masked_fill(~candidates[chosen], -torch.inf).argmax(dim=1)
    return Decision(
        classes=classes_B,
        logits=seen.logits,
        confidence=seen.confidence,
        ratio=seen.ratio,
        retained=seen.retained,
        corrected=corrected_B,
        tasks=task_indices(partition, classes_B.device)[classes_B],
        _chosen=chosen_B,
        _candidates=candidates,
    )
