"""A comparison as one HTML file: no script, no network, opens from disk, dark and light."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from io import BytesIO

from PIL import Image

from arc_cl.contracts import Example
from arc_cl.protocol.metrics import accuracy_matrix
from arc_cl.protocol.record import Evaluation
from arc_cl.report.tables import Table, comparison, facts, interventions, settings

_STRONGEST = 0.6  # of the heat's colour, so that the number on it stays legible


def page(
    title: str,
    notes: Sequence[str],
    evaluations: Sequence[Evaluation],
    repaired: Sequence[Example],
    broken: Sequence[Example],
) -> str:
    """The whole page; the examples are of the last method."""
    style = files("arc_cl.report").joinpath("page.css").read_text(encoding="utf-8")
    sections = (
        f"<h1>{escape(title)}</h1>",
        _introduction(evaluations[-1]),
        "<h2>Result</h2>",
        _table(comparison(evaluations)),
        _outcome(evaluations),
        _table(interventions(evaluations)),
        "<h2>Accuracy on each task after each stage</h2>",
        '<p class="soft">Row: after learning that task. Column: accuracy on that task, in whole '
        "percent.</p>",
        f'<div class="grid">{"".join(_heat_map(each) for each in evaluations)}</div>',
        _strips(evaluations[-1], repaired, broken),
        "<h2>Settings</h2>",
        *(f"<p>{escape(note)}</p>" for note in notes),
        _table(settings(evaluations)),
        "<h2>Origin</h2>",
        _table(facts(evaluations[-1]), "origin"),
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} · arc-cl</title>\n<style>\n{style}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(sections) + "\n</main>\n</body>\n</html>\n"
    )


def _introduction(last: Evaluation) -> str:
    how, images = last.training, last.detections[-1].images
    stream = "in random order" if last.stream == "shuffled" else "class by class"
    return (
        f"<p>The learner <b>{escape(last.learner)}</b> met {len(last.tasks)} tasks one after "
        f"another ({sum(last.tasks)} classes, {how['epochs']} epochs a task, batches of "
        f"{how['batch_size']}, learning rate {how['lr']:g}) and left a checkpoint after each. "
        f"Every row below reads the same checkpoints; only what happens at test time differs. The "
        f"test stream came {stream}, in batches of {last.batch_size}: all test images of the "
        f"classes seen so far, {images:,} after the last task.</p>"
    )


def _outcome(evaluations: Sequence[Evaluation]) -> str:
    """The result in words, whichever way it went."""
    first, last = evaluations[0], evaluations[-1]
    right, plain = sum(last.correct[-1]), sum(first.correct[-1])
    images = sum(last.total[-1])
    how = "more" if right >= plain else "fewer"
    return (
        f"<p>After the last task, {_name(last)} answers {right:,} of {images:,} test images "
        f"right, {abs(right - plain):,} {how} than {_name(first)}. This is one run with one "
        f"seed, on a small synthetic benchmark: small differences may be chance.</p>"
        '<p class="soft">A_B: mean over tasks of the accuracy after the last task. F: forgetting, '
        "mean over the earlier tasks of the accuracy right after learning it minus the accuracy "
        "after the last task; it also falls where a method lowers the former. ±: difference to the "
        "first row, in points.</p>"
    )


def _table(table: Table, kind: str = "") -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in table.rows
    )
    return _scrolling(
        table.title,
        f'<table class="{kind}"><caption>{escape(table.title)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>",
    )


def _heat_map(evaluation: Evaluation) -> str:
    matrix_TT = accuracy_matrix(evaluation.correct, evaluation.total)
    tasks = range(1, len(matrix_TT) + 1)
    head = "".join(f'<th scope="col">{task}</th>' for task in tasks)
    rows = "\n".join(
        f'<tr><th scope="row">{stage}</th>'
        + "".join(_heat_cell(accuracy) for accuracy in matrix_TT[stage - 1, :stage])
        + "</tr>"
        for stage in tasks
    )
    return _scrolling(
        f"Accuracy matrix of {evaluation.title}",
        f'<table class="heat"><caption>{escape(evaluation.title)}</caption><thead><tr>'
        f'<th scope="col" aria-label="stage"></th>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table>",
    )


def _heat_cell(accuracy: float) -> str:
    return f'<td style="--share:{_STRONGEST * accuracy:.2f}">{100 * accuracy:.0f}</td>'


def _scrolling(label: str, content: str) -> str:
    """Wide content scrolls by itself, by keyboard too; the page never does."""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f"{content}</div>"
    )


def _strips(evaluation: Evaluation, repaired: Sequence[Example], broken: Sequence[Example]) -> str:
    last, name = evaluation.detections[-1], _name(evaluation)
    return (
        f"<h2>Images whose answer {name} changed</h2>"
        f"<p>In the last stage {name} turned {last.repaired:,} wrong answers into right ones and "
        f"{last.broken:,} right ones into wrong ones. Shown are the first of each kind in the "
        f"stream.</p>"
        + _strip(f"Wrong → right: {last.repaired:,}", repaired)
        + _strip(f"Right → wrong: {last.broken:,}", broken)
    )


def _name(evaluation: Evaluation) -> str:
    """A row's title inside a sentence."""
    return escape(evaluation.title.removeprefix("+ "))


def _strip(title: str, examples: Sequence[Example]) -> str:
    items = "\n".join(f"<li>{_figure(each)}</li>" for each in examples)
    return f'<p><b>{escape(title)}</b></p>\n<ul class="strip">\n{items}\n</ul>'


def _figure(example: Example) -> str:
    truth = escape(example.truth)
    return (
        f'<figure><img src="{_png(example)}" width="64" height="64" alt="Test image of {truth}">'
        f"<figcaption>{escape(example.before)} → <b>{escape(example.after)}</b><br>"
        f"truth: {truth}</figcaption></figure>"
    )


def _png(example: Example) -> str:
    buffer = BytesIO()
    Image.fromarray(example.image_HWC).save(buffer, "PNG")
    return "data:image/png;base64," + b64encode(buffer.getvalue()).decode("ascii")
