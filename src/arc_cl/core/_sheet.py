"""What the compiled forms of `replay` write."""

from __future__ import annotations

import torch

from arc_cl.core._rows import Answers
from arc_cl.core._stream import Stream
from arc_cl.core.decision import Observation
from arc_cl.core.partition import TaskPartition


class Sheet:
    """The observation of a whole stream, as it is being written."""

    def __init__(self, stream: Stream, partition: TaskPartition) -> None:
        row_N = stream.norm_N
        self.seen = Observation(
            logits=row_N.new_empty(len(stream), partition.num_classes),
            confidence=torch.empty_like(row_N),
            ratio=torch.empty_like(row_N),
            retained=torch.empty_like(row_N, dtype=torch.bool),
        )
        arrays = (value.numpy() for value in vars(self.seen).values())
        self.answers = Answers(*arrays)  # the same memory, for compiled loops to write

    def put(self, rows: slice, seen: Observation) -> None:
        for name, value in vars(seen).items():
            getattr(self.seen, name)[rows] = value
