"""What a run keeps while a task is learnt: its state every few minutes, and a line an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from torch import nn
from torch.optim import Optimizer

from arc_cl.engine.checkpoints import Place, load_unfinished, save_unfinished
from arc_cl.engine.events import Journal
from arc_cl.engine.fit import Progressed


@dataclass
class StageKeeper:
    """Of one stage of one run."""

    folder: Path
    stage: int
    journal: Journal
    seconds: float
    """Between two states; 0 keeps every step."""
    epochs_before: int
    """Of earlier stages: TensorBoard counts epochs through the whole run."""
    _kept: float = field(default_factory=monotonic)
    _epoch_began: float = field(default_factory=monotonic)

    def left_at(self, module: nn.Module, optimizer: Optimizer) -> Progressed:
        found = load_unfinished(self.folder, self.stage, module, optimizer)
        if found is None:
            return Progressed()
        place, sums = found
        self.journal.note("resumed", stage=self.stage, epoch=place.epoch, step=place.step)
        return Progressed(place.epoch, place.step, sums)

    def step_done(self, module: nn.Module, optimizer: Optimizer, at: Progressed) -> None:
        if monotonic() - self._kept < self.seconds:
            return
        place = Place(self.stage, at.epoch, at.step)
        save_unfinished(self.folder, place, module, optimizer, at.sums or {})
        self._kept = monotonic()

    def epoch_done(self, epoch: int, means: Mapping[str, float], images: int) -> None:
        seconds = monotonic() - self._epoch_began
        self.journal.note(
            "epoch",
            stage=self.stage,
            epoch=epoch,
            images=images,
            seconds=round(seconds, 3),
            **means,
        )
        self.journal.scalars(
            {f"train/{name}": value for name, value in means.items()}, self.epochs_before + epoch
        )
        self._epoch_began = monotonic()
