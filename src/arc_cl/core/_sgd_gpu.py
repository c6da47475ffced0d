"""SGD replay on a GPU: matrix products of whole blocks, and one kernel for the steps in between.

A single program keeps the logits of all the block's rows in registers, by the weight (z) and by the
velocity (y). It answers row by row; a batch's step on gradients g then moves the logits of all:

    y ← μ y + λ z + F Fᵀ g        z ← z - rate · y

What the steps do to weight and velocity is told by two shares a row, and one pair for each of
them as they were at the block's start (as in `_sgd_loop`). Nothing waits for the host in between.

Shapes: N rows of a block, P classes padded to a power of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from arc_cl.core._rows import Rules
from arc_cl.core._stream import Stream
from arc_cl.core.decision import Observation
from arc_cl.core.detection import detect
from arc_cl.core.head import HeadState
from arc_cl.core.partition import TaskPartition
from arc_cl.core.settings import ARCSettings

# The two tiles [N,P] of logits, and the gradients, must fit the registers of one multiprocessor.
_TILE = 8192
_LARGEST_BLOCK, _SMALLEST_BLOCK = 64, 16
_WARPS = 8


def block_length(num_classes: int, batch_size: int) -> int:
    """Rows of a block, a multiple of the batch; 0 where the tiles would be too large."""
    length = min(_LARGEST_BLOCK, _TILE // triton.next_power_of_2(num_classes))
    return 0 if length < max(_SMALLEST_BLOCK, batch_size) else length // batch_size * batch_size


def replay_sgd(
    state: HeadState, stream: Stream, partition: TaskPartition, settings: ARCSettings
) -> Observation:
    """What step-by-step SGD shows, and `state` moved as far."""
    work = _Work(state, stream, partition, settings)
    for start in range(0, len(stream), work.length):
        work.run(slice(start, min(start + work.length, len(stream))))
    work.finish(state)
    return work.observation(partition)


class _Work:
    """The head and all buffers on the device, for the time of one replay.

    The bias is one more column of the weight, for one more feature that is always 1: it then takes
    part in all products. Columns are padded with zeros to whole 16 bytes.
    """

    def __init__(
        self, state: HeadState, stream: Stream, partition: TaskPartition, settings: ARCSettings
    ) -> None:
        self.stream, self.settings = stream, settings
        self.rules = Rules.of(partition, settings)
        self.K, self.P = partition.num_classes, triton.next_power_of_2(partition.num_classes)
        self.length = block_length(self.K, stream.batch_size)
        self.rows = len(state.weight) if settings.weight_decay else self.K
        D = self.width = state.weight.shape[1]
        wide = (D + 1 if state.bias is not None else D) + 3 & ~3
        new = state.weight.new_zeros
        self.features_NE = new(len(stream), wide)
        self.features_NE[:, :D] = stream.features_ND
        self.head = new(2, self.rows, wide)  # weight, velocity
        for part, of in zip(self.head, self._parameters(state), strict=True):
            part[:, :D] = of["weight"][: self.rows]
            if state.bias is not None:
                part[:, D] = of["bias"][: self.rows]
        if state.bias is not None:
            self.features_NE[:, D] = 1
        self.past_P = new(self.P)
        self.past_P[: self.K] = torch.tensor(partition.array < partition.newest)
        # Σ ‖f‖² and rows so far, steps; and how weight and velocity carry over from block to block.
        counts = (state.norm_total, float(state.norm_rows), float(state.steps))
        self.counts = state.weight.new_tensor(counts, dtype=torch.float64)
        self.carry = new(4)
        self.updates = new(self.length, 2, self.K)
        self.first_logits = new(len(stream), self.K)
        recompute = settings.recompute
        self.logits = torch.empty_like(self.first_logits) if recompute else self.first_logits
        self.retained = torch.empty_like(stream.finite_N)

    def run(self, rows: slice) -> None:
        """One block: products, the kernel, and the head brought up to date."""
        features, K, rules = self.features_NE[rows], self.K, self.rules
        n = len(features)
        seen = self.head[:, :K].reshape(2 * K, -1) if self.rows > K else self.head.view(2 * K, -1)
        run_block[(1,)](
            features @ seen.T, features @ features.T, self.past_P, self.stream.finite_N[rows],
            self.stream.norm_N[rows], self.counts, self.carry, self.updates,
            self.first_logits[rows], self.logits[rows], self.retained[rows], n, K,
            rules.beta, rules.lr, rules.momentum, rules.weight_decay, rules.smoothing,
            B=self.stream.batch_size, T=triton.next_power_of_2(self.length), P=self.P,
            RELATIVE=rules.relative, CROSS_ENTROPY=rules.cross_entropy, ENTROPY=rules.entropy,
            SMOOTHING=rules.smoothing > 0, RETAINS=rules.retains, PAST_ONLY=rules.past_only,
            RECOMPUTE=rules.recompute, num_warps=_WARPS,
        )  # fmt: skip
        self._carry_over()
        update = self.updates[:n].view(n, 2 * K).T
        if self.rows > K:
            self.head[:, :K] += (update @ features).view(2, K, -1)
        else:
            self.head.view(2 * K, -1).addmm_(update, features)

    def _carry_over(self) -> None:
        """(W, V) ← (a W + b V, a' W + b' V), by the shares that the kernel left."""
        a, a_velocity, b, b_velocity = self.carry
        weight, velocity = self.head
        if self.settings.weight_decay:
            before = weight.clone()
            weight.mul_(a).addcmul_(velocity, b)
            velocity.mul_(b_velocity).addcmul_(before, a_velocity)
        else:
            weight.addcmul_(velocity, b)
            velocity.mul_(b_velocity)

    def observation(self, partition: TaskPartition) -> Observation:
        found = detect(self.first_logits, partition, self.settings)
        trusted = self.stream.finite_N
        return Observation(
            logits=self.logits,
            confidence=found.confidence.masked_fill(~trusted, torch.nan),
            ratio=found.ratio.masked_fill(~trusted, torch.nan),
            retained=self.retained,
        )

    def finish(self, state: HeadState) -> None:
        """Write head and counters back to the state."""
        norm_total, norm_rows, steps = self.counts.tolist()
        state.norm_total, state.norm_rows, state.steps = norm_total, int(norm_rows), int(steps)
        for part, of in zip(self.head, self._parameters(state), strict=True):
            of["weight"][: self.rows] = part[:, : self.width]
            if state.bias is not None:
                of["bias"][: self.rows] = part[:, self.width]

    def _parameters(self, state: HeadState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The state's weight and bias, and their velocities (without momentum kept nowhere)."""
        parameters = state.parameters()
        if self.settings.momentum:
            return parameters, {name: state.memory_of("velocity", name) for name in parameters}
        return parameters, {name: torch.zeros_like(part) for name, part in parameters.items()}


@triton.jit  # type: ignore[untyped-decorator]
def _add_both(a, b, c, d) -> Any:  # type: ignore[no-untyped-def]
    return a + c, b + d


@triton.jit  # type: ignore[untyped-decorator]
def run_block(  # type: ignore[no-untyped-def]
    by_head, gram, past, finite, norm, counts, carry, updates, first_logits, logits, retained,
    rows, K, beta, lr, momentum, decay, smoothing,
    B: tl.constexpr, T: tl.constexpr, P: tl.constexpr,
    RELATIVE: tl.constexpr, CROSS_ENTROPY: tl.constexpr, ENTROPY: tl.constexpr,
    SMOOTHING: tl.constexpr, RETAINS: tl.constexpr, PAST_ONLY: tl.constexpr,
    RECOMPUTE: tl.constexpr,
) -> None:  # fmt: skip
    """All batches of a block, by one program. T: its rows, padded to a power of two."""
    row, column = tl.arange(0, T), tl.arange(0, P)
    here, seen = row < rows, column < K
    inside = here[:, None] & seen[None, :]
    place = row[:, None] * K + column[None, :]
    paired = row[:, None] * 2 * K + column[None, :]  # in arrays [N,2,K] of weight and velocity
    z = tl.load(by_head + paired, mask=inside, other=float("-inf"))
    y = tl.load(by_head + K + paired, mask=inside, other=0.0)
    gradients = tl.zeros([T, P], tl.float32)
    norm_total, norm_rows, steps = tl.load(counts), tl.load(counts + 1), tl.load(counts + 2)
    weight_share = tl.zeros([T], tl.float32)
    velocity_share = tl.zeros([T], tl.float32)
    a, a_velocity, b, b_velocity = 1.0, 0.0, 0.0, 1.0
    for start in range(0, rows, B):
        moved = tl.zeros([T, P], tl.float32)
        new = tl.zeros([T], tl.float32)
        count = 0.0
        for j in range(start, tl.minimum(start + B, rows)):
            trusted = tl.load(finite + j)
            norm_j = tl.load(norm + j)
            gram_j = tl.load(gram + j * rows + row, mask=here, other=0.0)
            z_j = tl.sum(tl.where((row == j)[:, None], z, 0.0), axis=0)
            best, label = tl.max(z_j, axis=0, return_indices=True)
            centred = z_j - best
            bounded = tl.maximum(centred, -1e30)  # log of a masked class, whose share is 0
            e = tl.exp(centred)
            total, weighted = tl.reduce((e, e * bounded), axis=0, combine_fn=_add_both)
            kept = trusted & (1.0 / total > beta)
            if PAST_ONLY:
                kept = kept & (tl.load(past + label) > 0)
            if not RETAINS:
                kept = kept & (j < 0)
            p = e / total
            g = tl.zeros([P], tl.float32)
            if ENTROPY:  # -p (log p + H)
                g -= p * (bounded - weighted / total)
            if CROSS_ENTROPY:
                chosen = column == label
                if SMOOTHING:
                    open_class = z_j > float("-inf")
                    others = tl.sum(tl.where(open_class, 1.0, 0.0), axis=0) - 1
                    spread = tl.where(others > 0, smoothing, 0.0)
                    share = tl.where(open_class, spread / tl.maximum(others, 1.0), 0.0)
                    g += p - tl.where(chosen, 1 - spread, share)
                else:
                    g += p - tl.where(chosen, 1.0, 0.0)
            if kept:
                moved += gram_j[:, None] * g[None, :]
                gradients = tl.where((row == j)[:, None], g[None, :], gradients)
                new = tl.where(row == j, 1.0, new)
                count += 1.0
            tl.store(first_logits + j * K + column, z_j, mask=seen)
            tl.store(retained + j, kept)
            if trusted:
                norm_total += norm_j.to(tl.float64) * norm_j
                norm_rows += 1.0
        if count > 0:
            rate = lr
            if RELATIVE:
                if norm_total > 0:
                    rate = (lr * norm_rows / norm_total).to(tl.float32)
            steps += 1.0
            y = momentum * y + decay * tl.where(z > float("-inf"), z, 0.0) + moved / count
            z = z - rate * y
            velocity_share = momentum * velocity_share + decay * weight_share + new / count
            weight_share -= rate * velocity_share
            a_velocity = momentum * a_velocity + decay * a
            a -= rate * a_velocity
            b_velocity = momentum * b_velocity + decay * b
            b -= rate * b_velocity
        if RECOMPUTE:
            batch = (row >= start) & (row < start + B)
            tl.store(logits + place, z, mask=inside & batch[:, None])
    tl.store(updates + paired, weight_share[:, None] * gradients, mask=inside)
    tl.store(updates + K + paired, velocity_share[:, None] * gradients, mask=inside)
    tl.store(carry, a)
    tl.store(carry + 1, a_velocity)
    tl.store(carry + 2, b)
    tl.store(carry + 3, b_velocity)
    tl.store(counts, norm_total)
    tl.store(counts + 1, norm_rows)
    tl.store(counts + 2, steps)
