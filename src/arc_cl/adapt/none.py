"""No adaptation: the classifier's own answer, under the verbs of every other test-time method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from arc_cl.adapt._answers import answer, readable
from arc_cl.contracts import Adaptable
from arc_cl.core.decision import Decision
from arc_cl.core.partition import TaskPartition


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
        features_BD, finite_B = readable(batch)
        return answer(self._adaptable.classify(features_BD), self._partition, finite_B)

    def finish(self) -> None:
        del self._adaptable


def create(settings: Settings) -> Plain:
    return Plain()
