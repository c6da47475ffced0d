"""The page: complete by itself, escaped, and honest in both directions."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np

from arc_cl.contracts import Example
from arc_cl.protocol.record import Detections, Evaluation
from arc_cl.report.html import page

TITLE, NOTES = "A <b>& B", ("chosen <elsewhere>",)
SEEN = Detections(
    images=200,
    retained=5,
    retained_right=4,
    corrected=20,
    corrected_past=15,
    repaired=9,
    broken=4,
)
PLAIN = Evaluation(
    method="none",
    title="plain",
    settings={},
    learner="finetune",
    training={"lr": 0.1, "epochs": 2, "batch_size": 16},
    tasks=(2, 2),
    stream="shuffled",
    batch_size=8,
    seed=5,
    correct=((90,), (40, 80)),
    total=((100,), (100, 100)),
    detections=(SEEN, SEEN),
    seconds=1.0,
    provenance={"command": "arc-cl demo --out '<x>'", "torch": "2.6.0"},
)
ARC = replace(
    PLAIN, method="arc", title='"<ARC>"', settings={"beta": 0.8}, correct=((90,), (45, 80))
)
EXAMPLE = Example(
    image_HWC=np.zeros((8, 8, 3), dtype=np.uint8), before="<a>", after='"b"', truth="c & d"
)


class Outline(HTMLParser):
    """Open tags must be closed in order; text and attributes are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.links: list[str] = []
        self.alts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [str(found[key]) for key in ("src", "href") if key in found]
        if tag == "img":
            self.alts.append(str(found.get("alt")))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outline(worse: bool = False) -> Outline:
    last = replace(ARC, correct=((90,), (30, 80))) if worse else ARC
    parsed = Outline()
    parsed.feed(page(TITLE, NOTES, [PLAIN, last], [EXAMPLE], [EXAMPLE]))
    return parsed


def test_it_is_well_formed_and_needs_no_network() -> None:
    parsed = outline()
    assert parsed.open == []
    assert parsed.links
    assert all(link.startswith("data:image/png;base64,") for link in parsed.links)
    whole = page(TITLE, NOTES, [PLAIN, ARC], [EXAMPLE], [EXAMPLE])
    assert not re.search(r"https?://|@import|url\(|<script", whole)


def test_whatever_is_given_is_shown_as_text() -> None:
    parsed = outline()
    for text in ("A <b>& B", '"<ARC>"', "chosen <elsewhere>", "--out '<x>'", "<a> →", "c & d"):
        assert text in parsed.text
    assert parsed.alts == ["Test image of c & d"] * 2


def test_it_says_what_happened_in_both_directions() -> None:
    assert "125 of 200 test images right, 5 more than plain" in outline().text
    assert "110 of 200 test images right, 10 fewer than plain" in outline(worse=True).text
    assert "9 wrong answers into right ones and 4 right ones into wrong ones" in outline().text
    assert "Right → wrong: 4" in outline().text


def test_it_suits_dark_light_phone_and_paper() -> None:
    whole = page(TITLE, NOTES, [PLAIN, ARC], [], [])
    for needed in ("prefers-color-scheme: dark", "max-width: 40rem", "@media print", "viewport"):
        assert needed in whole
