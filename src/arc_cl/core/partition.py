"""Which class belongs to which task: looked up, never divided.

Tasks may have any size and their classes may be interleaved; the newest task has the highest index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arc_cl.errors import ConfigurationError


@dataclass(frozen=True)
class TaskPartition:
    """The task index of each class, tasks counted from 0 in the order they were learnt."""

    task_of_class: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.task_of_class:
            raise ConfigurationError("No classes: a TaskPartition needs at least one class.")
        missing = set(range(max(self.task_of_class) + 1)) - set(self.task_of_class)
        if min(self.task_of_class) < 0 or missing:
            raise ConfigurationError(
                f"Task indices {sorted(set(self.task_of_class))} are not 0, 1, 2, … without a gap: "
                "number the tasks from 0 in the order in which they were learnt."
            )

    @classmethod
    def of_classes(cls, task_of_class: Iterable[Any]) -> TaskPartition:
        """From one task index a class: `of_classes([0, 0, 1, 0])`."""
        return cls(tuple(_as_int(task, "A task index") for task in task_of_class))

    @classmethod
    def of_sizes(cls, sizes: Iterable[Any]) -> TaskPartition:
        """From the sizes of the tasks in order, their classes lying side by side."""
        counts = [_as_int(size, "A task size") for size in sizes]
        if not counts or min(counts) < 1:
            raise ConfigurationError(
                f"tasks={counts}: expected the sizes of the tasks in order, each at least 1, "
                "such as [10] * 10."
            )
        return cls(tuple(task for task, count in enumerate(counts) for _ in range(count)))

    @classmethod
    def parse(cls, tasks: TaskPartition | Sequence[int]) -> TaskPartition:
        """A partition as it is, or one made from the tasks' sizes."""
        if isinstance(tasks, TaskPartition):
            return tasks
        if isinstance(tasks, (str, bytes)) or not isinstance(tasks, Iterable):
            raise ConfigurationError(
                f"tasks={tasks!r}: expected the sizes of the tasks in order, such as [10] * 10, "
                "or a TaskPartition."
            )
        return cls.of_sizes(tasks)

    @property
    def num_classes(self) -> int:
        return len(self.task_of_class)

    @cached_property
    def num_tasks(self) -> int:
        return max(self.task_of_class) + 1

    @property
    def newest(self) -> int:
        return self.num_tasks - 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(int(n) for n in np.bincount(self.task_of_class))

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """The task index of each class as an array [K]; not to be written to."""
        array = np.asarray(self.task_of_class, dtype=np.int64)
        array.setflags(write=False)
        return array

    def classes(self, task: int) -> tuple[int, ...]:
        """The classes of one task, in ascending order."""
        if not 0 <= task < self.num_tasks:
            raise ConfigurationError(f"task={task}: there are tasks 0 to {self.newest}.")
        return tuple(int(k) for k in np.flatnonzero(self.array == task))


def _as_int(value: Any, what: str) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = -1
    if number != value or isinstance(value, bool):
        raise ConfigurationError(f"{what} must be a whole number; {value!r} is none.")
    return number
