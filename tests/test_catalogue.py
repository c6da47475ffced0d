"""Names to modules: by file name, by entry point, with a hint for a misspelt one."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from arc_cl import catalogue
from arc_cl.errors import ConfigurationError


def installed(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    found = [EntryPoint(name, value, "arc_cl.learners") for name, value in points.items()]
    monkeypatch.setattr(
        catalogue, "entry_points", lambda group: EntryPoints(p for p in found if p.group == group)
    )


def test_a_file_is_an_entry_and_a_private_file_is_not() -> None:
    assert {"arc", "none"} <= set(catalogue.names("adapt"))
    assert "finetune" in catalogue.names("learners")
    assert "glyphs" in catalogue.names("data.sources")
    assert not any(name.startswith("_") for name in catalogue.names("learners"))
    assert catalogue.load("adapt", "arc").__name__ == "arc_cl.adapt.arc"


def test_a_room_that_is_not_built_yet_is_empty() -> None:
    assert isinstance(catalogue.names("experiments.tables"), tuple)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"'fintune'; did you mean 'finetune'\?"):
        catalogue.load("learners", "fintune")
    with pytest.raises(ConfigurationError, match=r"'qqqq' \(there are: .*none"):
        catalogue.load("adapt", "qqqq")


def test_another_distribution_adds_a_learner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "their_learner.py").write_text("ANSWER = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed(monkeypatch, their_own="their_learner")
    assert "their_own" in catalogue.names("learners")
    assert catalogue.load("learners", "their-own").ANSWER == 42
    monkeypatch.delitem(sys.modules, "their_learner")


def test_a_shipped_name_cannot_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, finetune="theirs")
    with pytest.raises(ConfigurationError, match="'finetune' = 'theirs'"):
        catalogue.load("learners", "finetune")
