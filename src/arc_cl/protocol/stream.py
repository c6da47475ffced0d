"""What is learnt when, and what is tested: classes in order, split into tasks.

A source numbers its classes as it likes; inside a run a class is its *position* in the class
order, and a task is a range of positions that is looked up in one table. So unequal tasks need
nothing special.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from arc_cl.contracts import TaskInfo
from arc_cl.core.partition import TaskPartition
from arc_cl.errors import CompatibilityError, ConfigurationError

CLASS_ORDER_SEED = 1993


def class_order(classes: int, seed: int | None = CLASS_ORDER_SEED) -> tuple[int, ...]:
    """The order in which classes are learnt: the field's permutation, or natural without a seed.

    NumPy's legacy generator, as PILOT and the ARC release use it; it depends on the number of
    classes alone, hence is the same for every split into tasks.
    """
    if seed is None:
        return tuple(range(classes))
    return tuple(int(c) for c in np.random.RandomState(seed).permutation(classes))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A class order and the sizes of the tasks, first task first.

    The tasks may end before the class order does: what is left is neither learnt nor tested.
    """

    order: tuple[int, ...]
    tasks: tuple[int, ...]
    images_per_class: int = 0
    """Training images used of each class, the first ones as stored; 0 uses all."""

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise ConfigurationError(
                f"the class order {self.order[:8]}… is not a permutation of 0 … "
                f"{len(self.order) - 1}; list every class exactly once"
            )
        if min(self.tasks, default=0) < 1 or sum(self.tasks) > len(self.order):
            raise ConfigurationError(
                f"task sizes {list(self.tasks)} must be positive and add up to at most the "
                f"{len(self.order)} classes of the class order; they add up to {sum(self.tasks)}"
            )

    @cached_property
    def _task_of_position(self) -> NDArray[np.int64]:
        """Of every class of the order; those of no task have the number after the last."""
        left = len(self.order) - sum(self.tasks)
        learnt = TaskPartition.of_sizes(self.tasks).array
        return np.concatenate([learnt, np.full(left, len(self.tasks), dtype=np.int64)])

    def info(self, task: int) -> TaskInfo:
        return TaskInfo(
            index=task,
            seen_classes=sum(self.tasks[: task + 1]),
            new_classes=self.tasks[task],
            tasks=len(self.tasks),
            classes=sum(self.tasks),
        )

    def partition(self, stage: int) -> TaskPartition:
        """The classes seen after `stage` (0-based) and their tasks."""
        return TaskPartition.of_sizes(self.tasks[: stage + 1])

    def positions(self, labels_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """The source's labels as positions in the class order."""
        if len(labels_N) and not 0 <= labels_N.min() <= labels_N.max() < len(self.order):
            raise CompatibilityError(
                f"labels run from {labels_N.min()} to {labels_N.max()}, the class order has "
                f"{len(self.order)} classes; use the class order of this data source"
            )
        return np.argsort(np.asarray(self.order, dtype=np.int64))[labels_N]

    def training_indices(self, labels_N: NDArray[np.int64], task: int) -> NDArray[np.int64]:
        """The images that belong to one task, in stored order."""
        positions_N = self.positions(labels_N)
        chosen_N = self._task_of_position[positions_N] == task
        if self.images_per_class:
            chosen_N &= _rank_within(positions_N) < self.images_per_class
        return np.flatnonzero(chosen_N)

    def test_indices(self, labels_N: NDArray[np.int64], stage: int) -> NDArray[np.int64]:
        """The test images of all classes seen after `stage`, class by class in class order."""
        positions_N = self.positions(labels_N)
        by_class_N = np.argsort(positions_N, kind="stable")
        return by_class_N[positions_N[by_class_N] < self.info(stage).seen_classes]

    def count_by_task(
        self, positions_N: NDArray[np.int64], stage: int, where: NDArray[np.bool_] | None = None
    ) -> tuple[int, ...]:
        """How many images (of those in `where`) belong to each task seen after `stage`."""
        chosen_N = positions_N if where is None else positions_N[where]
        counts = np.bincount(self._task_of_position[chosen_N], minlength=stage + 1)
        return tuple(int(n) for n in counts)


def task_sizes(classes: int, first: int, each: int) -> tuple[int, ...]:
    """Sizes of the tasks: the first, then equal ones; what remains makes the last."""
    if not 1 <= first <= classes or each < 1:
        raise ConfigurationError(
            f"the first task has {first} and each later one {each} classes, of {classes} in all; "
            f"choose at least 1 for both and at most {classes} for the first"
        )
    whole, rest = divmod(classes - first, each)
    return (first, *[each] * whole, *([rest] if rest else []))


def _rank_within(positions_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of each image among those of its class, in stored order."""
    by_class_N = np.argsort(positions_N, kind="stable")
    sorted_N = positions_N[by_class_N]
    firsts_N = np.searchsorted(sorted_N, sorted_N, side="left")
    ranks_N = np.empty_like(positions_N)
    ranks_N[by_class_N] = np.arange(len(positions_N)) - firsts_N
    return ranks_N
