"""Split Glyphs: honest classes, the same bytes everywhere, no typeface on both sides."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from arc_cl.contracts import Split
from arc_cl.data.glyphs import fonts
from arc_cl.data.glyphs.classes import CLASSES
from arc_cl.data.glyphs.fonts import ALL_FACES, FACES, characters, outlines
from arc_cl.data.glyphs.raster import SIDE, centred, coverage
from arc_cl.data.glyphs.selection import (
    TWIN,
    candidates,
    deal,
    distinct,
    likeness,
)
from arc_cl.data.sources.glyphs import Glyphs, render
from arc_cl.errors import ARCWarning, ConfigurationError, DataError

EVERY_CLASS = "".join(CLASSES.values())
DIGESTS: dict[Split, str] = {
    "train": "346c99dfe2d8ce1e707d44ac74a8293c5e4e194539a364cab0a9f1378556439a",
    "test": "7628f925506c2a2a0bfd8a3c4860413292490b4c45226a8f418df28c21283184",
}


# --- the classes


def test_three_sets_without_a_common_character() -> None:
    assert len(CLASSES["benchmark"]) == 100
    assert len(CLASSES["tuning"]) == 100
    assert len(CLASSES["pretraining"]) >= 300
    assert len(set(EVERY_CLASS)) == len(EVERY_CLASS)


def test_every_class_is_a_letter_or_digit_with_faces_enough_on_both_sides() -> None:
    counts = {
        split: Counter(c for face in FACES[split] for c in characters(face)) for split in FACES
    }
    for character in EVERY_CLASS:
        assert unicodedata.category(character)[0] == "L" or character.isdecimal(), character
        assert counts["train"][character] + counts["test"][character] >= 10, character
        assert counts["train"][character] >= 6, character
        assert counts["test"][character] >= 3, character


def test_many_scripts_take_part() -> None:
    scripts = Counter(unicodedata.name(one).split()[0] for one in CLASSES["benchmark"])
    assert {"LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN", "DIGIT"} <= set(scripts)


def test_the_sets_are_what_the_rule_gives_and_no_two_classes_look_alike() -> None:
    wanted = candidates()
    alike = likeness(wanted)
    assert tuple(CLASSES.values()) == deal(distinct(wanted, alike))
    chosen = [index for index, one in enumerate(wanted) if one in set(EVERY_CLASS)]
    among = alike[np.ix_(chosen, chosen)] - np.eye(len(chosen))
    assert among.max() < TWIN


@pytest.mark.parametrize("face", ALL_FACES)
def test_no_two_classes_share_an_outline(face: str) -> None:
    drawn = outlines(face, EVERY_CLASS)
    shapes = Counter(_at_origin(outline) for outline in drawn.values())
    assert max(shapes.values()) == 1


def test_twins_would_be_found() -> None:
    drawn = outlines("DejaVuSans", "AΑАoOb")
    assert len({_at_origin(drawn[one]) for one in "AΑА"}) == 1
    alike = likeness(list("AΑАoOb"))
    assert alike[0, 1] == alike[0, 2] == pytest.approx(1)
    assert alike[3, 4] > TWIN > alike[0, 5]


def _at_origin(outline_S4: NDArray[np.float64]) -> frozenset[tuple[float, ...]]:
    corner = outline_S4.reshape(-1, 2).min(axis=0)
    return frozenset(map(tuple, outline_S4 - np.tile(corner, 2)))


# --- the faces


def test_test_faces_draw_no_training_image() -> None:
    assert not set(FACES["train"]) & set(FACES["test"])


def test_no_symbol_or_last_resort_face() -> None:
    symbols = re.compile("LastResort|cmex|cmsy|cmmi|STIXSiz|STIXNonUni|Display")
    assert not [face for face in ALL_FACES if symbols.search(face)]


def test_tex_glyphs_at_latin_code_points_are_not_believed() -> None:
    assert "À" in characters("DejaVuSans")
    assert characters("cmr10") == frozenset(filter(str.isalnum, map(chr, range(128))))


def test_an_outline_is_closed() -> None:
    outline = outlines("DejaVuSans", "8")["8"]
    assert Counter(map(tuple, outline[:, :2])) == Counter(map(tuple, outline[:, 2:]))


def test_a_missing_font_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fonts, "font_file", lambda face: tmp_path / face)
    with pytest.raises(DataError, match=r"DejaVuSans is missing.*pip install .*matplotlib=="):
        Glyphs().prepare(None)


def test_other_fonts_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "DIGEST", "0123")
    with pytest.warns(ARCWarning, match=r"fonts of matplotlib .* are not those of .*\(0123\)"):
        Glyphs().prepare(None)


# --- the pictures


@pytest.mark.parametrize("split", get_args(Split))
def test_the_same_bytes_on_every_machine(split: Split) -> None:
    source = Glyphs()
    source.prepare(None)
    data = source.arrays(split)
    assert data.images_NHWC.shape == ({"train": 6000, "test": 3000}[split], SIDE, SIDE, 3)
    assert data.images_NHWC.dtype == np.uint8
    assert hashlib.sha256(data.images_NHWC.tobytes()).hexdigest() == DIGESTS[split]
    assert np.array_equal(np.bincount(data.labels_N), [len(data) // 100] * 100)
    assert data.labels_N.dtype == np.int64


def test_an_image_can_be_drawn_alone() -> None:
    many = render("aЖ5", "test", 7)
    assert np.array_equal(render("Ж", "test", 3), many[7:10])


def test_every_image_differs() -> None:
    images = np.concatenate([render("aЖ", "train", 30), render("aЖ", "test", 30)])
    assert not [pair for pair in combinations(images, 2) if np.array_equal(*pair)]


def test_class_names_follow_the_labels() -> None:
    source = Glyphs(classes="tuning", train=2)
    assert len(source.class_names) == source.arrays("train").labels_N.max() + 1 == 100
    assert source.class_names[0] == "U+1F59 GREEK CAPITAL LETTER UPSILON WITH DASIA"


def test_the_global_generator_is_not_touched() -> None:
    before = str(np.random.get_state(legacy=False))
    render("a", "train", 2)
    assert str(np.random.get_state(legacy=False)) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"classes": "kanji"}, "'kanji'.*'benchmark'"), ({"test": 0}, "Glyphs.test is 0.*at least 1")],
)
def test_senseless_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Glyphs(**settings)  # type: ignore[arg-type]


# --- the raster


def _polygon(*corners: tuple[float, float]) -> NDArray[np.float64]:
    return np.array([[*start, *end] for start, end in pairwise([*corners, corners[0]])])


def test_coverage_of_a_rectangle_is_exact() -> None:
    ink = coverage(_polygon((2.25, 3.0), (10.5, 3.0), (10.5, 6.5), (2.25, 6.5)))
    assert ink.sum() == pytest.approx(8.25 * 3.5)
    assert ink[4, 2:11].tolist() == [0.75, *[1.0] * 7, 0.5]
    assert ink[6, 5] == 0.5


def test_coverage_leaves_counters_open_and_joins_overlaps() -> None:
    outer = _polygon((4, 4), (20, 4), (20, 20), (4, 20))
    hole = _polygon((8, 8), (8, 12), (12, 12), (12, 8))
    again = _polygon((6, 14), (10, 14), (10, 18), (6, 18))
    assert coverage(np.concatenate([outer, hole, again])).sum() == 16 * 16 - 4 * 4


def test_coverage_is_cut_at_the_border() -> None:
    assert coverage(_polygon((-9, -9), (99, -9), (99, 99), (-9, 99))).min() == 1


def test_centred_fills_the_unit_square_upside_down() -> None:
    box = centred(_polygon((100, 200), (300, 200), (100, 600)))
    assert box.reshape(-1, 2).min(axis=0).tolist() == [-0.25, -0.5]
    assert box[0].tolist() == [-0.25, 0.5, 0.25, 0.5]
