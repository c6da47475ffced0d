"""Records to tables of text: the one place where numbers are rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arc_cl.protocol.record import Evaluation


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text, ready to be laid out anywhere. The first column names the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.1f}".replace("-", "−")


def difference(fraction: float | None, reference: float | None) -> str:
    """Points of percent, signed; computed before rounding."""
    if fraction is None or reference is None:
        return "–"
    return f"{100 * (fraction - reference):+.1f}".replace("-", "−")


def share(part: int, whole: int) -> str:
    """A count, and its share of another count."""
    return f"{part:,} ({percent(part / whole)} %)" if part else "0"


def comparison(evaluations: Sequence[Evaluation]) -> Table:
    """Accuracy and forgetting of each method; the first is the reference."""
    reference = evaluations[0].metrics
    rows = []
    for each in evaluations:
        found = each.metrics
        first = each is evaluations[0]
        rows.append(
            (
                each.title,
                percent(found.average_accuracy),
                "" if first else difference(found.average_accuracy, reference.average_accuracy),
                percent(found.forgetting),
                "" if first else difference(found.forgetting, reference.forgetting),
            )
        )
    return Table(
        title="After the last task",
        columns=("method", "A_B %", "± A_B", "F %", "± F"),
        rows=tuple(rows),
    )


def stages(evaluation: Evaluation) -> Table:
    """How a run went: after each stage, over all test images so far, and on its newest task."""
    found = evaluation.metrics
    rows = [
        (
            str(stage + 1),
            f"{sum(evaluation.tasks[: stage + 1])}",
            percent(sum(right) / sum(images)),
            percent(right[-1] / images[-1]),
            percent(right[0] / images[0]),
        )
        for stage, (right, images) in enumerate(
            zip(evaluation.correct, evaluation.total, strict=True)
        )
    ]
    coupling = evaluation.training.get("coupling", "none")
    coupled = "" if coupling == "none" else f" · coupled: {coupling}"
    return Table(
        title=f"{evaluation.learner}{coupled} · A_B {percent(found.average_accuracy)} % · "
        f"F {percent(found.forgetting)} %",
        columns=("stage", "classes", "all seen %", "newest task %", "first task %"),
        rows=tuple(rows),
    )


def interventions(evaluations: Sequence[Evaluation]) -> Table:
    """What each method did in the last stage, and how often it was right to."""
    rows = []
    for each in evaluations:
        last = each.detections[-1]
        rows.append(
            (
                each.title,
                share(last.retained, last.images),
                share(last.retained_right, last.retained),
                share(last.corrected, last.images),
                share(last.corrected_past, last.corrected),
                f"{last.repaired:,}",
                f"{last.broken:,}",
            )
        )
    return Table(
        title="What was done to the last stage's test images",
        columns=(
            "method",
            "learnt from",
            "of these, answered right",
            "re-decided",
            "of these, of a past task",
            "wrong → right",
            "right → wrong",
        ),
        rows=tuple(rows),
    )


def settings(evaluations: Sequence[Evaluation]) -> Table:
    """Every setting of every method that has any."""
    able = [each for each in evaluations if each.settings]
    names = list(dict.fromkeys(name for each in able for name in each.settings))
    return Table(
        title="Settings",
        columns=("setting", *(each.title for each in able)),
        rows=tuple(
            (name, *(_value(each.settings.get(name, "")) for each in able)) for name in names
        ),
    )


def facts(evaluation: Evaluation) -> Table:
    """Where a record comes from."""
    training = {f"training: {name}": value for name, value in evaluation.training.items()}
    origin = {"seed": evaluation.seed, "learner": evaluation.learner, **training}
    origin |= evaluation.provenance
    return Table(
        title="Origin",
        columns=("what", "value"),
        rows=tuple((name, str(value)) for name, value in origin.items()),
    )


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "off" if value is None else str(value)
