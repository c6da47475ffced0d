"""Progress: bars on a terminal, one line a phase elsewhere, and the right numbers in both."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from arc_cl.engine.progress import Silent, shown_on


def run_on(console: Console) -> str:
    with shown_on(console) as progress:
        progress.phase("Training", 2)
        for _ in range(8):
            progress.advance(0.25, 10)
        progress.phase("Testing", 1)
        progress.advance(1, 5)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_lines_where_there_is_no_terminal() -> None:
    lines = run_on(Console(file=StringIO())).splitlines()
    assert [line.split(" · ")[0] for line in lines] == ["Training 2/2", "Testing 1/1"]
    assert all("images/s" in line and "took" in line for line in lines)


def test_bars_on_a_terminal() -> None:
    shown = run_on(Console(file=StringIO(), force_terminal=True, width=100, _environ={}))
    assert "Training" in shown
    assert "2/2" in shown
    assert "images/s" in shown


def test_silence() -> None:
    Silent().phase("Training", 1)
    Silent().advance(1, 1)
