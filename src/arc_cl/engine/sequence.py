"""A sequence of tasks, learnt in order; each stage leaves a checkpoint to read later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from arc_cl.contracts import LabelledImages, Learner
from arc_cl.engine.checkpoints import StageMeta, load_stage, save_stage
from arc_cl.engine.fit import fit
from arc_cl.engine.images import DeviceImages, Normalisation
from arc_cl.engine.progress import Progress
from arc_cl.engine.runtime import Runtime
from arc_cl.protocol.stream import Scenario


@dataclass(frozen=True)
class Run:
    """One sequence: what is learnt in which order, with which randomness, kept in which folder."""

    folder: Path
    scenario: Scenario
    runtime: Runtime
    normalisation: Normalisation

    @property
    def stages(self) -> int:
        return len(self.scenario.tasks)


def train(run: Run, learner: Learner, data: LabelledImages, progress: Progress) -> None:
    """Learn every task of the scenario, from training images alone."""
    device = run.runtime.device
    progress.phase("Training", run.stages)
    for stage in range(run.stages):
        task = run.scenario.info(stage)
        indices_N = run.scenario.training_indices(data.labels_N, stage)
        images = DeviceImages(data.images_NHWC[indices_N], run.normalisation, device)
        labels_N = torch.from_numpy(run.scenario.positions(data.labels_N[indices_N])).to(device)
        learner.begin_task(task, run.runtime.generator("init", stage))
        fit(run.runtime, learner, task, images, labels_N, progress)
        learner.end_task(task)
        save_stage(run.folder, stage, learner.modules(), run.runtime.seed)


def stages(run: Run, learner: Learner) -> Iterator[StageMeta]:
    """Put a fresh learner into its state after each stage in turn, without training."""
    for stage in range(run.stages):
        learner.begin_task(run.scenario.info(stage), run.runtime.generator("init", stage))
        meta = load_stage(run.folder, stage, learner.modules())
        learner.modules().to(run.runtime.device).eval()
        yield meta
