"""An evaluation on disk: counts first, everything else follows from them. NumPy and stdlib only.

JSON, schema 2. One object with exactly these keys:

    schema      1
    method      name in the catalogue        title     what a table calls it
    settings    the method's settings        seed      of the run
    learner     name in the catalogue        training  how it was trained
    tasks       classes of each task         batch_size  images a step
    stream      "sorted" (class by class) or "shuffled"
    correct     row t: right answers on task 0 … t after stage t
    total       row t: test images of task 0 … t
    detections  one object a stage, see `Detections`
    metrics     see `arc_cl.protocol.metrics.Metrics`; recomputed and compared when read
    seconds     spent in the method alone    provenance  versions, machine, time

Accuracies are stored as counts and rounded in reports only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import isclose
from pathlib import Path
from typing import Any, Literal, TypeAlias

from arc_cl.errors import RecordError
from arc_cl.protocol.metrics import Metrics, metrics

SCHEMA = 2
Stream = Literal["sorted", "shuffled"]
Scalar: TypeAlias = str | int | float | bool | None
Value: TypeAlias = Scalar | tuple[int, ...]
CountRows: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Detections:
    """What ARC's two assumptions caught in one stage, and how often they were right.

    `retained_right`: retained images that the answer is right for (precision of assumption 1).
    `corrected_past`: corrected images that truly are of a past task (precision of assumption 2).
    `repaired`, `broken`: answers that are right where plain is wrong, and the reverse.
    """

    images: int
    retained: int
    retained_right: int
    corrected: int
    corrected_past: int
    repaired: int
    broken: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One test-time method over all stages of one run."""

    method: str
    title: str
    settings: Mapping[str, Scalar]
    learner: str
    training: Mapping[str, Value]
    tasks: tuple[int, ...]
    stream: Stream
    batch_size: int
    seed: int
    correct: CountRows
    total: CountRows
    detections: tuple[Detections, ...]
    seconds: float
    provenance: Mapping[str, Scalar]

    @cached_property
    def metrics(self) -> Metrics:
        return metrics(self.correct, self.total)

    def text(self) -> str:
        """As JSON."""
        whole = {"schema": SCHEMA, **asdict(self), "metrics": asdict(self.metrics)}
        return json.dumps(whole, indent=1, allow_nan=False)

    def write(self, path: Path) -> Path:
        """Write JSON; the file appears whole or not at all."""
        partial = path.with_name(f".{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(self.text() + "\n", encoding="utf-8")
        partial.replace(path)
        return path

    @classmethod
    def read(cls, path: Path) -> Evaluation:
        """Read strictly: a wrong or unknown key, type or number is an error that names it."""
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RecordError(f"cannot read the evaluation {path}: {error}") from error
        try:
            return _evaluation(whole)
        except (TypeError, KeyError, ValueError) as error:
            raise RecordError(
                f"{path} is not a usable evaluation of schema {SCHEMA}: {error}; evaluate again"
            ) from error


def _evaluation(whole: Any) -> Evaluation:
    _keys(whole, {"schema", "metrics", *_names(Evaluation)}, "the record")
    if whole["schema"] != SCHEMA:
        raise ValueError(f"its schema is {whole['schema']!r}")
    if whole["stream"] not in ("sorted", "shuffled"):
        raise ValueError(f"its stream is {whole['stream']!r}, not 'sorted' or 'shuffled'")
    evaluation = Evaluation(
        method=_of(whole, "method", str),
        title=_of(whole, "title", str),
        settings=_scalars(whole, "settings"),
        learner=_of(whole, "learner", str),
        training=_values(whole, "training"),
        tasks=_counts(whole["tasks"], "tasks"),
        stream=whole["stream"],
        batch_size=_of(whole, "batch_size", int),
        seed=_of(whole, "seed", int),
        correct=_rows(whole, "correct"),
        total=_rows(whole, "total"),
        detections=tuple(_detections(each) for each in _of(whole, "detections", list)),
        seconds=float(_of(whole, "seconds", (int, float))),
        provenance=_scalars(whole, "provenance"),
    )
    _check_sizes(evaluation)
    _check_metrics(evaluation, whole["metrics"])
    return evaluation


def _check_sizes(evaluation: Evaluation) -> None:
    stages = {len(evaluation.correct), len(evaluation.total), len(evaluation.detections)}
    if stages != {len(evaluation.tasks)}:
        raise ValueError(
            f"it has {len(evaluation.tasks)} tasks, but {sorted(stages)} rows of counts"
        )
    for right, images in zip(evaluation.correct, evaluation.total, strict=True):
        if any(r > n for r, n in zip(right, images, strict=True)):
            raise ValueError(f"it counts {right} correct answers of {images} images")


def _check_metrics(evaluation: Evaluation, stored: Any) -> None:
    computed = asdict(evaluation.metrics)
    _keys(stored, list(computed), "metrics")
    for name, value in computed.items():
        given = stored[name]
        same = given is None if value is None else isclose(value, given, abs_tol=1e-12)
        if not same:
            raise ValueError(f"its counts make {name} {value}, it says {given}")


def _detections(value: Any) -> Detections:
    _keys(value, _names(Detections), "detections")
    _counts(list(value.values()), "detections")
    return Detections(**value)


def _names(of: type) -> list[str]:
    return [field.name for field in fields(of)]


def _keys(value: Any, expected: set[str] | list[str], where: str) -> None:
    if not isinstance(value, dict):
        raise TypeError(f"{where} is {type(value).__name__}, not an object")
    if value.keys() != set(expected):
        odd = sorted(value.keys() ^ set(expected))
        raise ValueError(f"{where} has too much or too little: {', '.join(odd)}")


def _of(whole: dict[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    value = whole[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{key} is {value!r}")
    return value


def _counts(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
        raise TypeError(f"{where} holds {value!r}, not counts")
    return tuple(value)


def _rows(whole: dict[str, Any], key: str) -> CountRows:
    return tuple(_counts(row, key) for row in _of(whole, key, list))


def _values(whole: dict[str, Any], key: str) -> dict[str, Value]:
    """Plain values, or lists of whole numbers."""
    lists = {k: _counts(v, f"{key}.{k}") for k, v in whole[key].items() if isinstance(v, list)}
    plain = {k: v for k, v in whole[key].items() if k not in lists}
    return {**_scalars({key: plain}, key), **lists}


def _scalars(whole: dict[str, Any], key: str) -> dict[str, Scalar]:
    values: dict[str, Scalar] = _of(whole, key, dict)
    for name, value in values.items():
        if not isinstance(value, str | int | float | bool | None):
            raise TypeError(f"{key}.{name} is {value!r}, not a plain value")
    return values
