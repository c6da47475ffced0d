"""A whole stream at once: the same result as batch by batch, by the fastest way that is exact.

* SGD on a CPU, small batches: matrix products of whole blocks, and a compiled loop (`_sgd_cpu`).
* SGD on a GPU, small batches: the same, with one kernel for the loop (`_sgd_gpu`).
* Adam on a CPU, small batches: a compiled loop that goes over the head once a step (`_adam_cpu`).
* Everything else: step by step, where matrix products dominate anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from arc_cl.core._stream import Stream
from arc_cl.core.decision import Observation
from arc_cl.core.head import HeadState
from arc_cl.core.partition import TaskPartition
from arc_cl.core.settings import ARCSettings
from arc_cl.core.step import step_by_step, without_nonfinite

LARGEST_SMALL_BATCH = 32
# Without retention the rows do not depend on each other: this many are answered at once.
_INDEPENDENT_ROWS = 8192
# Products of features with larger norms could overflow in float32, one by one they might not.
_LARGEST_NORM = 1e15

Engine = Callable[[HeadState, Stream, TaskPartition, ARCSettings], Observation]


def replay(
    state: HeadState,
    features_ND: Tensor,
    partition: TaskPartition,
    settings: ARCSettings,
    batch_size: int,
) -> Observation:
    """What `advance` shows batch by batch, and `state` moved as far."""
    if not settings.retention:
        return step_by_step(state, features_ND, partition, settings, _INDEPENDENT_ROWS)
    few_steps = batch_size > LARGEST_SMALL_BATCH or len(features_ND) <= batch_size
    engine = None if few_steps else _engine(features_ND, partition, settings, batch_size)
    stream = None if engine is None else _stream(features_ND, batch_size)
    if stream is not None and settings.max_drift is not None and not stream.finite_N.all():
        stream = None  # a block that the guard sends step by step needs its rows as they were
    if engine is None or stream is None:
        return step_by_step(state, features_ND, partition, settings, batch_size)
    state.nonfinite_rows += int((~stream.finite_N).sum())
    return engine(state, stream, partition, settings)


def _engine(
    features_ND: Tensor, partition: TaskPartition, settings: ARCSettings, batch_size: int
) -> Engine | None:
    """The fast form that serves these settings here. Each is loaded only where it is used."""
    device, adam = features_ND.device.type, settings.optimizer == "adam"
    if device == "cpu" and adam and settings.max_drift is None:
        from arc_cl.core._adam_cpu import replay_adam

        return replay_adam
    if device == "cpu" and not adam:
        from arc_cl.core._sgd_cpu import replay_sgd

        return replay_sgd
    unguarded_sgd = not adam and settings.max_drift is None
    if device == "cuda" and unguarded_sgd and features_ND.dtype == torch.float32:
        if find_spec("triton") is None:
            return None
        from arc_cl.core import _sgd_gpu

        fits = _sgd_gpu.block_length(partition.num_classes, batch_size) > 0
        return _sgd_gpu.replay_sgd if fits else None
    return None


def _stream(features_ND: Tensor, batch_size: int) -> Stream | None:
    """The stream with its norms; None where products of its rows could overflow."""
    norm_N = torch.linalg.vector_norm(features_ND, dim=1)
    if (norm_N < _LARGEST_NORM).all():
        return Stream(features_ND, norm_N, torch.ones_like(norm_N, dtype=torch.bool), batch_size)
    features_ND, finite_N = without_nonfinite(features_ND)
    norm_N = torch.linalg.vector_norm(features_ND, dim=1)
    if not (norm_N < _LARGEST_NORM).all():
        return None
    return Stream(features_ND, norm_N, finite_N, batch_size)
