"""What an experiment is: typed values that derive from each other. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from arc_cl.contracts import Training
from arc_cl.core.settings import ARCSettings


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: a test-time method, by its name in the catalogue, and its settings.

    `settings` is an instance of the `Settings` of that method; None takes its defaults.
    """

    title: str
    method: str
    settings: ARCSettings | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the numbers, but for the seed. Names are those of the catalogue."""

    title: str
    tasks: tuple[int, ...]
    learner: str
    training: Training
    rows: tuple[Row, ...]
    """The first is what the others are compared with."""
    batch_size: int
    shuffled: bool
    """The test stream: in random order, or class by class."""
    notes: tuple[str, ...] = ()
