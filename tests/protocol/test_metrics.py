"""Accuracy and forgetting: by hand, and against numbers recorded from the released code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from arc_cl.errors import ConfigurationError
from arc_cl.protocol.metrics import accuracy_matrix, metrics
from arc_cl.protocol.stream import Scenario, class_order


def test_by_hand() -> None:
    found = metrics([(8,), (4, 10), (6, 5, 9)], [(10,), (10, 10), (10, 10, 10)])
    assert found.average_accuracy == pytest.approx(2 / 3)
    assert found.overall_accuracy == pytest.approx(2 / 3)
    assert found.incremental_average == pytest.approx((0.8 + 0.7 + 2 / 3) / 3)
    assert found.forgetting == pytest.approx((0.2 + 0.5) / 2)
    assert found.forgetting_from_best == pytest.approx((0.2 + 0.5) / 2)


def test_the_two_forgettings_differ_where_a_task_improves_later() -> None:
    found = metrics([(5,), (9, 9)], [(10,), (10, 10)])
    assert found.forgetting == pytest.approx(-0.4)
    assert found.forgetting_from_best == 0


def test_tasks_of_unequal_size_part_average_from_overall_accuracy() -> None:
    found = metrics([(4,), (4, 10)], [(4,), (4, 20)])
    assert found.average_accuracy == pytest.approx(0.75)
    assert found.overall_accuracy == pytest.approx(14 / 24)


def test_one_stage_has_no_forgetting() -> None:
    found = metrics([(3,)], [(4,)])
    assert (found.forgetting, found.forgetting_from_best) == (None, None)


def test_the_matrix_is_nan_above_the_diagonal() -> None:
    matrix = accuracy_matrix([(1,), (1, 2)], [(2,), (2, 2)])
    np.testing.assert_array_equal(matrix, [[0.5, np.nan], [0.5, 1.0]])


@pytest.mark.parametrize("total", [[(2, 2), (2, 2)], [(2,), (2, 0)]])
def test_counts_must_fit_the_stages(total: list[tuple[int, ...]]) -> None:
    with pytest.raises(ConfigurationError, match="tasks seen so far"):
        accuracy_matrix([(1,), (1, 0)], total)


@pytest.mark.parametrize("name", ["T3_s6_seed132", "T4_s5_seed131", "T5_s10_seed130"])
def test_recorded_numbers(golden: Path, name: str) -> None:
    with np.load(golden / f"metrics_{name}.npz") as arrays:
        expected = json.loads(str(arrays["expected"]))
        stages = len(expected["R"])
        classes = expected["init_cls"] * stages
        scenario = Scenario(
            order=class_order(classes, seed=None), tasks=(expected["increment"],) * stages
        )
        correct, total = [], []
        for stage in range(stages):
            labels = arrays[f"targets_{stage}"].astype(np.int64)
            right = arrays[f"pred_{stage}"][:, 0] == labels
            correct.append(scenario.count_by_task(labels[right], stage))
            total.append(scenario.count_by_task(labels, stage))
    matrix = np.nan_to_num(100 * accuracy_matrix(correct, total), nan=-1)
    np.testing.assert_allclose(matrix, expected["R"], atol=1e-9)
    found = metrics(correct, total)
    assert found.forgetting is not None
    assert found.forgetting_from_best is not None
    assert 100 * found.average_accuracy == pytest.approx(expected["paper_A_B_unrounded"])
    assert 100 * found.forgetting == pytest.approx(expected["paper_forgetting_unrounded"])
    assert 100 * found.forgetting_from_best == pytest.approx(
        expected["max_history_forgetting_unrounded"]
    )
    assert 100 * found.incremental_average == pytest.approx(
        expected["released_average_accuracy"], abs=0.005
    )
    assert 100 * found.forgetting_from_best == pytest.approx(
        expected["released_forgetting"], abs=0.01
    )
