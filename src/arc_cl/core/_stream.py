"""What the fast forms of `replay` read, and what they write."""

from __future__ import annotations

import torch
from torch import Tensor

from arc_cl.core._rows import Answers
from arc_cl.core.decision import Observation
from arc_cl.core.partition import TaskPartition


class Stream:
    """A stream of features."""

    def __init__(
        self, features_ND: Tensor, norm_N: Tensor, finite_N: Tensor, batch_size: int
    ) -> None:
        self.features_ND = features_ND.contiguous()  # entries that were not finite are 0
        self.norm_N = norm_N  # ‖f‖ of each row
        self.finite_N = finite_N  # bool, the row had only finite entries
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.features_ND)


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
