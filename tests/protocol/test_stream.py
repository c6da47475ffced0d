"""Class order, tasks and the test stream."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arc_cl.errors import CompatibilityError, ConfigurationError
from arc_cl.protocol.stream import Scenario, class_order, task_sizes


def test_the_class_order_is_the_one_of_the_field() -> None:
    assert class_order(100)[:10] == (68, 56, 78, 8, 23, 84, 90, 65, 74, 76)
    assert class_order(200)[:5] == (168, 136, 51, 9, 183)
    assert class_order(4, seed=None) == (0, 1, 2, 3)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 99), st.integers(1, 3))
def test_every_image_is_trained_once_and_tested_when_seen(
    tasks: list[int], seed: int, per_class: int
) -> None:
    classes = sum(tasks)
    scenario = Scenario(order=class_order(classes, seed), tasks=tuple(tasks))
    labels = np.random.RandomState(seed).permutation(np.repeat(np.arange(classes), per_class))
    trained = [scenario.training_indices(labels, task) for task in range(len(tasks))]
    assert sorted(np.concatenate(trained)) == list(range(len(labels)))
    for stage in range(len(tasks)):
        tested = scenario.test_indices(labels, stage)
        assert set(tested) == set(np.concatenate(trained[: stage + 1]))
        positions = scenario.positions(labels[tested])
        assert (np.diff(positions) >= 0).all()
        partition = scenario.partition(stage)
        assert positions.max() == partition.num_classes - 1
        assert scenario.count_by_task(positions, stage) == tuple(
            size * per_class for size in tasks[: stage + 1]
        )


def test_task_info_counts_old_and_new_classes() -> None:
    scenario = Scenario(order=class_order(7), tasks=(4, 1, 2))
    info = scenario.info(2)
    assert (info.index, info.seen_classes, info.new_classes, info.old_classes) == (2, 7, 2, 5)


@pytest.mark.parametrize("tasks", [(), (3, 2), (4, 0), (5, -1)])
def test_tasks_must_fit_the_classes(tasks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="4 classes"):
        Scenario(order=(0, 1, 2, 3), tasks=tasks)


def test_an_order_must_be_a_permutation() -> None:
    with pytest.raises(ConfigurationError, match="permutation"):
        Scenario(order=(0, 0, 1), tasks=(3,))


def test_labels_of_another_source_are_refused() -> None:
    scenario = Scenario(order=(0, 1), tasks=(1, 1))
    with pytest.raises(CompatibilityError, match="2 classes"):
        scenario.positions(np.array([0, 2]))


def test_what_no_task_learns_is_neither_trained_nor_tested() -> None:
    scenario = Scenario(order=(3, 0, 2, 1), tasks=(1, 2))
    labels = np.array([0, 1, 2, 3, 1, 3])
    assert scenario.training_indices(labels, 0).tolist() == [3, 5]
    assert scenario.training_indices(labels, 1).tolist() == [0, 2]
    assert scenario.test_indices(labels, 1).tolist() == [3, 5, 0, 2]


def test_only_the_first_images_of_a_class_are_used() -> None:
    scenario = Scenario(order=(1, 0), tasks=(2,), images_per_class=2)
    assert scenario.training_indices(np.array([0, 1, 0, 0, 1, 1]), 0).tolist() == [0, 1, 2, 4]


@given(st.integers(1, 60), st.integers(1, 30), st.integers(1, 30))
def test_sizes_of_tasks(classes: int, first: int, each: int) -> None:
    """The first as asked, all but the last equal, none empty, all classes used."""
    if first > classes:
        with pytest.raises(ConfigurationError, match="at most"):
            task_sizes(classes, first, each)
        return
    sizes = task_sizes(classes, first, each)
    assert sizes[0] == first
    assert set(sizes[1:-1]) <= {each}
    assert 0 < sizes[-1] <= max(first, each)
    assert sum(sizes) == classes
