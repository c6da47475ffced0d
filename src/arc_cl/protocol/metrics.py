"""Accuracy and forgetting, from counts. NumPy only.

`R[t, i]` is the accuracy on task i after stage t, a fraction, NaN above the diagonal.

    A_B = mean_i R[T, i]                            average accuracy after the last stage
    F   = mean_{i<T} (R[i, i] - R[T, i])            forgetting as the paper prints it; can be < 0
    F'  = mean_{i<T} (max_t R[t, i] - R[T, i])      forgetting as the released code computes it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from arc_cl.errors import ConfigurationError

Counts = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Fractions, unrounded. Both forgettings are None where there is one stage only."""

    average_accuracy: float
    overall_accuracy: float
    incremental_average: float
    forgetting: float | None
    forgetting_from_best: float | None


def accuracy_matrix(correct: Counts, total: Counts) -> NDArray[np.float64]:
    """R from counts a stage: row t holds the tasks 0 … t."""
    stages = len(total)
    matrix_TT = np.full((stages, stages), np.nan)
    for stage, (right, images) in enumerate(zip(correct, total, strict=True)):
        if not len(right) == len(images) == stage + 1 or min(images) < 1:
            raise ConfigurationError(
                f"stage {stage} counts {list(right)} correct of {list(images)}; it must count the "
                f"{stage + 1} tasks seen so far, with at least one test image each"
            )
        matrix_TT[stage, : stage + 1] = np.asarray(right) / np.asarray(images)
    return matrix_TT


def metrics(correct: Counts, total: Counts) -> Metrics:
    """All that a table asks of one sequence of tasks."""
    matrix_TT = accuracy_matrix(correct, total)
    overall_T = [sum(right) / sum(images) for right, images in zip(correct, total, strict=True)]
    last_T, past = matrix_TT[-1], len(total) - 1
    return Metrics(
        average_accuracy=float(last_T.mean()),
        overall_accuracy=overall_T[-1],
        incremental_average=float(np.mean(overall_T)),
        forgetting=float((matrix_TT.diagonal() - last_T)[:past].mean()) if past else None,
        forgetting_from_best=(
            float((np.nanmax(matrix_TT, axis=0) - last_T)[:past].mean()) if past else None
        ),
    )
