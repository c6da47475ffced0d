"""The compiled loop of SGD replay on the CPU: what matrix products leave over.

Inside a block of rows the head after k steps is a combination of a few known sources: the weight
and velocity at the block's start, and the rank-one gradients since,

    W_k = a W₀ + b V₀ + Σ_i w_i g_i f_iᵀ        V_k = a' W₀ + b' V₀ + Σ_i v_i g_i f_iᵀ

so the logits of row j follow from W₀f_j, V₀f_j and the Gram matrix f_i·f_j. Each source has two
shares, (a, a'), (b, b'), (w_i, v_i), and one optimiser step moves all pairs by the same rule:

    v ← μ v + λ w (+ 1 if new)        w ← w - rate·v
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from arc_cl.core._compile import compiled
from arc_cl.core._rows import (
    Array,
    add_row,
    answer_row,
    copy_row,
    fill_row,
    gradient_row,
    note_norm,
    product,
    scale_row,
    step_size,
)


class Base(NamedTuple):
    """What the loop reads. S rows of the stream, N of a block, B of a batch; P classes, padded."""

    by_weight_NP: Array  # W₀ f_j
    by_velocity_NP: Array  # V₀ f_j
    weight_bias_P: Array
    velocity_bias_P: Array
    one: float  # 1 where the head has a bias, else 0
    past_P: Array  # 1 for classes of past tasks
    finite_S: Array
    norm_S: Array  # ‖f‖
    z_BP: Array  # scratch: logits of a batch by the weight,
    y_BP: Array  # by the velocity,
    e_P: Array  # and the exponentials of a row


class Sources(NamedTuple):
    """The shares, and the gradients since the block's start."""

    shares: Array  # [2,2]: (a, a') and (b, b')
    gradient_NP: Array  # g_i, zero where row i was not retained
    row_N: Array  # the retained rows in order; the first `count` hold
    weight_N: Array  # w_i of each of these
    velocity_N: Array  # v_i of each of these


@compiled
def run_block(
    base: Any,
    sources: Any,
    answers: Any,
    gram: Array,
    offset: int,
    span: Any,
    pull: float,
    share: float,
    norms: Array,
    rules: Any,
) -> Any:
    """All batches of the block (start, stop); returns (retained rows, steps).

    gram[j, offset + i] = f_i·f_j for rows i, j of the block. At its start the weight is
    W₀ + pull·V₀, and V₀ gives its logits times share. norms: Σ ‖f‖² and rows so far.
    """
    block_start, block_stop = span
    batch_size, num_classes = base.z_BP.shape[0], answers.logits_NK.shape[1]
    sources.shares[0, 0], sources.shares[0, 1] = 1.0, 0.0
    sources.shares[1, 0], sources.shares[1, 1] = pull, 1.0
    count = 0
    steps = 0
    for start in range(block_start, block_stop, batch_size):
        stop = min(start + batch_size, block_stop)
        first = count
        for s in range(start, stop):
            z_P, y_P, j = base.z_BP[s - start], base.y_BP[s - start], s - block_start
            fill_logits(z_P, y_P, j, base, share, sources)
            blank(z_P, y_P, num_classes)
            add_sources(z_P, y_P, gram[j], offset, base.one, sources, first)
            finite = base.finite_S[s]
            label, kept = answer_row(z_P, base.e_P, s, base.past_P, finite, answers, rules)
            g_P = sources.gradient_NP[j]
            if kept:
                gradient_row(z_P, base.e_P, label, rules, g_P)
                sources.row_N[count] = j
                count += 1
            else:
                fill_row(g_P, 0.0)
            if finite:
                note_norm(norms, base.norm_S[s])
        if count > first:
            rate = step_size(norms, rules)
            take_step(sources, first, count, rate, rules)
            steps += 1
            if rules.recompute:
                for s in range(start, stop):
                    z_P, y_P = base.z_BP[s - start], base.y_BP[s - start]
                    gram_row = gram[s - block_start]
                    add_step(z_P, y_P, gram_row, offset, base.one, sources, first, count, rules)
                    add_row(y_P, -rate, z_P)
        for s in range(start, stop):
            copy_row(base.z_BP[s - start], answers.logits_NK[s])
    return count, steps


@compiled
def blank(z_P: Array, y_P: Array, num_classes: int) -> None:
    """Take the padding out of every softmax."""
    for k in range(num_classes, z_P.shape[0]):
        z_P[k] = -np.inf
        y_P[k] = 0


@compiled
def fill_logits(z_P: Array, y_P: Array, j: int, base: Any, share: float, sources: Any) -> None:
    """What weight (z) and velocity (y) of the block's start give row j, by their shares now."""
    kind = z_P.dtype.type
    az, ay = kind(sources.shares[0, 0]), kind(sources.shares[0, 1])
    bz, by = kind(sources.shares[1, 0]), kind(sources.shares[1, 1])
    weight_P, weight_bias_P = base.by_weight_NP[j], base.weight_bias_P
    velocity_P, velocity_bias_P = base.by_velocity_NP[j], base.velocity_bias_P
    # Short loops over two or three arrays: with more, the compiler gives up telling them apart.
    # What they hold beyond the classes means nothing; `blank` comes next.
    copy_row(weight_P, z_P)
    add_row(weight_bias_P, 1.0, z_P)
    scale_row(velocity_P, share, y_P)
    add_row(velocity_bias_P, 1.0, y_P)
    if ay != 0:
        for k in range(z_P.shape[0]):
            z, y = z_P[k], y_P[k]
            z_P[k] = az * z + bz * y
            y_P[k] = (ay * z if z > -np.inf else kind(0)) + by * y
    else:
        for k in range(z_P.shape[0]):
            z_P[k] = az * z_P[k] + bz * y_P[k]
            y_P[k] *= by


@compiled
def add_sources(
    z_P: Array, y_P: Array, gram_row: Array, offset: int, one: float, sources: Any, count: int
) -> None:
    """z += Σ w_i (f_i·f_j + 1) g_i, and y likewise; six sources at a time, to spare loads."""
    P = z_P.shape[0]
    kind = z_P.dtype.type
    weight_N, velocity_N, row_N = sources.weight_N, sources.velocity_N, sources.row_N
    g_NP = sources.gradient_NP
    i = 0
    while i + 6 <= count:
        r0, r1, r2, r3, r4, r5 = (
            row_N[i], row_N[i + 1], row_N[i + 2], row_N[i + 3], row_N[i + 4], row_N[i + 5]
        )  # fmt: skip
        d0, d1 = gram_row[offset + r0] + one, gram_row[offset + r1] + one
        d2, d3 = gram_row[offset + r2] + one, gram_row[offset + r3] + one
        d4, d5 = gram_row[offset + r4] + one, gram_row[offset + r5] + one
        w0, w1 = kind(weight_N[i] * d0), kind(weight_N[i + 1] * d1)
        w2, w3 = kind(weight_N[i + 2] * d2), kind(weight_N[i + 3] * d3)
        w4, w5 = kind(weight_N[i + 4] * d4), kind(weight_N[i + 5] * d5)
        v0, v1 = kind(velocity_N[i] * d0), kind(velocity_N[i + 1] * d1)
        v2, v3 = kind(velocity_N[i + 2] * d2), kind(velocity_N[i + 3] * d3)
        v4, v5 = kind(velocity_N[i + 4] * d4), kind(velocity_N[i + 5] * d5)
        for k in range(P):
            g0, g1, g2 = g_NP[r0, k], g_NP[r1, k], g_NP[r2, k]
            g3, g4, g5 = g_NP[r3, k], g_NP[r4, k], g_NP[r5, k]
            z_P[k] += w0 * g0 + w1 * g1 + w2 * g2 + w3 * g3 + w4 * g4 + w5 * g5
            y_P[k] += v0 * g0 + v1 * g1 + v2 * g2 + v3 * g3 + v4 * g4 + v5 * g5
        i += 6
    while i < count:
        row = row_N[i]
        d = gram_row[offset + row] + one
        add_row(g_NP[row], weight_N[i] * d, z_P)
        add_row(g_NP[row], velocity_N[i] * d, y_P)
        i += 1


@compiled
def take_step(sources: Any, first: int, count: int, rate: float, rules: Any) -> None:
    """One SGD step on the mean gradient of the retained rows first … count: moves all shares."""
    momentum, decay = rules.momentum, rules.weight_decay
    weight_N, velocity_N, shares = sources.weight_N, sources.velocity_N, sources.shares
    for i in range(first):
        v = momentum * velocity_N[i] + decay * weight_N[i]
        velocity_N[i] = v
        weight_N[i] -= rate * v
    for i in range(2):
        v = momentum * shares[i, 1] + decay * shares[i, 0]
        shares[i, 1] = v
        shares[i, 0] -= rate * v
    for i in range(first, count):
        velocity_N[i] = 1
        weight_N[i] = -rate
    if count - first > 1:
        mean = sources.gradient_NP.dtype.type(1 / (count - first))
        for i in range(first, count):
            g_P = sources.gradient_NP[sources.row_N[i]]
            for k in range(g_P.shape[0]):
                g_P[k] *= mean


@compiled
def add_step(
    z_P: Array,
    y_P: Array,
    gram_row: Array,
    offset: int,
    one: float,
    sources: Any,
    first: int,
    count: int,
    rules: Any,
) -> None:
    """y, the row's logits by the velocity, after the step on the retained rows first … count."""
    kind = z_P.dtype.type
    momentum, decay = kind(rules.momentum), kind(rules.weight_decay)
    for k in range(z_P.shape[0]):
        y_P[k] *= momentum
    if decay > 0:
        for k in range(z_P.shape[0]):
            y_P[k] += decay * z_P[k] if z_P[k] > -np.inf else kind(0)
    for i in range(first, count):
        row = sources.row_N[i]
        add_row(sources.gradient_NP[row], gram_row[offset + row] + one, y_P)


class Tail(NamedTuple):
    """The latest rows' part in the velocity, oldest first: scale · Σ_r tail_r f_rᵀ."""

    gradient_RP: Array
    scale: float
    size_R: Array  # norm of a row times ‖f_r‖: how far it can move a logit, per ‖f_j‖
    bias_P: Array  # the bias's velocity, of all rows ever


@compiled
def settle_block(
    sources: Any,
    count: int,
    pull: float,
    norm_N: Array,
    update_NP: Array,
    update_bias_P: Array,
    tail: Any,
    limit: float,
) -> int:
    """After a block: the rows that update the weight, and the velocity's tail moved on.

    update_NP = (w_i - pull·v_i) g_i, and their sum is added to update_bias_P. The last N rows of
    the tail become v_i g_i; the older ones move up and fade. Returns how many of the latest rows
    matter now: those before them have sizes that add up to at most `limit`. Where the rows that
    leave the tail would still matter it does nothing, and returns -1.
    """
    N = update_NP.shape[0]
    tail_RP, size_R, bias_P = tail.gradient_RP, tail.size_R, tail.bias_P
    R = size_R.shape[0]
    decay = sources.shares[1, 1]
    leaving = 0.0
    for r in range(N):
        leaving += size_R[r] * decay
    if leaving > limit:
        return -1
    for r in range(R - N):
        size_R[r] = size_R[r + N] * decay
        scale_row(tail_RP[r + N], decay, tail_RP[r])
    if count < N:  # some rows were not retained
        for j in range(N):
            size_R[R - N + j] = 0
            fill_row(update_NP[j], 0.0)
            fill_row(tail_RP[R - N + j], 0.0)  # after the update's: they may lie side by side
    scale_row(bias_P, decay, bias_P)
    for i in range(count):
        j = sources.row_N[i]
        g_P, velocity = sources.gradient_NP[j], sources.velocity_N[i]
        weight = sources.weight_N[i] - pull * velocity
        scale_row(g_P, weight, update_NP[j])
        scale_row(g_P, velocity / tail.scale, tail_RP[R - N + j])
        add_row(g_P, weight, update_bias_P)
        add_row(g_P, velocity, bias_P)
        size_R[R - N + j] = velocity * math.sqrt(product(g_P, g_P)) * norm_N[j]
    return int(reach(size_R, limit))


@compiled
def reach(size_R: Array, limit: float) -> int:
    """How many of the latest rows matter: those before them add up to at most `limit`."""
    total = 0.0
    for r in range(size_R.shape[0]):
        total += size_R[r]
        if total > limit:
            return int(size_R.shape[0] - r)
    return 0
