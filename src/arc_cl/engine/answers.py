"""The answers of a test-time method to one stage, image by image, beside the truth.

Here, and only here, labels meet answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor

from arc_cl.core.decision import Decision
from arc_cl.engine.features import StageFeatures
from arc_cl.engine.whole import written_whole
from arc_cl.protocol.record import Detections
from arc_cl.protocol.stream import Scenario

Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]
Numbers = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """In the order of the stream. Classes are positions in the class order."""

    index: Indices
    label: Indices
    plain: Indices
    answer: Indices
    confidence: Numbers
    ratio: Numbers
    retained: Flags
    corrected: Flags

    @classmethod
    def of(cls, stream: StageFeatures, plain_N: Tensor, decisions: Sequence[Decision]) -> Answers:
        def column(name: str) -> Tensor:
            return torch.cat([getattr(each, name) for each in decisions]).cpu()

        return cls(
            index=stream.indices_N,
            label=stream.labels_N,
            plain=plain_N.cpu().numpy(),
            answer=column("classes").numpy(),
            confidence=column("confidence").float().numpy(),
            ratio=column("ratio").float().numpy(),
            retained=column("retained").numpy(),
            corrected=column("corrected").numpy(),
        )

    @property
    def right(self) -> Flags:
        return np.equal(self.answer, self.label)

    @property
    def repaired(self) -> Flags:
        """Right where the plain classifier is wrong."""
        return np.logical_and(self.right, np.not_equal(self.plain, self.label))

    @property
    def broken(self) -> Flags:
        """Wrong where the plain classifier is right."""
        return np.logical_and(~self.right, np.equal(self.plain, self.label))

    def detections(self, scenario: Scenario, stage: int) -> Detections:
        past = self.label < scenario.info(stage).old_classes
        return Detections(
            images=len(self.label),
            retained=int(self.retained.sum()),
            retained_right=int((self.retained & self.right).sum()),
            corrected=int(self.corrected.sum()),
            corrected_past=int((self.corrected & past).sum()),
            repaired=int(self.repaired.sum()),
            broken=int(self.broken.sum()),
        )


def write_answers(path: Path, stages: Sequence[Answers]) -> None:
    """Every column of every stage, as `03/answer`, in one safetensors file."""
    tensors = {
        f"{stage:02d}/{field.name}": np.ascontiguousarray(getattr(answers, field.name))
        for stage, answers in enumerate(stages)
        for field in fields(Answers)
    }
    with written_whole(path) as partial:
        save_file(tensors, partial)
