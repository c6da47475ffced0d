"""An evaluation survives the disk, and a damaged one is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arc_cl.errors import RecordError
from arc_cl.protocol.record import Detections, Evaluation

NOTHING = Detections(
    images=4, retained=0, retained_right=0, corrected=0, corrected_past=0, repaired=0, broken=0
)
EVALUATION = Evaluation(
    method="arc",
    title="+ ARC",
    settings={"beta": 0.8, "retention": True, "max_drift": None},
    learner="finetune",
    training={"lr": 0.1, "epochs": 2},
    tasks=(2, 2),
    stream="shuffled",
    batch_size=16,
    seed=3,
    correct=((3,), (1, 4)),
    total=((4,), (4, 4)),
    detections=(NOTHING, replace(NOTHING, images=8, corrected=3)),
    seconds=0.5,
    provenance={"torch": "2.6.0", "threads": 2},
)


def test_round_trip(tmp_path: Path) -> None:
    path = EVALUATION.write(tmp_path / "new" / "arc.json")
    assert Evaluation.read(path) == EVALUATION
    assert [each.name for each in path.parent.iterdir()] == ["arc.json"]


def test_one_stage_has_null_forgetting(tmp_path: Path) -> None:
    one = replace(EVALUATION, tasks=(2,), correct=((3,),), total=((4,),), detections=(NOTHING,))
    path = one.write(tmp_path / "one.json")
    assert json.loads(path.read_text())["metrics"]["forgetting"] is None
    assert Evaluation.read(path) == one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 1}, "schema is 1"),
        ({"surprise": 1}, "surprise"),
        ({"seed": "3"}, "seed is '3'"),
        ({"batch_size": True}, "batch_size is True"),
        ({"stream": "odd"}, "stream is 'odd'"),
        ({"correct": [[3], [1, -4]]}, "not counts"),
        ({"correct": [[3], [1, 5]]}, "5"),
        ({"correct": [[3]]}, "rows of counts"),
        ({"total": [[4], [4, 5]]}, "average_accuracy"),
        ({"metrics": {}}, "metrics"),
        ({"settings": {"beta": [1]}}, "settings.beta"),
        ({"detections": [{"images": 4}]}, "detections"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = EVALUATION.write(tmp_path / "arc.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RecordError, match=r"arc\.json") as caught:
        Evaluation.read(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 1}'])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "arc.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"arc\.json"):
        Evaluation.read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"absent\.json"):
        Evaluation.read(tmp_path / "absent.json")
