"""No adaptation: the classifier's own answer, under the verbs of every other test-time method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from arc_cl.contracts import Adaptable
from arc_cl.core.decision import Decision, Observation, decide
from arc_cl.core.detection import detect
from arc_cl.core.partition import TaskPartition
from arc_cl.core.settings import ARCSettings

_OFF = ARCSettings(retention=False, correction=False)


@dataclass(frozen=True)
class Settings:
    """There is nothing to set."""


class Plain:
    """Argmax of the logits; confidence and ratio are reported, nothing follows from them."""

    consumes: Literal["features", "images"] = "features"

    def start(self, adaptable: Adaptable, partition: TaskPartition) -> None:
        self._adaptable = adaptable
        self._partition = partition

    @torch.no_grad()
    def predict(self, batch: Tensor) -> Decision:
        logits_BK = self._adaptable.classify(batch)
        found = detect(logits_BK, self._partition)
        seen = Observation(
            logits=logits_BK,
            confidence=found.confidence,
            ratio=found.ratio,
            retained=torch.zeros_like(found.newest),
        )
        return decide(seen, self._partition, _OFF)

    def finish(self) -> None:
        del self._adaptable


def create(settings: Settings) -> Plain:
    return Plain()
