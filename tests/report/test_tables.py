"""Records to text: signs, rounding, and what is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arc_cl.protocol.record import Detections, Evaluation
from arc_cl.report.tables import comparison, difference, facts, interventions, percent, settings

LAST = Detections(
    images=200,
    retained=50,
    retained_right=45,
    corrected=20,
    corrected_past=15,
    repaired=9,
    broken=4,
)
PLAIN = Evaluation(
    method="none",
    title="plain",
    settings={},
    learner="finetune",
    training={"lr": 0.1, "epochs": 2},
    tasks=(2, 2),
    stream="sorted",
    batch_size=1,
    seed=0,
    correct=((90,), (40, 80)),
    total=((100,), (100, 100)),
    detections=(LAST, replace(LAST, retained=0, retained_right=0, corrected=0, corrected_past=0)),
    seconds=1.0,
    provenance={"torch": "2.6.0"},
)
BETTER = replace(
    PLAIN,
    method="arc",
    title="+ ARC",
    settings={"beta": 0.8, "retention": True, "max_drift": None},
    correct=((90,), (47, 78)),
    detections=(LAST, LAST),
)


@pytest.mark.parametrize(
    ("fraction", "text"), [(0.12345, "12.3"), (1, "100.0"), (-0.05, "−5.0"), (None, "–")]
)
def test_percent(fraction: float | None, text: str) -> None:
    assert percent(fraction) == text


def test_differences_are_signed_and_taken_before_rounding() -> None:
    assert difference(0.1251, 0.1249) == "+0.0"
    assert difference(0.10, 0.125) == "−2.5"
    assert difference(None, 0.1) == "–"


def test_comparison_is_with_the_first_row() -> None:
    table = comparison([PLAIN, BETTER])
    assert table.rows[0] == ("plain", "60.0", "", "50.0", "")
    assert table.rows[1] == ("+ ARC", "62.5", "+2.5", "43.0", "−7.0")
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_interventions_are_counted_with_their_shares() -> None:
    table = interventions([PLAIN, BETTER])
    assert table.rows[0][1:5] == ("0", "0", "0", "0")
    assert table.rows[1][1:] == (
        "50 (25.0 %)",
        "45 (90.0 %)",
        "20 (10.0 %)",
        "15 (75.0 %)",
        "9",
        "4",
    )


def test_settings_and_origin_are_listed() -> None:
    table = settings([PLAIN, BETTER])
    assert table.columns == ("setting", "+ ARC")
    assert table.rows == (("beta", "0.8"), ("retention", "on"), ("max_drift", "off"))
    assert {("seed", "0"), ("training: lr", "0.1"), ("torch", "2.6.0")} <= set(facts(PLAIN).rows)
