from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arc_cl import TaskPartition
from arc_cl.errors import ConfigurationError


@given(st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_sizes_lay_the_classes_of_each_task_side_by_side(sizes: list[int]) -> None:
    partition = TaskPartition.of_sizes(sizes)
    assert partition.sizes == tuple(sizes)
    assert partition.num_classes == sum(sizes)
    assert partition.num_tasks == len(sizes)
    assert [k for task in range(len(sizes)) for k in partition.classes(task)] == list(
        range(sum(sizes))
    )


def test_interleaved_classes() -> None:
    partition = TaskPartition.of_classes([0, 1, 0, 2, 1])
    assert partition.classes(0) == (0, 2)
    assert partition.classes(1) == (1, 4)
    assert partition.newest == 2
    assert partition.sizes == (2, 2, 1)


def test_parse_takes_sizes_or_a_partition() -> None:
    partition = TaskPartition.parse([2, 3])
    assert TaskPartition.parse(partition) is partition
    assert TaskPartition.parse((2, 3)) == partition


@pytest.mark.parametrize("tasks", [[], [0, 3], [2, -1], [1.5], "22", 7, [True], [None]])
def test_bad_sizes_name_the_value(tasks: object) -> None:
    with pytest.raises(ConfigurationError, match=r"tasks=|task size|No classes"):
        TaskPartition.parse(tasks)  # type: ignore[arg-type]


@pytest.mark.parametrize("classes", [[], [1, 1], [0, 2], [-1, 0]])
def test_bad_task_indices(classes: list[int]) -> None:
    with pytest.raises(ConfigurationError):
        TaskPartition.of_classes(classes)


def test_an_unknown_task_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="tasks 0 to 1"):
        TaskPartition.of_sizes([1, 1]).classes(2)


def test_partition_and_settings_need_no_torch() -> None:
    code = (
        "import sys; from arc_cl import ARCSettings, TaskPartition; ARCSettings.paper(); "
        "TaskPartition.of_sizes([2, 2]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
