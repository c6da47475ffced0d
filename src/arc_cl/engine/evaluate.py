"""A test-time method over all stages of a run: stored features in, a record and answers out.

At every stage the method starts from the model as it was trained; nothing that it learns at test
time reaches a later stage, or training. It is given features, never a label.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from arc_cl import catalogue
from arc_cl.contracts import Learner, Replays, TestTimeMethod
from arc_cl.core.decision import Decision
from arc_cl.engine.answers import Answers, write_answers
from arc_cl.engine.features import StageFeatures, load_features
from arc_cl.engine.guard import lent
from arc_cl.engine.images import DeviceImages
from arc_cl.engine.progress import Progress
from arc_cl.engine.runs import Trained
from arc_cl.engine.sequence import Run, stages
from arc_cl.experiments.spec import Row
from arc_cl.protocol.record import Evaluation, Scalar


@dataclass(frozen=True)
class Result:
    """A record, and the answers of each stage that it counts."""

    evaluation: Evaluation
    answers: tuple[Answers, ...]


@dataclass(frozen=True)
class Stream:
    """How test data arrive: in random order or class by class, and how many at a time."""

    shuffled: bool
    batch_size: int


def evaluate(
    trained: Trained,
    row: Row,
    stream: Stream,
    provenance: Mapping[str, Scalar],
    progress: Progress,
) -> Result:
    """All stages of a run under one row of a table; written to the run's `evaluations/`."""
    run, resolved = trained.run, trained.resolved
    module = catalogue.load("adapt", row.method)
    settings: Any = row.settings if row.settings is not None else module.Settings()
    method: TestTimeMethod = module.create(settings)
    learner = resolved.learner()
    images = DeviceImages(trained.test.images_NHWC, run.appearance, run.runtime.device)
    answers, seconds = list[Answers](), 0.0
    for meta in stages(run, learner):
        features = _arranged(run, stream, meta.stage, meta.sha256)
        arriving = _Arriving(features, images, stream.batch_size)
        stage_answers, stage_seconds = _answer(run, learner, method, arriving)
        answers.append(stage_answers)
        seconds += stage_seconds
        progress.advance(1, len(features.labels_N))
    scenario = run.scenario
    evaluation = Evaluation(
        method=row.method,
        title=row.title,
        settings=asdict(settings),
        learner=resolved.recipe.setup.learner,
        training={**asdict(resolved.recipe.setup), **resolved.recipe.settings},
        tasks=scenario.tasks,
        stream="shuffled" if stream.shuffled else "sorted",
        batch_size=stream.batch_size,
        seed=run.runtime.seed,
        correct=tuple(scenario.count_by_task(a.label[a.right], t) for t, a in enumerate(answers)),
        total=tuple(scenario.count_by_task(a.label, t) for t, a in enumerate(answers)),
        detections=tuple(a.detections(scenario, t) for t, a in enumerate(answers)),
        seconds=seconds,
        provenance=provenance,
    )
    _write(run.folder, evaluation, answers)
    return Result(evaluation, tuple(answers))


@dataclass(frozen=True)
class _Arriving:
    """The test data of one stage in the order and in the batches that they come in."""

    features: StageFeatures
    images: DeviceImages
    batch_size: int


def _arranged(run: Run, stream: Stream, stage: int, checkpoint: str) -> StageFeatures:
    features = load_features(run.folder, stage, checkpoint)
    if not stream.shuffled:
        return features
    generator = run.runtime.generator("stream", stage)
    return features.rearranged(torch.randperm(len(features.labels_N), generator=generator))


def _answer(
    run: Run, learner: Learner, method: TestTimeMethod, stream: _Arriving
) -> tuple[Answers, float]:
    """The method's answers to the stage that `learner` is in, and the seconds they took."""
    classifier = learner.adaptable()
    features_ND = stream.features.features_ND.to(run.runtime.device)
    with torch.inference_mode():
        plain_N = classifier.classify(features_ND).argmax(dim=1)
    with lent(learner.modules()):
        began = perf_counter()
        method.start(classifier, run.scenario.partition(stream.features.stage))
        decisions = _decide(run, method, stream, features_ND)
        method.finish()
        seconds = perf_counter() - began
    return Answers.of(stream.features, plain_N, decisions), seconds


def _decide(
    run: Run, method: TestTimeMethod, stream: _Arriving, features_ND: Tensor
) -> list[Decision]:
    """Methods that adapt the head alone read stored features; others see the images."""
    if method.consumes == "images":
        numbers_N = torch.from_numpy(stream.features.indices_N).to(run.runtime.device)
        with run.runtime.fabric.autocast():
            return [
                method.predict(stream.images.at_test(numbers_B))
                for numbers_B in torch.split(numbers_N, stream.batch_size)
            ]
    if isinstance(method, Replays):
        return [method.replay(features_ND, stream.batch_size)]
    return [method.predict(rows_BD) for rows_BD in torch.split(features_ND, stream.batch_size)]


def _write(run: Path, evaluation: Evaluation, answers: list[Answers]) -> None:
    """The file's name tells settings and stream apart, so that no row overwrites another."""
    what = (evaluation.settings, evaluation.stream, evaluation.batch_size)
    digest = sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:8]
    stem = f"{evaluation.method}-{digest}"
    write_answers(run / "evaluations" / f"{stem}.safetensors", answers)
    evaluation.write(run / "evaluations" / f"{stem}.json")
