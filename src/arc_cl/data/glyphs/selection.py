"""How the classes of Split Glyphs were chosen: `python -m arc_cl.data.glyphs.selection`.

Every letter or digit in enough faces of both splits (at least ten in all) is a candidate. In
order of code point, one that looks like an earlier one in any face is left out: Latin, Greek and
Cyrillic twins, small letters that are the capital scaled, accents too alike to tell. "Looks like"
is the Tanimoto overlap of the two shapes, each blown up to fill the picture, of at least TWIN.
What remains is dealt by a hash: 100 classes for the benchmark, 100 on which every hyperparameter
is chosen, the rest for pre-training. The outcome stands in `classes.py`; nothing here is needed
to use the benchmark.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from arc_cl.contracts import Split
from arc_cl.data.glyphs.fonts import ALL_FACES, FACES, characters, outlines
from arc_cl.data.glyphs.raster import SIDE, centred, coverage

FEWEST_FACES: Mapping[Split, int] = MappingProxyType({"train": 6, "test": 3})
FEWEST_IN_ALL = 10
TWIN = 0.85
_DEALT = 100


def candidates() -> list[str]:
    """In enough faces of both splits, and of the two together; in order of code point."""
    train, test = (
        Counter(character for face in FACES[split] for character in characters(face))
        for split in FEWEST_FACES
    )
    return sorted(
        character
        for character, faces in train.items()
        if faces >= FEWEST_FACES["train"]
        and test[character] >= FEWEST_FACES["test"]
        and faces + test[character] >= FEWEST_IN_ALL
    )


def likeness(wanted: list[str]) -> NDArray[np.float32]:
    """The largest overlap [K,K] of two characters in any face that has both, 0 to 1."""
    place = {character: index for index, character in enumerate(wanted)}
    most = np.zeros((len(wanted), len(wanted)), np.float32)
    for face in ALL_FACES:
        drawn = outlines(face, wanted)
        ink = np.stack([coverage(centred(outline) * SIDE + SIDE / 2) for outline in drawn.values()])
        flat = ink.reshape(len(ink), -1).astype(np.float32)
        both = flat @ flat.T
        own = np.diag(both)
        here = np.ix_(*[[place[character] for character in drawn]] * 2)
        most[here] = np.maximum(most[here], both / (own[:, None] + own - both))
    return most


def distinct(wanted: list[str], most: NDArray[np.float32]) -> list[str]:
    """The characters that look like no earlier one that was kept, by their likeness [K,K]."""
    kept: list[int] = []
    for index in range(len(wanted)):
        if not kept or most[index, kept].max() < TWIN:
            kept.append(index)
    return [wanted[index] for index in kept]


def deal(chosen: list[str]) -> tuple[str, str, str]:
    """Benchmark, tuning and pre-training classes, shuffled by a hash of the character."""
    shuffled = sorted(chosen, key=lambda character: hashlib.sha256(character.encode()).digest())
    parts = shuffled[:_DEALT], shuffled[_DEALT : 2 * _DEALT], shuffled[2 * _DEALT :]
    benchmark, tuning, pretraining = ("".join(part) for part in parts)
    return benchmark, tuning, pretraining


if __name__ == "__main__":
    everyone = candidates()
    sys.stdout.write("\n".join(deal(distinct(everyone, likeness(everyone)))) + "\n")
