"""`arc-cl train`: a recipe into a run folder, and the same command again to go on with it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from arc_cl.contracts import LabelledImages
from arc_cl.engine.coupling import between
from arc_cl.engine.evaluate import Stream, evaluate
from arc_cl.engine.events import Journal
from arc_cl.engine.features import TestSplit, features_stored, store_features
from arc_cl.engine.images import DeviceImages
from arc_cl.engine.progress import Progress
from arc_cl.engine.provenance import provenance
from arc_cl.engine.resolve import Resolved
from arc_cl.engine.run_folder import Identity, claim
from arc_cl.engine.runs import Trained
from arc_cl.engine.runtime import Runtime
from arc_cl.engine.sequence import Pace, Run, learn, stages
from arc_cl.errors import CompatibilityError
from arc_cl.experiments.spec import Row
from arc_cl.protocol.record import Evaluation

_PLAIN_BATCH = 500


@dataclass(frozen=True)
class Order:
    """What a run needs beside its recipe."""

    folder: Path
    runtime: Runtime
    command: str
    keep_seconds: float = 300.0


def train(order: Order, resolved: Resolved, progress: Progress) -> Trained:
    """All tasks into the run folder: checkpoints, the features of each stage's test stream.

    Stages that are there already are kept: after an interruption the same call goes on.
    """
    run = Run(order.folder, resolved.scenario, order.runtime, resolved.appearance)
    data, test = resolved.source.arrays("train"), resolved.source.arrays("test")
    _check_images(run, resolved, data)
    identity = Identity.of(order.runtime, resolved, {"train": data, "test": test})
    claim(order.folder, identity, provenance(order.runtime.device, order.command))
    split = TestSplit(run, test)
    with closing(Journal(order.folder)) as journal:
        learner = resolved.learner()
        what = between(resolved.recipe, resolved.settings, run, learner, test)
        for meta in learn(run, learner, data, what, Pace(journal, progress, order.keep_seconds)):
            with torch.inference_mode():
                features = store_features(run, learner, split, meta)
                logits_NK = learner.adaptable().classify(
                    features.features_ND.to(run.runtime.device)
                )
            right = logits_NK.argmax(dim=1).cpu().numpy() == features.labels_N
            journal.note("accuracy", stage=meta.stage, right=int(right.sum()), images=len(right))
            journal.scalars({"test/accuracy": float(right.mean())}, meta.stage)
    if not all(map(partial(features_stored, run.folder), range(run.stages))):
        fresh = resolved.learner()
        for meta in stages(run, fresh):
            store_features(run, fresh, split, meta)
    return Trained(run, resolved, test)


def plain(order: Order, trained: Trained, progress: Progress) -> Evaluation:
    """The classifier's own answers at every stage, as a record."""
    progress.phase("Evaluation", trained.run.stages)
    origin = provenance(order.runtime.device, order.command)
    stream = Stream(shuffled=False, batch_size=_PLAIN_BATCH)
    row = Row(title="plain", method="none")
    return evaluate(trained, row, stream, origin, progress).evaluation


def _check_images(run: Run, resolved: Resolved, data: LabelledImages) -> None:
    """A backbone that cannot take the images says so before the run folder is made."""
    images = DeviceImages(data.images_NHWC[:1], run.appearance, torch.device("cpu"))
    try:
        with torch.no_grad():
            resolved.backbone.module(images.at_test(torch.tensor([0])))
    except (AssertionError, RuntimeError) as error:
        _, height, width, _ = data.images_NHWC.shape
        raise CompatibilityError(
            f"the backbone {resolved.backbone.name} cannot take the images of "
            f"{resolved.recipe.setup.data} ({height} x {width}, transform "
            f"{run.appearance.transform}): {error}; choose another transform or backbone"
        ) from error
