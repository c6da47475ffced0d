"""Compiled arithmetic of one row of logits: exponentials, detection, gradient.

The same formulae as `detection` and `retention`, one row at a time, for the loops of `replay`.
P: classes, padded to a multiple of 16 with logits of -inf: full vector registers, no remainders.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from arc_cl.core._compile import compiled
from arc_cl.core.partition import TaskPartition
from arc_cl.core.retention import losses_in_use
from arc_cl.core.settings import ARCSettings

Array = NDArray[Any]
LANES = 16  # numbers of a vector register


def whole_lanes(count: int) -> int:
    """The next multiple of LANES."""
    return -(-count // LANES) * LANES


class Rules(NamedTuple):
    """The settings as the loops need them."""

    beta: float
    lr: float
    momentum: float
    weight_decay: float
    relative: bool
    smoothing: float
    cross_entropy: bool
    entropy: bool
    retains: bool
    past_only: bool
    recompute: bool
    confidence_ratio: bool
    judges: bool  # more than one task: w has a meaning

    @classmethod
    def of(cls, partition: TaskPartition, settings: ARCSettings) -> Rules:
        several = partition.num_tasks > 1
        use_cross_entropy, use_entropy = losses_in_use(settings)
        return cls(
            beta=float(settings.beta),
            lr=float(settings.lr),
            momentum=float(settings.momentum),
            weight_decay=float(settings.weight_decay),
            relative=settings.step == "relative",
            smoothing=float(settings.label_smoothing),
            cross_entropy=use_cross_entropy,
            entropy=use_entropy,
            retains=several or settings.adapt_first_task,
            past_only=settings.past_only and several,
            recompute=settings.recompute,
            confidence_ratio=settings.ratio == "confidence",
            judges=several,
        )


def exponential(x: Any) -> Any:
    """exp(x) for x ≤ 0; in float32 a polynomial that vectorises (relative error 2e-7)."""
    return math.exp(x)


@overload(exponential, inline="always")
def _exponential(x: Any) -> Any:
    if not (isinstance(x, types.Float) and x.bitwidth == 32):
        return exponential
    f = np.float32
    per_ln2, half, one, zero, lowest = f(1.44269504), f(0.5), f(1.0), f(0.0), f(-87.0)
    ln2_high, ln2_low = f(0.693359375), f(-2.12194440e-4)
    c2, c3, c4 = f(5.0000001201e-1), f(1.6666665459e-1), f(4.1665795894e-2)
    c5, c6, c7 = f(8.3334519073e-3), f(1.3981999507e-3), f(1.9875691500e-4)
    bias, shift = np.int32(127), np.int32(23)

    def impl(x: Any) -> Any:
        bounded = max(x, lowest)
        n = np.floor(bounded * per_ln2 + half)
        r = bounded - n * ln2_high - n * ln2_low
        series = ((((c7 * r + c6) * r + c5) * r + c4) * r + c3) * r + c2
        power_of_two = np.int32((np.int32(n) + bias) << shift).view(np.float32)
        return (series * r * r + r + one) * power_of_two if x > lowest else zero

    return impl


class Answers(NamedTuple):
    """What the rows of a block or stream show, as it is written. Fields as in `Observation`."""

    logits_NK: Array
    confidence_N: Array
    ratio_N: Array
    retained_N: Array


@compiled
def answer_row(
    z_P: Array, e_P: Array, j: int, past_P: Array, finite: bool, answers: Any, rules: Any
) -> Any:
    """Detection of row j, noted; (its argmax, whether it is retained). Leaves exponentials in e."""
    label, c, w = detect_row(z_P, past_P, e_P, rules.confidence_ratio, rules.judges)
    kept = rules.retains and finite and c > rules.beta
    kept = kept and (not rules.past_only or past_P[label] > 0)
    answers.confidence_N[j] = c if finite else np.nan
    answers.ratio_N[j] = w if finite else np.nan
    answers.retained_N[j] = kept
    return label, kept


@compiled
def detect_row(z_P: Array, past_P: Array, e_P: Array, confidence_ratio: bool, judges: bool) -> Any:
    """(argmax, c, w) of one row; leaves exp(z - max) in e_P."""
    P = z_P.shape[0]
    best = largest(z_P)
    label = 0
    while label < P - 1 and z_P[label] != best:
        label += 1
    # One kind of work a loop: mixed ones do not vectorise.
    for k in range(P):
        e_P[k] = exponential(z_P[k] - best)
    confidence = 1.0 / total_of(e_P)
    if not judges or past_P[label] > 0:
        return label, confidence, np.nan
    if confidence_ratio:
        return label, confidence, confidence
    return label, confidence, confidence / past_confidence(z_P, past_P)


@compiled
def largest(z_P: Array) -> Any:
    """The maximum, by four running ones: a single one would be a chain of dependent steps."""
    a, b, c, d = z_P[0], z_P[1], z_P[2], z_P[3]
    for k in range(4, z_P.shape[0], 4):
        a = z_P[k] if z_P[k] > a else a
        b = z_P[k + 1] if z_P[k + 1] > b else b
        c = z_P[k + 2] if z_P[k + 2] > c else c
        d = z_P[k + 3] if z_P[k + 3] > d else d
    return max(max(a, b), max(c, d))


@compiled
def total_of(row_P: Array) -> Any:
    total = row_P.dtype.type(0)
    for k in range(row_P.shape[0]):
        total += row_P[k]
    return total


@compiled
def past_confidence(z_P: Array, past_P: Array) -> Any:
    """ĉ: the largest softmax value over the past classes, shifted by their own maximum."""
    best = z_P.dtype.type(-np.inf)
    for k in range(z_P.shape[0]):
        if past_P[k] > 0:
            best = max(best, z_P[k])
    total = best - best
    for k in range(z_P.shape[0]):
        if past_P[k] > 0:
            total += exponential(z_P[k] - best)
    return 1.0 / total


@compiled
def gradient_row(z_P: Array, e_P: Array, label: int, rules: Any, out_P: Array) -> None:
    """∂L/∂z of one retained row, from its exponentials e = exp(z - z[label])."""
    P = z_P.shape[0]
    lowest = z_P.dtype.type(-1e30)  # stands for log p of a masked class, whose p is 0
    total = total_of(e_P)
    scale = 1 / total
    if rules.entropy:
        shift = z_P.dtype.type(z_P[label] + math.log(total))
        for k in range(P):
            log_p = z_P[k] - shift
            out_P[k] = log_p if log_p > lowest else lowest
        negative_entropy = z_P.dtype.type(0)
        for k in range(P):
            negative_entropy += e_P[k] * out_P[k]
        negative_entropy *= scale
        for k in range(P):
            out_P[k] = e_P[k] * scale * (negative_entropy - out_P[k])
    else:
        fill_row(out_P, 0.0)
    if rules.cross_entropy:
        for k in range(P):
            out_P[k] += e_P[k] * scale
        if rules.smoothing > 0:
            smooth_row(z_P, label, rules.smoothing, out_P)
        else:
            out_P[label] -= 1


@compiled
def smooth_row(z_P: Array, label: int, smoothing: float, out_P: Array) -> None:
    """Subtract the smoothed pseudo-label; masked classes take no share of it."""
    others = -1
    for k in range(z_P.shape[0]):
        others += z_P[k] > -np.inf
    if others <= 0:
        out_P[label] -= 1
        return
    share = z_P.dtype.type(smoothing / others)
    for k in range(z_P.shape[0]):
        if z_P[k] > -np.inf and k != label:
            out_P[k] -= share
    out_P[label] -= z_P.dtype.type(1 - smoothing)


@compiled
def note_norm(norms: Array, norm: float) -> None:
    """Count a row in (Σ ‖f‖², rows)."""
    norms[0] += norm**2
    norms[1] += 1


@compiled
def step_size(norms: Array, rules: Any) -> float:
    """lr, or lr over the mean of ‖f‖² so far: `HeadState.step_size`."""
    if rules.relative and norms[0] > 0:
        return float(rules.lr * norms[1] / norms[0])
    return float(rules.lr)


@compiled
def fill_row(to_P: Array, value: float) -> None:
    for k in range(to_P.shape[0]):
        to_P[k] = value


@compiled
def copy_row(from_P: Array, to_K: Array) -> None:
    for k in range(to_K.shape[0]):
        to_K[k] = from_P[k]


@compiled
def scale_row(from_P: Array, factor: float, to_P: Array) -> None:
    f = to_P.dtype.type(factor)
    for k in range(to_P.shape[0]):
        to_P[k] = f * from_P[k]


@compiled
def add_row(from_P: Array, factor: float, to_P: Array) -> None:
    f = to_P.dtype.type(factor)
    for k in range(to_P.shape[0]):
        to_P[k] += f * from_P[k]


@compiled
def product(a_D: Array, b_D: Array) -> Any:
    total = a_D.dtype.type(0)
    for d in range(a_D.shape[0]):
        total += a_D[d] * b_D[d]
    return total
