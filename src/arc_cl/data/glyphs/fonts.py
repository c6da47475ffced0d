"""The faces that Split Glyphs is drawn from, and the outlines in them.

matplotlib's wheel carries 21 text faces; reading their outlines in font units, unhinted and
unscaled, gives the integers that stand in the font file, whatever FreeType reads them. A whole
family (DejaVu Serif) and one Computer Modern face are held out: they draw the test images only.

The Computer Modern files place TeX's glyphs at Latin-1 code points (Greek capitals at U+00C0),
so only their ASCII letters and digits are what they say.
"""

from __future__ import annotations

import hashlib
import unicodedata
import warnings
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.ft2font import FT2Font, LoadFlags
from numpy.typing import NDArray

from arc_cl.contracts import Split
from arc_cl.errors import ARCWarning, DataError

FACES: dict[Split, tuple[str, ...]] = {
    "train": (
        "DejaVuSans",
        "DejaVuSans-Bold",
        "DejaVuSans-Oblique",
        "DejaVuSans-BoldOblique",
        "DejaVuSansMono",
        "DejaVuSansMono-Bold",
        "DejaVuSansMono-Oblique",
        "DejaVuSansMono-BoldOblique",
        "STIXGeneral",
        "STIXGeneralBol",
        "STIXGeneralItalic",
        "STIXGeneralBolIta",
        "cmb10",
        "cmss10",
        "cmti10",
        "cmtt10",
    ),
    "test": (
        "DejaVuSerif",
        "DejaVuSerif-Bold",
        "DejaVuSerif-Italic",
        "DejaVuSerif-BoldItalic",
        "cmr10",
    ),
}
ALL_FACES = FACES["train"] + FACES["test"]

DEFINED_ON = "matplotlib 3.11.2"
DIGEST = "6358ad7905c94bd6804ec9d9d6e262f3b0a8b6a7bb0ec8612a14bdbd8a35ea97"

_CHORDS = 4  # a quadratic arc becomes this many: its points stay exact in float64
_PATH_CODES = (1, 2, 3, 79)  # of matplotlib: move, line, quadratic arc (in pairs), close


def font_file(face: str) -> Path:
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"


def check_fonts() -> None:
    """Complain when the installed fonts are not those that the benchmark was defined on."""
    digest = hashlib.sha256()
    for face in ALL_FACES:
        path = font_file(face)
        if not path.is_file():
            raise DataError(
                f"{path} is missing: Split Glyphs needs the fonts of {DEFINED_ON}; "
                f"pip install --force-reinstall {DEFINED_ON.replace(' ', '==')}"
            )
        digest.update(path.read_bytes())
    if digest.hexdigest() != DIGEST:
        warnings.warn(
            f"the fonts of matplotlib {matplotlib.__version__} (sha256 {digest.hexdigest()}) are "
            f"not those of {DEFINED_ON} ({DIGEST}): images of Split Glyphs may differ and numbers "
            f"may not compare; pip install {DEFINED_ON.replace(' ', '==')} for the same bytes",
            ARCWarning,
            stacklevel=2,
        )


def characters(face: str) -> frozenset[str]:
    """The letters and digits that this face draws: no empty glyph, no last-resort box."""
    font = FT2Font(str(font_file(face)))
    return frozenset(
        character
        for code, glyph in font.get_charmap().items()
        if glyph
        and unicodedata.category(character := chr(code)) in {"Lu", "Ll", "Lo", "Nd"}
        and (character.isascii() or not face.startswith("cm"))
    )


def outlines(face: str, wanted: Iterable[str]) -> dict[str, NDArray[np.float64]]:
    """Of each character in the face, the outline as segments [S,4] (x0, y0, x1, y1; y upwards)."""
    font = FT2Font(str(font_file(face)))
    drawn = characters(face)
    found = {}
    for character in wanted:
        if character in drawn:
            font.load_char(ord(character), flags=LoadFlags.NO_SCALE)
            segments = _segments(*font.get_path())
            if len(segments):
                found[character] = segments * 64.0  # matplotlib reads font units as 1/64 pixel
    return found


def _segments(points_P2: NDArray[np.float64], codes_P: NDArray[np.integer]) -> NDArray[np.float64]:
    """A path of lines and quadratic arcs as line segments, each contour closed; in any order."""
    move, line, arc, close = (np.flatnonzero(codes_P == code) for code in _PATH_CODES)
    pairs = [(points_P2[line - 1], points_P2[line]), (points_P2[close - 1], points_P2[move])]
    start, control, end = (points_P2[arc[::2] + place] for place in (-1, 0, 1))
    bend = [
        (1 - t) * (1 - t) * start + 2 * t * (1 - t) * control + t * t * end
        for t in (chord / _CHORDS for chord in range(_CHORDS + 1))
    ]
    return np.concatenate([np.hstack(pair) for pair in [*pairs, *pairwise(bend)]])
