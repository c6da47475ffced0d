"""The demo: Split Glyphs, learnt and repaired on any machine, with nothing downloaded."""

from __future__ import annotations

from pathlib import Path

from arc_cl.backbones.tiny import MEAN, STD, glyph_vit
from arc_cl.data.glyphs.classes import ClassSet
from arc_cl.data.sources.glyphs import Glyphs
from arc_cl.engine.compare import Comparison, compare
from arc_cl.engine.images import Normalisation
from arc_cl.engine.progress import Progress
from arc_cl.engine.runtime import Runtime
from arc_cl.engine.sequence import Run
from arc_cl.errors import RecordError
from arc_cl.experiments.spec import Recipe
from arc_cl.protocol.stream import Scenario, class_order


def demo(
    recipe: Recipe,
    folder: Path,
    *,
    seed: int,
    command: str,
    progress: Progress,
    classes: ClassSet = "benchmark",
) -> Comparison:
    """Train and compare on the benchmark's classes, or on those for choosing settings."""
    _make(folder)
    source = Glyphs(classes=classes)
    scenario = Scenario(order=class_order(len(source.class_names)), tasks=recipe.tasks)
    run = Run(folder, scenario, Runtime.open(seed), Normalisation(MEAN, STD))
    return compare(run, recipe, source, glyph_vit, command, progress)


def _make(folder: Path) -> None:
    """Whether there is a place for results shows before the first batch, not after the last."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(
            f"cannot write to the run folder {folder}: {error.strerror}; choose another with --out"
        ) from error
