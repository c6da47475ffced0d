"""Train once, evaluate many: one sequence of tasks, then every row of a recipe from its stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import nn

from arc_cl import catalogue
from arc_cl.contracts import DataSource, Example, LabelledImages, Learner
from arc_cl.engine.answers import Answers, Flags
from arc_cl.engine.evaluate import evaluate
from arc_cl.engine.features import store_features
from arc_cl.engine.progress import Progress
from arc_cl.engine.provenance import provenance
from arc_cl.engine.sequence import Run, train
from arc_cl.experiments.spec import Recipe
from arc_cl.protocol.record import Evaluation

_EXAMPLES = 6


@dataclass(frozen=True)
class Comparison:
    """A record for each row of the recipe; of the last row's last stage also changed images."""

    evaluations: tuple[Evaluation, ...]
    repaired: tuple[Example, ...]
    broken: tuple[Example, ...]


def compare(
    run: Run,
    recipe: Recipe,
    source: DataSource,
    backbone: Callable[[], nn.Module],
    command: str,
    progress: Progress,
) -> Comparison:
    """Train the recipe's learner into the run's folder, then evaluate all rows from its stages."""
    source.prepare(None)
    test = source.arrays("test")

    def fresh() -> Learner:
        learner: Learner = catalogue.load("learners", recipe.learner).create(
            backbone(), recipe.training
        )
        return learner

    train(run, fresh(), source.arrays("train"), progress)
    store_features(run, fresh(), test, progress)
    progress.phase("Test-time methods", run.stages * len(recipe.rows))
    origin = provenance(run.runtime.device, command)
    results = [evaluate(run, fresh(), recipe, row, origin, progress) for row in recipe.rows]
    last = results[-1].answers[-1]
    return Comparison(
        tuple(result.evaluation for result in results),
        _examples(run, last, last.repaired, test, source.class_names),
        _examples(run, last, last.broken, test, source.class_names),
    )


def _examples(
    run: Run, answers: Answers, wanted: Flags, test: LabelledImages, names: tuple[str, ...]
) -> tuple[Example, ...]:
    """The first images of the stream that are wanted: not picked by hand."""
    name_of = [names[original] for original in run.scenario.order]
    return tuple(
        Example(
            image_HWC=test.images_NHWC[answers.index[i]],
            before=name_of[answers.plain[i]],
            after=name_of[answers.answer[i]],
            truth=name_of[answers.label[i]],
        )
        for i in np.flatnonzero(wanted)[:_EXAMPLES]
    )
