"""Correction: which task a doubtful row belongs to, by the task-based softmax score (paper §3.3).

    S_i = max_{k in task i} exp(z_k/τ_i) / Σ_{k in tasks ≤ i} exp(z_k/τ_i),   τ_i = T^(t-i)

so the newest task t has τ = 1, and an older one fewer rivals and a higher temperature.
Deviation: the printed range of the maximum starts one class too early; here it is task i itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arc_cl.core.detection import at_least_float32, task_indices
from arc_cl.core.partition import TaskPartition
from arc_cl.core.settings import ARCSettings

_NUMBERS_AT_ONCE = 1 << 24  # rows x tasks x classes


def log_task_scores(logits_BK: Tensor, partition: TaskPartition, temperature: float) -> Tensor:
    """log S_i of each row and task [B,T]; -inf for a task whose classes are all masked."""
    rows = max(1, _NUMBERS_AT_ONCE // (partition.num_tasks * partition.num_classes))
    parts = at_least_float32(logits_BK).split(rows)
    return torch.cat([_log_task_scores(part, partition, temperature) for part in parts])


def _log_task_scores(logits_BK: Tensor, partition: TaskPartition, temperature: float) -> Tensor:
    task_K = task_indices(partition, logits_BK.device)
    task_T1 = torch.arange(partition.num_tasks, device=logits_BK.device)[:, None]
    tau = [temperature ** (partition.newest - task) for task in range(partition.num_tasks)]
    scaled_BTK = logits_BK[:, None] / logits_BK.new_tensor(tau)[:, None]
    total_BT = scaled_BTK.masked_fill(task_K > task_T1, -torch.inf).logsumexp(dim=2)
    best_BT = scaled_BTK.masked_fill(task_K != task_T1, -torch.inf).amax(dim=2)
    return torch.where(best_BT == -torch.inf, best_BT, best_BT - total_BT)


def task_scores(logits_BK: Tensor, partition: TaskPartition, temperature: float) -> Tensor:
    """S_i of each row and task [B,T]."""
    return log_task_scores(logits_BK, partition, temperature).exp()


def choose_task(logits_BK: Tensor, partition: TaskPartition, settings: ARCSettings) -> Tensor:
    """The task [B] whose classes a corrected row may take; among equal scores the newer one."""
    if settings.correction_rule == "mask_newest":
        return torch.full_like(logits_BK[:, 0], partition.newest - 1, dtype=torch.int64)
    scores_BT = log_task_scores(logits_BK, partition, settings.temperature)
    return partition.newest - scores_BT.flip(1).argmax(dim=1)


def candidate_table(
    partition: TaskPartition, settings: ARCSettings, device: torch.device
) -> Tensor:
    """[T+1,K] bool: the classes open to a row whose chosen task is i; row T is "all of them"."""
    task_K = task_indices(partition, device)
    tasks_T1 = torch.arange(partition.num_tasks, device=device)[:, None]
    cumulative = settings.candidates == "cumulative" or settings.correction_rule == "mask_newest"
    chosen_TK = task_K <= tasks_T1 if cumulative else task_K == tasks_T1
    everything_1K = torch.ones_like(chosen_TK[:1])
    return torch.cat([chosen_TK, everything_1K])
