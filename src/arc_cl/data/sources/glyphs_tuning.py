"""Split Glyphs on the classes for choosing hyperparameters: none of them is in the benchmark."""

from __future__ import annotations

from arc_cl.data.sources.glyphs import Glyphs


def create() -> Glyphs:
    return Glyphs(classes="tuning")
