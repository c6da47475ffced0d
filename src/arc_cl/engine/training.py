"""`arc-cl train`: a recipe into a run folder, and the same command again to go on with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from arc_cl.contracts import LabelledImages, Split
from arc_cl.engine.coupling import between
from arc_cl.engine.evaluate import Stream, evaluate
from arc_cl.engine.events import Journal
from arc_cl.engine.features import TestSplit, store_features
from arc_cl.engine.images import DeviceImages
from arc_cl.engine.progress import Progress
from arc_cl.engine.provenance import provenance
from arc_cl.engine.resolve import Resolved
from arc_cl.engine.runtime import Runtime
from arc_cl.engine.sequence import Pace, Run, learn, stages
from arc_cl.errors import CompatibilityError, RecordError
from arc_cl.experiments.spec import Row
from arc_cl.experiments.toml import dump
from arc_cl.protocol.record import Evaluation

_PLAIN_BATCH = 500
_FILES = ("recipe.toml", "provenance.json")


@dataclass(frozen=True)
class Order:
    """What a run needs beside its recipe."""

    folder: Path
    runtime: Runtime
    command: str
    keep_seconds: float = 300.0


@dataclass(frozen=True)
class Trained:
    """A finished run, with the data that it was learnt and is tested on."""

    run: Run
    resolved: Resolved
    test: LabelledImages


def train(order: Order, resolved: Resolved, progress: Progress) -> Trained:
    """All tasks into the run folder: checkpoints, the features of each stage's test stream.

    Stages that are there already are kept: after an interruption the same call goes on.
    """
    run = Run(order.folder, resolved.scenario, order.runtime, resolved.appearance)
    data, test = resolved.source.arrays("train"), resolved.source.arrays("test")
    _check_images(run, resolved, data)
    _open(order, resolved, {"train": data, "test": test})
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
    return evaluate(trained.run, trained.resolved, row, stream, origin, progress).evaluation


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


def _open(order: Order, resolved: Resolved, data: dict[Split, LabelledImages]) -> None:
    """Write what the run is; a folder that holds another run is refused before anything is done."""
    told = {
        "seed": order.runtime.seed,
        "precision": order.runtime.precision,
        "backbone": resolved.backbone.name,
        "weights": resolved.backbone.weights,
        "weights sha256": resolved.backbone.sha256,
        **{f"{name} images sha256": _digest(images) for name, images in data.items()},
    }
    recipe = dump(resolved.recipe)
    whole = {"run": told, "origin": provenance(order.runtime.device, order.command)}
    contents = (recipe, json.dumps(whole, indent=1) + "\n")
    _make(order.folder)
    if (order.folder / _FILES[1]).is_file():
        _compare(order.folder, recipe, told)
        return
    for name, content in zip(_FILES, contents, strict=True):
        partial = order.folder / f".{name}.partial"
        partial.write_text(content, encoding="utf-8")
        partial.replace(order.folder / name)


def _make(folder: Path) -> None:
    """Whether there is a place for results shows before the first batch, not after the last."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(
            f"cannot write to the run folder {folder}: {error.strerror}; choose another with --out"
        ) from error


def _compare(folder: Path, recipe: str, told: dict[str, str | int]) -> None:
    """The same run goes on; another one does not go into its folder."""
    found = _told_lines(
        _read(folder / _FILES[0], str), _read(folder / _FILES[1], json.loads)["run"]
    )
    wanted = _told_lines(recipe, told)
    odd = sorted(found ^ wanted, key=lambda line: (line.partition(" ")[0], line in wanted))
    if odd:
        shown = "; ".join(f"{'it has' if line in found else 'now'} {line}" for line in odd[:4])
        raise RecordError(
            f"the folder {folder} holds another run ({shown}); choose another folder with --out, "
            f"or delete that one"
        )


def _told_lines(recipe: str, told: dict[str, str | int]) -> set[str]:
    lines = {line.partition("#")[0].strip() for line in recipe.splitlines()}
    return {line for line in lines if line} | {f"{name} = {value}" for name, value in told.items()}


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(
            f"cannot read {path}: {error}; delete the run folder to begin again"
        ) from error


def _digest(data: LabelledImages) -> str:
    whole = sha256(data.images_NHWC.tobytes())
    whole.update(data.labels_N.tobytes())
    return whole.hexdigest()
