"""The demo: Split Glyphs, learnt and repaired on any machine, with nothing downloaded."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from arc_cl.engine.compare import Compared, compare
from arc_cl.engine.progress import Progress
from arc_cl.engine.resolve import resolve
from arc_cl.engine.training import Order
from arc_cl.experiments.spec import Comparison

_PARTS = ("stages", "unfinished", "features", "evaluations")
_FILES = ("recipe.toml", "provenance.json", "events.jsonl")


def demo(comparison: Comparison, order: Order, *, tuning: bool, progress: Progress) -> Compared:
    """Train and compare on the benchmark's classes, or on those for choosing settings.

    An earlier demo in the folder is replaced; any other run there stays, and is refused later.
    """
    data = "glyphs_tuning" if tuning else "glyphs"
    setup = replace(comparison.recipe.setup, data=data)
    resolved = resolve(replace(comparison.recipe, setup=setup))
    if _is_demo(order.folder):
        for part in _PARTS:
            shutil.rmtree(order.folder / part, ignore_errors=True)
        for name in _FILES:
            (order.folder / name).unlink(missing_ok=True)
    return compare(order, comparison, resolved, progress)


def _is_demo(folder: Path) -> bool:
    try:
        origin = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["origin"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return str(origin.get("command", "")).startswith("arc-cl demo")
