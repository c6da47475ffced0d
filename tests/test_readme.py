"""What the documents promise: README's examples run, its commands exist, tables and links hold."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arc_cl import ARCSettings
from arc_cl.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETTINGS = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]

# What a reader types: fenced and indented blocks, and `code` in a line.
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"`([^`\n]+)`|^ {4}(\S.*)$", re.MULTILINE)


class Model(nn.Module):
    """Images [B,3,4,4] to logits of 100 classes, by a head called `fc`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(48, 32)
        self.fc = nn.Linear(32, 100)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits_BK: Tensor = self.fc(self.body(images_BCHW.flatten(1)).relu())
        return logits_BK


def stand_ins() -> dict[str, Any]:
    """All that README's examples take for granted."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return {
            "model": Model(),
            "features": torch.randn(8, 32),
            "stream": torch.randn(70, 32),
            "images": torch.rand(8, 3, 4, 4),
        }


def python_blocks(text: str) -> list[str]:
    return [code for language, code in FENCED.findall(text) if language == "python"]


def typed(text: str, program: str) -> set[str]:
    """The targets or commands of a program in what a reader types; VARIABLE=value may precede."""
    lines = {inline or indented for inline, indented in TYPED.findall(FENCED.sub("", text))}
    lines |= {line for _, block in FENCED.findall(text) for line in block.splitlines()}
    calls = (re.match(rf"{program} (?:\w+=\S+ )*(\w[\w-]*)", line.strip()) for line in lines)
    return {call[1] for call in calls if call}


def anchors(document: Path) -> set[str]:
    """The names of a document's headings in links."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in headings}


def settings_table() -> dict[str, list[Any]]:
    """Field to default, paper and released value, as docs/settings.md prints them."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(.+?)` \| `(.+?)` \| `(.+?)` \|$", SETTINGS, re.M)
    return {name: [ast.literal_eval(value) for value in values] for name, *values in rows}


def test_python_examples_run_one_after_the_other() -> None:
    names = stand_ins()
    before = {key: value.clone() for key, value in names["model"].state_dict().items()}
    blocks = python_blocks(README)
    assert len(blocks) >= 3
    for place, block in enumerate(blocks):
        exec(compile(block, f"README.md, python block {place + 1}", "exec"), names)
    assert {len(names["arc"].replay(names["stream"]))} == {70}
    after = names["model"].state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(document: str) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = typed((ROOT / document).read_text(encoding="utf-8"), "make")
    assert {"test"} <= named <= targets


def test_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    named = typed(README, "arc-cl")
    assert "demo" in named
    for command in sorted(named):
        with pytest.raises(SystemExit):
            main((command, "--help"))
        assert f"Usage: arc-cl {command}" in capsys.readouterr().out, command


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_relative_links_resolve(document: Path) -> None:
    text = FENCED.sub("", document.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        place, _, heading = target.partition("#")
        found = (document.parent / place).resolve() if place else document
        assert found.is_relative_to(ROOT), target
        assert found.exists(), target
        assert not heading or heading in anchors(found), target


def test_settings_table_is_that_of_the_code() -> None:
    presets = ARCSettings(), ARCSettings.paper(), ARCSettings.released()
    expected = {
        field.name: [getattr(preset, field.name) for preset in presets]
        for field in dataclasses.fields(ARCSettings)
    }
    assert list(settings_table()) == list(expected)
    assert settings_table() == expected


def test_the_picture_is_small() -> None:
    assert (ROOT / "docs" / "demo.png").stat().st_size <= 250_000
