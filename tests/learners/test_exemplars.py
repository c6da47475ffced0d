"""Herding, quotas and nearest-mean answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from arc_cl.contracts import TaskInfo
from arc_cl.errors import CompatibilityError, ConfigurationError, DataError
from arc_cl.learners._exemplars import Exemplars, herd, normalised


@dataclass
class Rows:
    """Rows that stand for images, class after class; numbers are places among all of them."""

    classes: list[Tensor]

    def of_class(self, position: int) -> Tensor:
        first = sum(len(rows) for rows in self.classes[:position])
        return torch.arange(first, first + len(self.classes[position]))

    def apply(self, function: Callable[[Tensor], Tensor], numbers_N: Tensor) -> Tensor:
        with torch.inference_mode():
            return function(torch.cat(self.classes)[numbers_N])


def rows_of(*counts: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return Rows([torch.randn(count, 5, generator=generator) + 1 for count in counts])


def info(stage: int, step: int, classes: int) -> TaskInfo:
    return TaskInfo(
        index=stage,
        seen_classes=(stage + 1) * step,
        new_classes=step,
        tasks=classes // step,
        classes=classes,
    )


def run(exemplars: Exemplars, rows: Rows, step: int = 1) -> list[list[int]]:
    """All tasks, features unchanged; how many are kept of each class after each task."""
    classes = len(rows.classes)
    kept = []
    for stage in range(classes // step):
        exemplars.update(info(stage, step, classes), rows, lambda rows: rows)
        kept.append([len(exemplars.of_class(c)) for c in range((stage + 1) * step)])
    return kept


def test_herding_and_means_as_released(golden: Path) -> None:
    files = sorted(golden.glob("herding_*_seed*.npz"))
    assert files
    for path in files:
        data = np.load(path)
        meta = json.loads(str(data["meta"]))
        count = len(data["counts"])
        rows = Rows([torch.from_numpy(data[f"raw_class_{c}"]).double() for c in range(count)])
        exemplars = Exemplars(
            meta["memory_per_class"] if meta["fixed_memory"] else meta["memory_size"],
            "per_class" if meta["fixed_memory"] else "total",
            sticky_quota=not meta["memo"],
            last_mean_only=meta["memo"],
        )
        if meta["error"]:
            with pytest.raises(CompatibilityError, match="sticky_quota"):
                replay(exemplars, rows, data)
        else:
            replay(exemplars, rows, data)


def times(matrix: Tensor, rows: Tensor) -> Tensor:
    return rows @ matrix


def replay(exemplars: Exemplars, rows: Rows, data: Any) -> None:
    step, count = int(data["class_increment"]), len(data["counts"])
    for stage, transform in enumerate(torch.from_numpy(data["transforms"]).double()):
        task = info(stage, step, count)
        exemplars.check(task)
        exemplars.update(task, rows, partial(times, transform))
        assert exemplars.quota(task.seen_classes) == data[f"quota_task{stage}"]
        kept = [
            (c, int(number - rows.of_class(c)[0]))
            for c in range(task.seen_classes)
            for number in exemplars.of_class(c)
        ]
        assert kept == [tuple(pair) for pair in data[f"memory_task{stage}"].tolist()]
        means = torch.from_numpy(data[f"class_means_task{stage}"]).double()
        torch.testing.assert_close(exemplars.means_KD, means, rtol=0, atol=1e-9)
        if f"nme_top5_task{stage}" in data.files:
            expected = data[f"nme_top5_task{stage}"]
            distances = exemplars.distances(torch.from_numpy(data["query"]).double() @ transform)
            nearest = distances.topk(expected.shape[1], largest=False).indices
            assert nearest.tolist() == expected.tolist()


@given(st.integers(0, 10_000), st.integers(1, 25), st.integers(1, 30))
def test_herding_is_greedy_and_takes_no_row_twice(seed: int, rows: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = normalised(torch.randn(rows, 4, generator=generator, dtype=torch.float64))
    chosen = herd(features, count).tolist()
    left, taken = list(range(rows)), torch.zeros(4, dtype=torch.float64)
    for k, row in enumerate(chosen, start=1):
        gaps = [((features.mean(0) - (taken + features[i]) / k).norm().item(), i) for i in left]
        assert (features.mean(0) - (taken + features[row]) / k).norm() <= min(gaps)[0] + 1e-12
        taken += features[row]
        left.remove(row)
    assert len(chosen) == min(rows, count)


def test_a_total_is_shared_by_all_classes_seen() -> None:
    rows = rows_of(9, 9, 9, 9)
    exemplars = Exemplars(9, "total")
    assert run(exemplars, rows) == [[9], [4, 4], [3, 3, 3], [2, 2, 2, 2]]
    first = herd(normalised(rows.classes[0]), 2)
    assert torch.equal(exemplars.of_class(0), first)
    assert torch.equal(exemplars.numbers()[:2], first)
    assert exemplars.numbers().dtype == torch.int64


def test_a_grant_a_class_stays() -> None:
    assert run(Exemplars(3, "per_class"), rows_of(9, 9, 9)) == [[3], [3, 3], [3, 3, 3]]


def test_a_small_class_keeps_all_and_harms_no_other() -> None:
    rows = rows_of(9, 2, 9)
    assert run(Exemplars(12, "total"), rows, step=3) == [[4, 2, 4]]
    assert run(Exemplars(4, "per_class"), rows, step=3) == [[4, 2, 4]]


def test_a_sticky_quota_stays_small_within_one_task_only() -> None:
    kept = run(Exemplars(24, "total", sticky_quota=True), rows_of(9, 2, 9, 9, 9, 9), step=3)
    assert kept == [[8, 2, 2], [4, 2, 2, 4, 4, 4]]
    with pytest.raises(CompatibilityError, match="class 1 has 2 images"):
        run(Exemplars(4, "per_class", sticky_quota=True), rows_of(9, 2, 9), step=3)


def test_all_new_classes_get_a_mean_unless_asked_otherwise() -> None:
    rows = rows_of(6, 6, 6, 6)
    for rule, slip, without in (("total", True, 1), ("total", False, 0), ("per_class", True, 0)):
        exemplars = Exemplars(8, rule, last_mean_only=slip)  # type: ignore[arg-type]
        run(exemplars, rows, step=2)
        zero = exemplars.means_KD.norm(dim=1) == 0
        assert zero.sum() == without
        assert not zero[[0, 1, 3]].any()  # old means are taken anew in each task


def test_means_are_those_of_the_network_of_today() -> None:
    rows = rows_of(6, 6)
    exemplars = Exemplars(4, "per_class")
    exemplars.update(info(0, 1, 2), rows, lambda rows: rows)
    exemplars.update(info(1, 1, 2), rows, lambda rows: -rows)
    features = normalised(-rows.classes[0])[exemplars.of_class(0)]
    mean = features.mean(dim=0)
    torch.testing.assert_close(exemplars.means_KD[0], mean / mean.norm())


def test_the_nearest_mean_answers() -> None:
    generator = torch.Generator().manual_seed(3)
    centres = 3 * torch.eye(3, 5)
    rows = Rows([centre + 0.1 * torch.randn(6, 5, generator=generator) for centre in centres])
    exemplars = Exemplars(2, "per_class")
    run(exemplars, rows)
    distances = exemplars.distances(10 * centres)
    assert distances.argmin(dim=1).tolist() == [0, 1, 2]
    away = normalised(centres)[:, None] - exemplars.means_KD
    torch.testing.assert_close(distances, away.square().sum(dim=2), rtol=0, atol=1e-6)


def test_half_precision_features_are_judged_in_float32() -> None:
    exemplars = Exemplars(2, "per_class")
    exemplars.update(info(0, 1, 1), rows_of(6), lambda rows: rows.bfloat16())
    assert exemplars.means_KD.dtype == torch.float32
    assert exemplars.distances(torch.ones(1, 5, dtype=torch.bfloat16)).dtype == torch.float32


def test_its_state_goes_round_whatever_its_size() -> None:
    rows = rows_of(6, 6, 6)
    rows.classes = [each.double() for each in rows.classes]
    one, other = Exemplars(7, "total"), Exemplars(7, "total")
    run(one, rows)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.numbers(), one.numbers())
    assert torch.equal(other.means_KD, one.means_KD)
    assert other.means_KD.dtype == torch.float64
    other.load_state_dict(Exemplars(7, "total").state_dict())
    assert len(other.numbers()) == 0


def test_without_memory_nothing_is_kept_or_looked_at() -> None:
    exemplars = Exemplars(0, "total")
    exemplars.check(info(0, 1, 9))
    exemplars.update(info(0, 1, 9), Rows([]), lambda rows: rows)
    assert len(exemplars.numbers()) == 0


def test_a_memory_must_last_for_the_whole_sequence() -> None:
    with pytest.raises(ConfigurationError, match=r"memory=9 .* 10 classes"):
        Exemplars(9, "total").check(info(0, 5, 10))
    Exemplars(9, "per_class").check(info(0, 5, 10))


def test_a_class_without_images_is_an_error() -> None:
    with pytest.raises(DataError, match="class 1 has no training images"):
        run(Exemplars(4, "total"), rows_of(3, 0), step=2)
