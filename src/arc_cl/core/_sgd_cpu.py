"""SGD replay on the CPU, a block of rows at a time.

Matrix products give what the block's first head says of its rows, and their Gram matrix; the
compiled loop of `_sgd_loop` runs the steps in between; more products bring the head up to date.
How weight and velocity are kept between blocks is the business of `_sgd_forms`.
"""

from __future__ import annotations

import numpy as np
import torch

from arc_cl.core._rows import Rules
from arc_cl.core._sgd_forms import Buffers, choose_form
from arc_cl.core._sgd_loop import run_block
from arc_cl.core._sheet import Sheet
from arc_cl.core._stream import Stream
from arc_cl.core.decision import Observation
from arc_cl.core.head import HeadState
from arc_cl.core.partition import TaskPartition
from arc_cl.core.settings import ARCSettings
from arc_cl.core.step import step_by_step

_BLOCK = 64


def replay_sgd(
    state: HeadState, stream: Stream, partition: TaskPartition, settings: ARCSettings
) -> Observation:
    """What step-by-step SGD shows, and `state` moved as far."""
    length = max(1, _BLOCK // stream.batch_size) * stream.batch_size
    buffers = Buffers(stream, partition, length)
    form = choose_form(state, stream, settings, buffers)
    past_P = buffers.padded(torch.tensor(partition.array < partition.newest))
    one = 0.0 if state.bias is None else 1.0
    base = buffers.base(form, one, past_P, stream)
    rules = Rules.of(partition, settings)
    sheet = Sheet(stream, partition)
    norms = np.array([state.norm_total, state.norm_rows], dtype=np.float64)
    for start in range(0, len(stream), length):
        rows = slice(start, min(start + length, len(stream)))
        features = stream.features_ND[rows]
        gram, offset = form.prepare(rows, features)
        state.norm_total, state.norm_rows = float(norms[0]), int(norms[1])
        count, steps = run_block(
            base, buffers.sources, sheet.answers, gram.numpy(), offset, (start, rows.stop),
            form.pull, form.share, norms, rules,
        )  # fmt: skip
        if form.within_guard(rows, count):
            settled = form.settle(rows, features, count)
            if settled is not form:
                form, base = settled, buffers.base(settled, one, past_P, stream)
            state.steps += steps
        else:
            seen = step_by_step(state, features, partition, settings, stream.batch_size)
            sheet.put(rows, seen)
    form.finish()
    state.norm_total, state.norm_rows = float(norms[0]), int(norms[1])
    return sheet.seen
