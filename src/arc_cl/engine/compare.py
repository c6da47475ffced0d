"""Train once, evaluate many: one sequence of tasks, then every row of a recipe from its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arc_cl.contracts import Example, LabelledImages
from arc_cl.engine.answers import Answers, Flags
from arc_cl.engine.evaluate import Result, Stream, evaluate
from arc_cl.engine.progress import Progress
from arc_cl.engine.provenance import provenance
from arc_cl.engine.resolve import Resolved
from arc_cl.engine.runs import Trained
from arc_cl.engine.sequence import Run
from arc_cl.engine.training import Order, train
from arc_cl.experiments.spec import Comparison, Row
from arc_cl.protocol.record import Evaluation

_EXAMPLES = 6


@dataclass(frozen=True)
class Compared:
    """A record for each row of the recipe; of the last row's last stage also changed images."""

    evaluations: tuple[Evaluation, ...]
    repaired: tuple[Example, ...]
    broken: tuple[Example, ...]


def compare(
    order: Order, comparison: Comparison, resolved: Resolved, progress: Progress
) -> Compared:
    """Train the recipe's learner into the run's folder, then evaluate all rows from its stages."""
    trained = train(order, resolved, progress)
    run = trained.run
    stream = Stream(comparison.shuffled, comparison.batch_size)
    results = evaluate_rows(trained, comparison.rows, stream, order.command, progress)
    last = results[-1].answers[-1]
    names = resolved.source.class_names
    return Compared(
        tuple(result.evaluation for result in results),
        _examples(run, last, last.repaired, trained.test, names),
        _examples(run, last, last.broken, trained.test, names),
    )


def evaluate_rows(
    trained: Trained, rows: Sequence[Row], stream: Stream, command: str, progress: Progress
) -> list[Result]:
    """Every row on the same stages and the same stream."""
    progress.phase("Test-time methods", trained.run.stages * len(rows))
    origin = provenance(trained.run.runtime.device, command)
    return [evaluate(trained, row, stream, origin, progress) for row in rows]


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
