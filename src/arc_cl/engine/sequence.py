"""A sequence of tasks, learnt in order; each stage leaves a checkpoint to read later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Protocol

import torch
from torch import Tensor

from arc_cl.contracts import AsksFirst, LabelledImages, Learner
from arc_cl.engine.checkpoints import (
    StageMeta,
    drop_unfinished,
    finished_stages,
    load_stage,
    save_stage,
)
from arc_cl.engine.events import Journal
from arc_cl.engine.fit import Losses, TaskData, fit
from arc_cl.engine.images import Appearance, DeviceImages
from arc_cl.engine.keeping import StageKeeper
from arc_cl.engine.progress import Progress
from arc_cl.engine.queries import Queries
from arc_cl.engine.runtime import Runtime
from arc_cl.protocol.stream import Scenario

_BATCH = 256


@dataclass(frozen=True)
class Run:
    """One sequence: what is learnt in which order, with which randomness, kept in which folder."""

    folder: Path
    scenario: Scenario
    runtime: Runtime
    appearance: Appearance

    @property
    def stages(self) -> int:
        return len(self.scenario.tasks)


class Between(Protocol):
    """What happens to a learner between two tasks; nothing, in an honest protocol."""

    def freeze(self, stage: int, learner: Learner) -> None:
        """After a stage, or when a learner is put into that stage again."""

    def adapt(self, stage: int, learner: Learner) -> None:
        """After a stage, before the next task."""


@dataclass(frozen=True)
class Pace:
    """Where a sequence reports to, and how often it keeps its state within a stage."""

    journal: Journal
    progress: Progress
    seconds: float = 300.0


def learn(
    run: Run, learner: Learner, data: LabelledImages, between: Between, pace: Pace
) -> Iterator[StageMeta]:
    """Learn every task that has no checkpoint yet, from training images alone.

    Yields when a stage is on disk and the learner is in its state; whoever asks for the next one
    leaves the learner as it is.
    """
    learner.modules().to(run.runtime.device)
    done = _rebuild(run, learner, between)
    pace.progress.phase("Training", run.stages)
    pace.progress.advance(done, 0)
    tasks = _Tasks(run, learner, data)
    for stage in range(done, run.stages):
        yield _learn_stage(run, learner, stage, tasks, pace)
        between.freeze(stage, learner)
        between.adapt(stage, learner)


def stages(run: Run, learner: Learner) -> Iterator[StageMeta]:
    """Put a fresh learner into its state after each stage in turn, without training."""
    learner.modules().to(run.runtime.device)
    for stage in range(run.stages):
        _begin(run, learner, stage)
        meta = load_stage(run.folder, stage, learner.modules())
        learner.modules().eval()
        yield meta


def _begin(run: Run, learner: Learner, stage: int) -> None:
    learner.begin_task(run.scenario.info(stage), run.runtime.generator("init", stage))


def _rebuild(run: Run, learner: Learner, between: Between) -> int:
    """A fresh learner into its state after the last finished stage; how many are finished."""
    done = min(finished_stages(run.folder), run.stages)
    for stage in range(done):
        _begin(run, learner, stage)
        between.freeze(stage, learner)
    if done:
        load_stage(run.folder, done - 1, learner.modules())
        learner.modules().eval()
        between.adapt(done - 1, learner)
    return done


def _learn_stage(run: Run, learner: Learner, stage: int, tasks: _Tasks, pace: Pace) -> StageMeta:
    task, began = run.scenario.info(stage), monotonic()
    _begin(run, learner, stage)
    data = tasks.data(stage)
    before = sum(learner.plan(run.scenario.info(earlier)).epochs for earlier in range(stage))
    keeper = StageKeeper(run.folder, stage, pace.journal, pace.seconds, before)
    pace.journal.note("stage begins", stage=stage, images=len(data))
    fit(run.runtime, learner, task, data, tasks.losses, keeper, pace.progress)
    learner.end_task(task, tasks.seen_again(data), run.runtime.generator("end", stage))
    meta = save_stage(run.folder, stage, learner.modules(), run.runtime.seed)
    drop_unfinished(run.folder)
    pace.journal.note("stage ends", stage=stage, seconds=round(monotonic() - began, 3))
    return meta


class _Tasks:
    """The training split, cut into tasks for one learner."""

    def __init__(self, run: Run, learner: Learner, data: LabelledImages) -> None:
        self._run, self._learner, self._labels_N = run, learner, data.labels_N
        self._images = DeviceImages(data.images_NHWC, run.appearance, run.runtime.device)
        self._positions_N = torch.from_numpy(run.scenario.positions(data.labels_N))
        self.losses = Losses(run.runtime)
        self._queries = None
        if isinstance(learner, AsksFirst) and not run.appearance.varies:
            self._queries = Queries(run.runtime, learner, self._images)

    def data(self, stage: int) -> TaskData:
        """A task's own images, then those that the learner wants to see again."""
        own_N = torch.from_numpy(self._run.scenario.training_indices(self._labels_N, stage))
        numbers_N = torch.cat([own_N, self._learner.rehearsal()])
        if self._queries is not None:
            self._queries.prepare(numbers_N)
        device = self._run.runtime.device
        labels_N = self._positions_N[numbers_N].to(device)
        return TaskData(self._images, numbers_N.to(device), labels_N, self._queries)

    def seen_again(self, data: TaskData) -> SeenAgain:
        return SeenAgain(self._run.runtime, data)


@dataclass(frozen=True)
class SeenAgain:
    """The images of a task, for what follows its last epoch (`contracts.TrainingImages`)."""

    runtime: Runtime
    data: TaskData

    def of_class(self, position: int) -> Tensor:
        return self.data.numbers_N[self.data.labels_N == position].cpu()

    @torch.no_grad()
    def apply(self, function: Callable[[Tensor], Tensor], numbers_N: Tensor) -> Tensor:
        numbers_N = numbers_N.to(self.runtime.device)
        with self.runtime.fabric.autocast():
            return torch.cat(
                [
                    function(self.data.images.at_test(numbers_B))
                    for numbers_B in torch.split(numbers_N, _BATCH)
                ]
            )
