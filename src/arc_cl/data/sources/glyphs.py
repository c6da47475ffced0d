"""Split Glyphs: letters and digits of six scripts, drawn from the fonts in matplotlib's wheel.

A class is a character; an image is that character in one face, under a random stretch, shear,
turn, size, shift, ink, background and noise. The test images come from faces that draw no
training image, so a classifier must generalise to new typefaces. Nothing is downloaded or stored:
the 9,000 images are drawn on demand, in seconds and with the same bytes on every machine.

The benchmark is its 100 `benchmark` classes (10 tasks of 10). Whoever chooses a hyperparameter
does so on the 100 `tuning` classes; the tiny backbone has seen the `pretraining` classes, in the
training faces only. The three sets share no character.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from arc_cl.contracts import LabelledImages, Split
from arc_cl.data.glyphs.classes import CLASSES, ClassSet
from arc_cl.data.glyphs.fonts import FACES, check_fonts, outlines
from arc_cl.data.glyphs.raster import centred, draw
from arc_cl.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Glyphs:
    classes: ClassSet = "benchmark"
    """Which of the three disjoint sets of characters."""
    train: int = 60
    """Training images a class."""
    test: int = 30
    """Test images a class."""

    def __post_init__(self) -> None:
        if self.classes not in CLASSES:
            raise ConfigurationError(
                f"Glyphs.classes is {self.classes!r}; choose one of {get_args(ClassSet)}"
            )
        for split in get_args(Split):
            if (count := getattr(self, split)) < 1:
                raise ConfigurationError(
                    f"Glyphs.{split} is {count}; give at least 1 image a class"
                )

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(f"U+{ord(one):04X} {unicodedata.name(one)}" for one in CLASSES[self.classes])

    def prepare(self, root: Path | None) -> None:
        """Check the fonts; there is nothing to download, so `root` is not used."""
        check_fonts()

    def arrays(self, split: Split) -> LabelledImages:
        characters = CLASSES[self.classes]
        count = self.train if split == "train" else self.test
        return LabelledImages(
            images_NHWC=render(characters, split, count),
            labels_N=np.repeat(np.arange(len(characters)), count),
        )


def create() -> Glyphs:
    return Glyphs()


def render(
    characters: str, split: Split, count: int, *, first: int = 0, variety: float = 1.0
) -> NDArray[np.uint8]:
    """The first `count` images of each character; the faces of the split take turns."""
    faces = [outlines(face, characters) for face in FACES[split]]
    images = []
    for character in characters:
        shapes = [centred(face[character]) for face in faces if character in face]
        turns = [shapes[index % len(shapes)] for index in range(first, first + count)]
        seeds = [(split == "test", ord(character), index) for index in range(first, first + count)]
        images.append(draw(turns, seeds, variety))
    return np.concatenate(images)
