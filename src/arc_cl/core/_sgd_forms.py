"""How weight and velocity are kept between the blocks of an SGD replay.

Where nothing but lr and momentum move the head, U = W - pull·V with pull = lr·μ/(1-μ) is moved by
gradients alone (it is where the weight would come to rest), and V is a fading sum over the latest
rows. `RestForm` keeps U. As long as the latest rows fade fast enough it keeps those instead of V:
one product with as many of them as still matter replaces the two that V costs a block. Where few
batches make a step, or batches are larger, it keeps V itself.

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
from arc_cl.core._rows import Array
from arc_cl.core._stream import Stream
from arc_cl.core.head import HeadState
from arc_cl.core.partition import TaskPartition
from arc_cl.core.settings import ARCSettings

_LANES = 16
# How far dropped velocities may move a logit at worst, all features pointing the same way. In
# practice it is a hundredth of that, well under what rounding does to a logit.
_NEGLIGIBLE = {torch.float32: 1e-5, torch.float64: 1e-14}


class Buffers:
    """Scratch for blocks of N rows, P columns wide: the K classes, padded."""

    def __init__(self, stream: Stream, partition: TaskPartition, length: int) -> None:
        dtype = stream.features_ND.dtype
        self.num_classes = K = partition.num_classes
        self.length = length
        blank = torch.zeros(length, -(-K // _LANES) * _LANES, dtype=dtype)
        # Logits by the weight; -inf in the padding, so that no softmax sees it.
        weight, velocity, update = torch.full_like(blank, -torch.inf), blank.clone(), blank.clone()
        self.by_weight_NK, self.by_velocity_NK = weight[:, :K], velocity[:, :K]
        self.update_NK = update[:, :K]
        self.weight_NP, self.velocity_NP = weight.numpy(), velocity.numpy()
        self.update_NP = update.numpy()
        self.sources = loop.Sources(
            shares=np.zeros((2, 2)),
            gradient_NP=blank.numpy(),
            row_N=np.empty(length, np.int64),
            weight_N=np.empty(length),
            velocity_N=np.empty(length),
        )

    def base(
        self,
        weight_bias_P: Array,
        velocity_bias_P: Array,
        one: float,
        past_P: Array,
        stream: Stream,
    ) -> loop.Base:
        scratch = np.zeros((2, stream.batch_size, len(past_P)), past_P.dtype)
        return loop.Base(
            by_weight_NP=self.weight_NP,
            by_velocity_NP=self.velocity_NP,
            weight_bias_P=weight_bias_P,
            velocity_bias_P=velocity_bias_P,
            one=one,
            past_P=past_P,
            finite_S=stream.finite_N.numpy(),
            norm_S=stream.norm_N.numpy(),
            z_BP=scratch[0],
            y_BP=scratch[1],
            e_P=np.zeros_like(past_P),
        )

    def padded(self, vector_K: Tensor | None) -> Array:
        """A vector over the classes in the buffers' width and dtype; None is zero."""
        padded_P: Array = np.zeros_like(self.weight_NP[0])
        if vector_K is not None:
            padded_P[: self.num_classes] = vector_K[: self.num_classes].numpy()
        return padded_P


class Form(Protocol):
    """The verbs of a replay, block by block. The loop reads the biases, always up to date."""

    weight_bias_P: Array
    velocity_bias_P: Array

    def prepare(self, rows: slice) -> tuple[Tensor, int]:
        """Fill the buffers with what the head at the block's start says of its rows.

        Returns the products of these rows with some rows before them and with each other, and how
        many those before are.
        """

    def within_guard(self, rows: slice, count: int) -> bool:
        """Whether surely no step of the block went beyond `max_drift`."""

    def settle(self, rows: slice, count: int) -> None:
        """Bring weight and velocity up to date."""

    def finish(self) -> None:
        """Write to the state what is not there yet."""


def choose_form(state: HeadState, stream: Stream, settings: ARCSettings, buffers: Buffers) -> Form:
    guarded = settings.max_drift is not None
    if guarded or settings.weight_decay or settings.step == "relative":
        return StateForm(state, stream, settings, buffers)
    return RestForm(state, stream, settings, buffers)


class RestForm:
    """U = W - pull·V, and V as the latest rows or as a matrix."""

    def __init__(
        self, state: HeadState, stream: Stream, settings: ARCSettings, buffers: Buffers
    ) -> None:
        self._state, self._stream, self._buffers = state, stream, buffers
        self._norms = stream.norm_N.numpy()
        self._momentum = settings.momentum
        self._pull = settings.lr * settings.momentum / (1 - settings.momentum)
        K, dtype = buffers.num_classes, stream.features_ND.dtype
        # The part of V that the tail does not hold, to be multiplied by a share that fades with
        # every step; and at most how far it moves a logit, per ‖f‖.
        self._matrix = self._velocity("weight")
        self._matrix_share = 1.0
        self._matrix_size = torch.linalg.matrix_norm(self._matrix).item()
        self._rest = state.weight[:K] - self._pull * self._matrix
        velocity_bias_P = buffers.padded(self._velocity("bias"))
        self._rest_bias_P = buffers.padded(state.bias) - self._pull * velocity_bias_P
        nothing_P = buffers.padded(None)
        # Without a bias, what adds up in these is nobody's.
        self.weight_bias_P = nothing_P if state.bias is None else self._rest_bias_P
        self.velocity_bias_P = nothing_P if state.bias is None else velocity_bias_P
        remembered = self._remembered_rows()
        self._keeps_tail = 0 < remembered <= 2 * K  # with more rows V itself is cheaper
        R = max(remembered if self._keeps_tail else 0, buffers.length)
        R = -(-R // _LANES) * _LANES
        self._tail_RP = torch.zeros(R, buffers.weight_NP.shape[1], dtype=dtype)
        self._tail = loop.Tail(self._tail_RP.numpy(), np.zeros(R), velocity_bias_P)
        # A velocity smaller than this moves no logit by more than is negligible.
        farthest = self._pull * stream.norm_N.max().item()
        self._limit = _NEGLIGIBLE[dtype] / max(farthest, 1e-300)
        self._stop = 0

    def prepare(self, rows: slice) -> tuple[Tensor, int]:
        buffers, n = self._buffers, rows.stop - rows.start
        features_ND = self._stream.features_ND
        features = features_ND[rows]
        torch.mm(features, self._rest.T, out=buffers.by_weight_NK[:n])
        h = min(self._latest_rows(), rows.start)
        gram = features @ features_ND[rows.start - h : rows.stop].T
        by_velocity_NK = buffers.by_velocity_NK[:n]
        if h:
            latest = self._tail_RP[-h:, : buffers.num_classes]
            torch.mm(gram[:, :h], latest, out=by_velocity_NK)
        else:
            by_velocity_NK.zero_()
        if self._matrix_share * self._matrix_size > self._limit:
            by_velocity_NK.addmm_(features, self._matrix.T, alpha=self._matrix_share)
        buffers.sources.shares[:] = (1.0, 0.0), (self._pull, 1.0)
        return gram, h

    def within_guard(self, rows: slice, count: int) -> bool:
        return True  # this form is not chosen where there is a guard

    def settle(self, rows: slice, count: int) -> None:
        buffers, n = self._buffers, rows.stop - rows.start
        fade = float(buffers.sources.shares[1, 1])
        if self._keeps_tail and self._tail.size_R[:n].sum() * fade > self._limit:
            self._fold()  # the rows that leave the tail now have not faded: V serves better
            self._keeps_tail = False
        loop.settle_block(
            buffers.sources, count, self._pull, self._norms[rows], buffers.update_NP[:n],
            self._rest_bias_P, self._tail,
        )  # fmt: skip
        self._rest.addmm_(buffers.update_NK[:n].T, self._stream.features_ND[rows])
        self._matrix_share *= fade
        self._stop = rows.stop
        if not self._keeps_tail and self._momentum:
            self._fold(newest=n)

    def finish(self) -> None:
        K = self._buffers.num_classes
        self._fold()
        self._state.weight[:K] = self._rest.add_(self._matrix, alpha=self._pull)
        if self._state.bias is not None:
            bias_K = torch.from_numpy(self._tail.bias_P)[:K]
            self._velocity("bias").copy_(bias_K)
            self._state.bias[:K] = torch.from_numpy(self._rest_bias_P)[:K] + self._pull * bias_K

    def _fold(self, newest: int | None = None) -> None:
        """Turn the tail, or as many of its newest rows, from rows into a part of the matrix."""
        held = min(newest or len(self._tail_RP), self._stop)
        if held:
            tail_HK = self._tail_RP[-held:, : self._buffers.num_classes]
            latest = self._stream.features_ND[self._stop - held : self._stop]
            self._matrix.addmm_(tail_HK.T, latest, beta=self._matrix_share)
            self._matrix_size = self._matrix_share * self._matrix_size + self._tail.size_R.sum()
            self._matrix_share = 1.0
            self._tail_RP[-held:].zero_()
            self._tail.size_R[-held:] = 0

    def _latest_rows(self) -> int:
        """Rows of the tail that matter; products of whole lanes are the faster ones."""
        rows = int(loop.reach(self._tail.size_R, self._limit))
        return min(-(-rows // _LANES) * _LANES, len(self._tail_RP))

    def _velocity(self, name: str) -> Tensor:
        """The optimiser's velocity of the classes seen; without momentum zeros, kept nowhere."""
        parameter = self._state.parameters().get(name)
        if parameter is None or not self._momentum:
            like = self._state.weight if name == "weight" else self._state.weight[:, 0]
            return torch.zeros_like(like[: self._buffers.num_classes])
        return self._state.memory_of("velocity", name)[: self._buffers.num_classes]

    def _remembered_rows(self) -> int:
        """Rows after which a velocity has faded below rounding, if every batch makes a step."""
        if not self._momentum:
            return 0
        rounding = torch.finfo(self._stream.features_ND.dtype).eps
        steps = math.ceil(math.log(rounding) / math.log(self._momentum))
        return steps * self._stream.batch_size


class StateForm:
    """Weight and velocity in the state itself, both brought up to date after each block."""

    def __init__(
        self, state: HeadState, stream: Stream, settings: ARCSettings, buffers: Buffers
    ) -> None:
        self._state, self._stream, self._buffers = state, stream, buffers
        self._norms = stream.norm_N.numpy()
        self._settings = settings
        self.weight_bias_P, self.velocity_bias_P = buffers.padded(None), buffers.padded(None)
        P = buffers.weight_NP.shape[1]
        self._tail_NP = torch.zeros(buffers.length, P, dtype=stream.features_ND.dtype)

    def prepare(self, rows: slice) -> tuple[Tensor, int]:
        buffers, features = self._buffers, self._stream.features_ND[rows]
        n, K = len(features), buffers.num_classes
        torch.mm(features, self._state.weight[:K].T, out=buffers.by_weight_NK[:n])
        velocity = self._velocity("weight")
        if velocity is not None:
            torch.mm(features, velocity[:K].T, out=buffers.by_velocity_NK[:n])
        self.weight_bias_P[:] = buffers.padded(self._state.bias)
        self.velocity_bias_P[:] = buffers.padded(self._velocity("bias"))
        buffers.sources.shares[:] = (1.0, 0.0), (0.0, 1.0)
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

    def settle(self, rows: slice, count: int) -> None:
        buffers, features = self._buffers, self._stream.features_ND[rows]
        n, K = len(features), buffers.num_classes
        update_bias_P, tail_bias_P = buffers.padded(None), buffers.padded(None)
        tail = loop.Tail(self._tail_NP[:n].numpy(), np.zeros(n), tail_bias_P)
        loop.settle_block(
            buffers.sources, count, 0.0, self._norms[rows], buffers.update_NP[:n], update_bias_P,
            tail,
        )  # fmt: skip
        by_weight = {"weight": buffers.update_NK[:n].T @ features}
        by_velocity = {"weight": self._tail_NP[:n, :K].T @ features}
        if self._state.bias is not None:
            by_weight["bias"] = torch.from_numpy(update_bias_P[:K])
            by_velocity["bias"] = torch.from_numpy(tail_bias_P[:K])
        for name, parameter in self._state.parameters().items():
            velocity = self._velocity(name)
            _carry(parameter, velocity, buffers.sources)
            parameter[:K] += by_weight[name]
            if velocity is not None:
                velocity[:K] += by_velocity[name]

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
