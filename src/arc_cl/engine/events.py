"""What happened in a run: `events.jsonl`, a line a happening, and TensorBoard scalars beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from time import time_ns

from tensorboardX import SummaryWriter


class Journal:
    """Appends; a run that resumes goes on in the same file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events.jsonl"
        # Without a suffix, a second journal within a second would replace the first one's file.
        self._board = SummaryWriter(str(folder), flush_secs=5, filename_suffix=f".{time_ns()}")

    def note(self, event: str, **facts: object) -> None:
        """One line; plain values only."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, **facts}) + "\n")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def close(self) -> None:
        self._board.close()
