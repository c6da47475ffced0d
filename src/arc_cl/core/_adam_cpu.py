"""Adam replay on the CPU.

Adam is not linear in past gradients, so no block of steps can be summed up. What remains is to go
over the head once a step: while a row of the weight is in the cache its gradient is formed, its
moments and the row itself are moved, and its products with the rows of this batch (for the new
logits) and of the next batch are taken.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from arc_cl.core._compile import compiled
from arc_cl.core._rows import (
    Array,
    Rules,
    add_row,
    answer_row,
    copy_row,
    fill_row,
    gradient_row,
    note_norm,
    product,
    step_size,
    whole_lanes,
)
from arc_cl.core._sheet import Sheet
from arc_cl.core._stream import Stream
from arc_cl.core.decision import Observation
from arc_cl.core.head import ADAM_BETAS, ADAM_EPSILON, HeadState
from arc_cl.core.partition import TaskPartition
from arc_cl.core.settings import ARCSettings


class Parameter(NamedTuple):
    """A weight [R,D] or bias [R,1] with Adam's two moments."""

    value: Array
    mean: Array
    square: Array


class Batch(NamedTuple):
    """Scratch for a batch of B rows."""

    logits_BP: Array
    next_logits_BP: Array
    gradient_BP: Array
    row_B: Array  # the retained rows, as rows of the stream
    gradient_D: Array  # the gradient of one row of the weight
    e_P: Array


def replay_adam(
    state: HeadState, stream: Stream, partition: TaskPartition, settings: ARCSettings
) -> Observation:
    """What step-by-step Adam shows, and `state` moved as far."""
    sheet = Sheet(stream, partition)
    norms = np.array([state.norm_total, state.norm_rows], dtype=np.float64)
    moving_rows = len(state.weight) if settings.weight_decay else partition.num_classes
    bias = _parameter(state, "bias", moving_rows) if state.bias is not None else None
    batch = _scratch(stream, partition)
    past_P = np.zeros_like(batch.e_P)
    past_P[: partition.num_classes] = partition.array < partition.newest
    state.steps = run_stream(
        _parameter(state, "weight", moving_rows),
        _no_bias(batch.e_P.dtype) if bias is None else bias,
        (stream.features_ND.numpy(), stream.norm_N.numpy(), stream.finite_N.numpy()),
        past_P,
        batch,
        norms,
        state.steps,
        Rules.of(partition, settings),
        sheet.answers,
    )
    state.norm_total, state.norm_rows = float(norms[0]), int(norms[1])
    return sheet.seen


def _parameter(state: HeadState, name: str, rows: int) -> Parameter:
    tensors = (
        state.parameters()[name],
        state.memory_of("mean", name),
        state.memory_of("square", name),
    )
    return Parameter(*(tensor[:rows].view(rows, -1).numpy() for tensor in tensors))


def _no_bias(dtype: Any) -> Parameter:
    nothing = np.zeros((0, 1), dtype)
    return Parameter(nothing, nothing, nothing)


def _scratch(stream: Stream, partition: TaskPartition) -> Batch:
    B, D = stream.batch_size, stream.features_ND.shape[1]
    dtype = torch.empty(0, dtype=stream.features_ND.dtype).numpy().dtype
    P = whole_lanes(partition.num_classes)
    return Batch(
        logits_BP=np.full((B, P), -np.inf, dtype),
        next_logits_BP=np.full((B, P), -np.inf, dtype),
        gradient_BP=np.zeros((B, P), dtype),
        row_B=np.zeros(B, np.int64),
        gradient_D=np.zeros(D, dtype),
        e_P=np.zeros(P, dtype),
    )


@compiled
def run_stream(
    weight: Any,
    bias: Any,
    stream: Any,
    past_P: Array,
    batch: Any,
    norms: Array,
    steps: int,
    rules: Any,
    answers: Any,
) -> int:
    """All batches of a stream (features, norms, finite); returns the steps taken in all."""
    features_ND, norm_N, finite_N = stream
    N, K = answers.logits_NK.shape
    B = batch.row_B.shape[0]
    here_BP, next_BP = batch.logits_BP, batch.next_logits_BP
    take_logits(weight, bias, features_ND, 0, min(B, N), K, here_BP)
    for start in range(0, N, B):
        stop, next_stop = min(start + B, N), min(start + 2 * B, N)
        count = 0
        for j in range(start, stop):
            z_P = here_BP[j - start]
            label, kept = answer_row(z_P, batch.e_P, j, past_P, finite_N[j], answers, rules)
            if kept:
                gradient_row(z_P, batch.e_P, label, rules, batch.gradient_BP[count])
                batch.row_B[count] = j
                count += 1
            if finite_N[j]:
                note_norm(norms, norm_N[j])
        if count > 0:
            steps += 1
            batch.gradient_BP[:count] /= batch.gradient_BP.dtype.type(count)
            rate = step_size(norms, rules)
            renewed = stop if rules.recompute else start
            move_head(weight, bias, features_ND, batch, count, rate, steps, rules.weight_decay,
                      (start, renewed, stop, next_stop, K), here_BP, next_BP)  # fmt: skip
        else:
            take_logits(weight, bias, features_ND, stop, next_stop, K, next_BP)
        for j in range(start, stop):
            copy_row(here_BP[j - start], answers.logits_NK[j])
        here_BP, next_BP = next_BP, here_BP
    return steps


@compiled
def move_head(
    weight: Any,
    bias: Any,
    features_ND: Array,
    batch: Any,
    count: int,
    rate: float,
    steps: int,
    decay: float,
    spans: Any,
    here_BP: Array,
    next_BP: Array,
) -> None:
    """One Adam step, row by row, and the logits that the moved rows give."""
    start, renewed, stop, next_stop, K = spans
    gradient_D = batch.gradient_D
    step = rate / (1 - ADAM_BETAS[0] ** steps)
    root = 1 / math.sqrt(1 - ADAM_BETAS[1] ** steps)
    bias_gradient = np.zeros(1, gradient_D.dtype)
    last = features_ND.shape[0] - 1
    for r in range(weight.value.shape[0]):
        fill_row(gradient_D, 0.0)
        bias_gradient[0] = 0
        if r < K:
            for i in range(count):
                g = batch.gradient_BP[i, r]
                bias_gradient[0] += g
                add_row(features_ND[batch.row_B[i]], g, gradient_D)
        here, following = move_row(
            weight.value[r], weight.mean[r], weight.square[r], gradient_D, step, root, decay,
            features_ND[start], features_ND[min(stop, last)],
        )  # fmt: skip
        offset = gradient_D.dtype.type(0)
        if bias.value.shape[0] > 0:
            move_row(
                bias.value[r], bias.mean[r], bias.square[r], bias_gradient, step, root, decay,
                gradient_D[:1], gradient_D[:1],
            )  # fmt: skip
            offset = bias.value[r, 0]
        if r < K:
            if renewed > start:
                here_BP[0, r] = here + offset
            for j in range(start + 1, renewed):
                here_BP[j - start, r] = product(weight.value[r], features_ND[j]) + offset
            next_BP[0, r] = following + offset
            for j in range(stop + 1, next_stop):
                next_BP[j - stop, r] = product(weight.value[r], features_ND[j]) + offset


@compiled
def move_row(
    value_D: Array,
    mean_D: Array,
    square_D: Array,
    gradient_D: Array,
    step: float,
    root: float,
    decay: float,
    first_D: Array,
    second_D: Array,
) -> Any:
    """Adam on one row; the moved row's products with two others. Uses up `gradient_D`."""
    kind = value_D.dtype.type
    beta1, beta2, one = kind(ADAM_BETAS[0]), kind(ADAM_BETAS[1]), kind(1)
    step_, root_, decay_, epsilon = kind(step), kind(root), kind(decay), kind(ADAM_EPSILON)
    # Two loops over few arrays each: with more, the compiler gives up telling them apart.
    for d in range(value_D.shape[0]):
        g = gradient_D[d] + decay_ * value_D[d]
        mean = beta1 * mean_D[d] + (one - beta1) * g
        square = beta2 * square_D[d] + (one - beta2) * g * g
        mean_D[d] = mean
        square_D[d] = square
        gradient_D[d] = step_ * mean / (math.sqrt(square) * root_ + epsilon)
    by_first = kind(0)
    by_second = kind(0)
    for d in range(value_D.shape[0]):
        value = value_D[d] - gradient_D[d]
        value_D[d] = value
        by_first += value * first_D[d]
        by_second += value * second_D[d]
    return by_first, by_second


@compiled
def take_logits(
    weight: Any, bias: Any, features_ND: Array, start: int, stop: int, K: int, logits_BP: Array
) -> None:
    """The logits of the rows start … stop by the head as it is."""
    for k in range(K):
        offset = bias.value[k, 0] if bias.value.shape[0] > 0 else weight.value.dtype.type(0)
        for j in range(start, stop):
            logits_BP[j - start, k] = product(weight.value[k], features_ND[j]) + offset
