"""The demo as users run it: that its benchmark forgets as real data do, and what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from arc_cl.cli import main
from arc_cl.protocol.record import Evaluation

# tests/backbones/test_tiny.py asserts that a linear probe of the same features reaches this, in %.
PROBE = 75


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `arc-cl demo` leaves, seed 0."""
    out = tmp_path_factory.mktemp("demo")
    with pytest.raises(SystemExit) as end:
        main(["demo", "--out", str(out)])
    assert not end.value.code
    return out


def test_finetune_forgets_as_on_real_data(folder: Path) -> None:
    """F of at least 25 points, and A_B at least 20 points below the probe."""
    (plain,) = (Evaluation.read(path) for path in folder.glob("evaluations/none-*.json"))
    found = plain.metrics
    assert found.forgetting is not None
    assert 100 * found.forgetting >= 25
    assert 100 * found.average_accuracy <= PROBE - 20


def test_all_rows_come_from_the_same_checkpoints(folder: Path) -> None:
    rows = [Evaluation.read(path) for path in folder.glob("evaluations/*.json")]
    assert len(rows) == 4
    assert len({row.total for row in rows}) == 1
    assert len(list((folder / "stages").iterdir())) == 10


def test_the_page_needs_no_network(folder: Path) -> None:
    page = (folder / "index.html").read_text(encoding="utf-8")
    for word in ("plain", "+ Retention", "+ Correction", "+ ARC", "data:image/png;base64,"):
        assert word in page
    assert "http://" not in page
    assert "https://" not in page
