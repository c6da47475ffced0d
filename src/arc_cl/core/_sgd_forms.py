"""How weight and velocity are kept between the blocks of an SGD replay.

Where nothing but lr and momentum move the head, U = W - pull·V with pull = lr·μ/(1-μ) is moved by
gradients alone: it is where the weight would come to rest. `PairForm` keeps U and V one below the
other, so that one product serves both.

V is a fading sum over the latest rows. As long as those fade fast enough, `TailForm` keeps them in
V's place: a product with as many of them as still matter replaces the two that V costs a block.

`StateForm` takes everything else (weight decay, relative steps, the guard): weight and velocity as
they are, both brought up to date after each block.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from arc_cl.core import _sgd_loop as loop
from arc_cl.core._rows import Array, whole_lanes
from arc_cl.core._stream import Stream
from arc_cl.core.head import HeadState
from arc_cl.core.partition import TaskPartition
from arc_cl.core.settings import ARCSettings

# Below this a fading factor is multiplied in, long before it underflows.
_SMALL_SHARE = 1e-3
# How far dropped velocities may move a logit at worst, all features pointing the same way. In
# practice it is a hundredth of that, well under what rounding does to a logit.
_NEGLIGIBLE = {torch.float32: 2e-5, torch.float64: 1e-14}

Halves = tuple[Tensor, Tensor, Tensor]  # [n,K], [n,K], and both side by side [n,2K]


class Buffers:
    """Scratch for blocks of N rows. What is P wide is the K classes, padded.

    Logits by weight and by velocity lie side by side, and so do the rows that update them: two
    heads of K classes each, where the padding of the first overlaps the second.
    """

    def __init__(self, stream: Stream, partition: TaskPartition, length: int) -> None:
        dtype = stream.features_ND.dtype
        self.num_classes = K = partition.num_classes
        self.length = length
        P = whole_lanes(K)
        self.by_head, self.update = torch.zeros(2, length, whole_lanes(K + P), dtype=dtype)
        self.by_weight_NP, self.by_velocity_NP = _two_heads(self.by_head, K, P)
        self.update_NP, self.velocity_update_NP = _two_heads(self.update, K, P)
        self._whole = self._halves(self.by_head, length), self._halves(self.update, length)
        self.sources = loop.Sources(
            shares=np.zeros((2, 2)),
            gradient_NP=torch.zeros(length, P, dtype=dtype).numpy(),
            row_N=np.empty(length, np.int64),
            weight_N=np.empty(length),
            velocity_N=np.empty(length),
        )

    def base(self, form: Form, one: float, past_P: Array, stream: Stream) -> loop.Base:
        # By torch, whose memory starts on a cache line: numpy's may not, and each access costs two.
        scratch = torch.zeros(2, stream.batch_size, len(past_P), dtype=stream.norm_N.dtype).numpy()
        return loop.Base(
            by_weight_NP=form.by_weight_NP,
            by_velocity_NP=self.by_velocity_NP,
            weight_bias_P=form.weight_bias_P,
            velocity_bias_P=form.velocity_bias_P,
            one=one,
            past_P=past_P,
            finite_S=stream.finite_N.numpy(),
            norm_S=stream.norm_N.numpy(),
            z_BP=scratch[0],
            y_BP=scratch[1],
            e_P=self.padded(None),
        )

    def logits(self, n: int) -> Halves:
        """Where the logits of n rows go: by weight, by velocity, and both in one."""
        return self._whole[0] if n == self.length else self._halves(self.by_head, n)

    def updates(self, n: int) -> Halves:
        """The rows that update weight and velocity after a block of n rows."""
        return self._whole[1] if n == self.length else self._halves(self.update, n)

    def _halves(self, both: Tensor, n: int) -> Halves:
        K, rows = self.num_classes, both[:n]
        return rows[:, :K], rows[:, K : 2 * K], rows[:, : 2 * K]

    def padded(self, vector_K: Tensor | None) -> Array:
        """A vector over the classes in the buffers' width and dtype; None is zero."""
        padded_P = torch.zeros(self.update_NP.shape[1], dtype=self.update.dtype)
        if vector_K is not None:
            padded_P[: self.num_classes] = vector_K[: self.num_classes]
        array: Array = padded_P.numpy()
        return array


def _two_heads(rows: Tensor, K: int, P: int) -> tuple[Array, Array]:
    array = rows.numpy()
    return array[:, :P], array[:, K : K + P]


class Form(Protocol):
    """The verbs of a replay, block by block. The loop reads the biases, always up to date."""

    by_weight_NP: Array  # where prepare() puts the logits by the weight
    share: float  # what the logits by the velocity have to be multiplied with
    pull: float  # the weight at a block's start is what prepare() used, plus pull · velocity
    weight_bias_P: Array
    velocity_bias_P: Array

    def prepare(self, rows: slice, features: Tensor) -> tuple[Tensor, int]:
        """Fill the buffers with what the head at the block's start says of its rows' features.

        Returns the products of these rows with some rows before them and with each other, and how
        many those before are.
        """

    def within_guard(self, rows: slice, count: int) -> bool:
        """Whether surely no step of the block went beyond `max_drift`."""

    def settle(self, rows: slice, features: Tensor, count: int) -> Form:
        """Bring weight and velocity up to date; the form to go on with."""

    def finish(self) -> None:
        """Write to the state what is not there yet."""


def choose_form(state: HeadState, stream: Stream, settings: ARCSettings, buffers: Buffers) -> Form:
    guarded = settings.max_drift is not None
    if guarded or settings.weight_decay or settings.step == "relative":
        return StateForm(state, stream, settings, buffers)
    pair = PairForm(state, stream, settings, buffers)
    remembered = _remembered_rows(stream, settings)
    # With more rows than the two heads have, V itself is cheaper.
    if 0 < remembered <= 2 * buffers.num_classes and not pair.moving:
        return TailForm(pair, remembered)
    return pair


def _remembered_rows(stream: Stream, settings: ARCSettings) -> int:
    """Rows after which a velocity has faded below rounding, if every batch makes a step."""
    if not settings.momentum:
        return 0
    rounding = torch.finfo(stream.features_ND.dtype).eps
    return math.ceil(math.log(rounding) / math.log(settings.momentum)) * stream.batch_size


class PairForm:
    """U above V in one matrix. V fades by a factor that is multiplied in when it gets small."""

    def __init__(
        self, state: HeadState, stream: Stream, settings: ARCSettings, buffers: Buffers
    ) -> None:
        self.state, self.stream, self.buffers = state, stream, buffers
        self.norms, self.by_weight_NP = stream.norm_N.numpy(), buffers.by_weight_NP
        self.pull = settings.lr * settings.momentum / (1 - settings.momentum)
        self._momentum = settings.momentum
        K = buffers.num_classes
        velocity = self._velocity("weight")
        self.moving = bool(velocity.any())
        self.pair = torch.cat([state.weight[:K] - self.pull * velocity, velocity])
        self._pair_T = self.pair.T
        self.share = 1.0  # V = share · the lower half
        velocity_bias_P = buffers.padded(self._velocity("bias"))
        rest_bias_P = buffers.padded(state.bias) - self.pull * velocity_bias_P
        self.biases = rest_bias_P, velocity_bias_P
        # Without a bias, what adds up in these is nobody's.
        nothing_P = buffers.padded(None)
        self.weight_bias_P = nothing_P if state.bias is None else rest_bias_P
        self.velocity_bias_P = nothing_P if state.bias is None else velocity_bias_P
        self._sizes = np.zeros(buffers.length)

    def prepare(self, rows: slice, features: Tensor) -> tuple[Tensor, int]:
        _, _, by_both = self.buffers.logits(rows.stop - rows.start)
        torch.mm(features, self._pair_T, out=by_both)
        return torch.mm(features, features.T), 0

    def within_guard(self, rows: slice, count: int) -> bool:
        return True  # this form is not chosen where there is a guard

    def settle(self, rows: slice, features: Tensor, count: int) -> Form:
        buffers, n = self.buffers, rows.stop - rows.start
        self.share *= float(buffers.sources.shares[1, 1])
        if self.share < _SMALL_SHARE:
            self.pair[buffers.num_classes :] *= self.share
            self.share = 1.0
        rest_bias_P, velocity_bias_P = self.biases
        tail = loop.Tail(
            buffers.velocity_update_NP[:n], self.share, self._sizes[:n], velocity_bias_P
        )
        loop.settle_block(
            buffers.sources, count, self.pull, self.norms[rows], buffers.update_NP[:n],
            rest_bias_P, tail, math.inf,
        )  # fmt: skip
        _, _, update = buffers.updates(n)
        self.pair.addmm_(update.T, features)
        return self

    def finish(self) -> None:
        K = self.buffers.num_classes
        velocity = self._velocity("weight")
        velocity.copy_(self.pair[K:]).mul_(self.share)
        self.state.weight[:K] = self.pair[:K].add_(velocity, alpha=self.pull)
        if self.state.bias is not None:
            rest_bias, velocity_bias = (torch.from_numpy(bias_P)[:K] for bias_P in self.biases)
            self._velocity("bias").copy_(velocity_bias)
            self.state.bias[:K] = rest_bias + self.pull * velocity_bias

    def _velocity(self, name: str) -> Tensor:
        """The optimiser's velocity of the classes seen; without momentum zeros, kept nowhere."""
        parameter = self.state.parameters().get(name)
        if parameter is None or not self._momentum:
            like = self.state.weight if name == "weight" else self.state.weight[:, 0]
            return torch.zeros_like(like[: self.buffers.num_classes])
        return self.state.memory_of("velocity", name)[: self.buffers.num_classes]


class TailForm:
    """U, and the latest rows in V's place: the pair it is built on has a V of zero till the end."""

    def __init__(self, pair: PairForm, remembered_rows: int) -> None:
        self._pair = pair
        self.pull, self.share = pair.pull, 1.0
        self.weight_bias_P, self.velocity_bias_P = pair.weight_bias_P, pair.velocity_bias_P
        buffers, stream = pair.buffers, pair.stream
        self._rest = pair.pair[: buffers.num_classes]
        # The product of weight and features is faster than that of features and weight.
        P = buffers.update_NP.shape[1]
        by_weight_PN = self._rest.new_zeros(P, buffers.length)
        self._by_weight_KN = by_weight_PN[: buffers.num_classes]
        self.by_weight_NP = by_weight_PN.numpy().T
        R = self._kept_rows = whole_lanes(max(remembered_rows, buffers.length))
        tail_RP = self._rest.new_zeros(R, P)
        self._tail_RK = tail_RP[:, : buffers.num_classes]
        self._tail = loop.Tail(tail_RP.numpy(), 1.0, np.zeros(R), pair.biases[1])
        # A velocity smaller than this moves no logit by more than is negligible.
        farthest = self.pull * stream.norm_N.max().item()
        self._limit = _NEGLIGIBLE[self._rest.dtype] / max(farthest, 1e-300)
        self._latest_rows = 0
        self._stop = 0

    def prepare(self, rows: slice, features: Tensor) -> tuple[Tensor, int]:
        buffers, features_ND = self._pair.buffers, self._pair.stream.features_ND
        n = rows.stop - rows.start
        _, by_velocity, _ = buffers.logits(n)
        torch.mm(self._rest, features.T, out=self._by_weight_KN[:, :n])
        # Products of whole lanes are the faster ones.
        h = min(whole_lanes(self._latest_rows), self._kept_rows, rows.start)
        gram = torch.mm(features, features_ND[rows.start - h : rows.stop].T)
        if h:
            torch.mm(gram[:, :h], self._tail_RK[-h:], out=by_velocity)
        else:
            by_velocity.zero_()
        return gram, h

    def within_guard(self, rows: slice, count: int) -> bool:
        return True  # this form is not chosen where there is a guard

    def settle(self, rows: slice, features: Tensor, count: int) -> Form:
        buffers, n = self._pair.buffers, rows.stop - rows.start
        self._latest_rows = loop.settle_block(
            buffers.sources, count, self.pull, self._pair.norms[rows],
            buffers.update_NP[:n], self._pair.biases[0], self._tail, self._limit,
        )  # fmt: skip
        if self._latest_rows < 0:  # rows leave the tail that have not faded: V serves better
            self._fold()
            return self._pair.settle(rows, features, count)
        update, _, _ = buffers.updates(n)
        self._rest.addmm_(update.T, features)
        self._stop = rows.stop
        return self

    def finish(self) -> None:
        self._fold()
        self._pair.finish()

    def _fold(self) -> None:
        """Turn the rows of the tail into the matrix V."""
        held = min(self._kept_rows, self._stop)
        if held:
            latest = self._pair.stream.features_ND[self._stop - held : self._stop]
            self._pair.pair[self._pair.buffers.num_classes :] = self._tail_RK[-held:].T @ latest


class StateForm:
    """Weight and velocity in the state itself, both brought up to date after each block."""

    def __init__(
        self, state: HeadState, stream: Stream, settings: ARCSettings, buffers: Buffers
    ) -> None:
        self._state, self._buffers = state, buffers
        self._settings, self._norms = settings, stream.norm_N.numpy()
        self.by_weight_NP = buffers.by_weight_NP
        self.pull, self.share = 0.0, 1.0
        self.weight_bias_P, self.velocity_bias_P = buffers.padded(None), buffers.padded(None)

    def prepare(self, rows: slice, features: Tensor) -> tuple[Tensor, int]:
        buffers, n = self._buffers, rows.stop - rows.start
        K = buffers.num_classes
        by_weight, by_velocity, _ = buffers.logits(n)
        torch.mm(features, self._state.weight[:K].T, out=by_weight)
        velocity = self._velocity("weight")
        if velocity is not None:
            torch.mm(features, velocity[:K].T, out=by_velocity)
        self.weight_bias_P[:] = buffers.padded(self._state.bias)
        self.velocity_bias_P[:] = buffers.padded(self._velocity("bias"))
        return features @ features.T, 0

    def within_guard(self, rows: slice, count: int) -> bool:
        limit = self._settings.max_drift
        if limit is None or not count:
            return True
        if self._settings.weight_decay:
            return False  # then shares need not grow from step to step, as the bound below takes
        sources = self._buffers.sources
        row_M = sources.row_N[:count]
        size_M = np.linalg.norm(sources.gradient_NP[row_M], axis=1) * self._norms[rows][row_M]
        moved = float(np.abs(sources.weight_N[:count]) @ size_M)
        velocity = self._velocity("weight")
        if velocity is not None:
            speed = torch.linalg.matrix_norm(velocity).item()
            moved += abs(float(sources.shares[1, 0])) * speed
        whole = torch.linalg.matrix_norm(self._state.first_weight).item()
        return bool(self._state.drift() * whole + moved < limit * whole * (1 - 1e-5))

    def settle(self, rows: slice, features: Tensor, count: int) -> Form:
        buffers, n = self._buffers, rows.stop - rows.start
        K = buffers.num_classes
        update_bias_P, tail_bias_P = buffers.padded(None), buffers.padded(None)
        tail = loop.Tail(buffers.velocity_update_NP[:n], 1.0, np.zeros(n), tail_bias_P)
        loop.settle_block(
            buffers.sources, count, 0.0, self._norms[rows], buffers.update_NP[:n],
            update_bias_P, tail, math.inf,
        )  # fmt: skip
        for_weight, for_velocity, _ = buffers.updates(n)
        by_weight = {"weight": for_weight.T @ features}
        by_velocity = {"weight": for_velocity.T @ features}
        if self._state.bias is not None:
            by_weight["bias"] = torch.from_numpy(update_bias_P[:K])
            by_velocity["bias"] = torch.from_numpy(tail_bias_P[:K])
        for name, parameter in self._state.parameters().items():
            velocity = self._velocity(name)
            _carry(parameter, velocity, buffers.sources)
            parameter[:K] += by_weight[name]
            if velocity is not None:
                velocity[:K] += by_velocity[name]
        return self

    def finish(self) -> None:
        """All is in the state already."""

    def _velocity(self, name: str) -> Tensor | None:
        known = self._settings.momentum > 0 and name in self._state.parameters()
        return self._state.memory_of("velocity", name) if known else None


def _carry(weight: Tensor, velocity: Tensor | None, sources: loop.Sources) -> None:
    """What a block's steps make of the weight and velocity it began with, unseen rows included."""
    (a, a_velocity), (b, b_velocity) = sources.shares.tolist()
    if velocity is None:
        weight.mul_(a)
        return
    before = weight.clone() if a_velocity else weight
    weight.mul_(a).add_(velocity, alpha=b)
    velocity.mul_(b_velocity)
    if a_velocity:
        velocity.add_(before, alpha=a_velocity)
