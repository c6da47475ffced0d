"""ARC beside its rivals: the plug-in of `arc_cl.core` under the verbs of a test-time method.

Retention alone and Correction alone are settings of it. ARC works on a copy of the head, so the
model that was lent stays as it is.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from arc_cl.contracts import Adaptable
from arc_cl.core.decision import Decision
from arc_cl.core.partition import TaskPartition
from arc_cl.core.plugin import ARC
from arc_cl.core.settings import ARCSettings as Settings


class AdaptiveRetentionCorrection:
    """Head-only, hence answers from features: batch by batch, or a stored stream at once."""

    consumes: Literal["features", "images"] = "features"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def start(self, adaptable: Adaptable, partition: TaskPartition) -> None:
        self._arc = ARC(adaptable.head(), tasks=partition, settings=self.settings)

    def predict(self, batch: Tensor) -> Decision:
        return self._arc(batch)

    def replay(self, stream: Tensor, batch_size: int) -> Decision:
        return self._arc.replay(stream, batch_size=batch_size)

    def finish(self) -> None:
        del self._arc


def create(settings: Settings) -> AdaptiveRetentionCorrection:
    return AdaptiveRetentionCorrection(settings)
