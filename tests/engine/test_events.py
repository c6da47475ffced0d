"""What a run tells: one JSON object a line, appended, and scalars that TensorBoard reads."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event

from arc_cl.engine.events import Journal


def lines(folder: Path) -> list[dict[str, object]]:
    text = (folder / "events.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def scalars(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Of all TensorBoard files: each record is its length, a checksum, an event, a checksum."""
    for path in sorted(folder.glob("events.out.tfevents.*")):
        rest = path.read_bytes()
        while rest:
            (length,) = struct.unpack_from("<Q", rest)
            event = Event.FromString(rest[12 : 12 + length])
            rest = rest[16 + length :]
            for value in event.summary.value:
                yield value.tag, event.step, value.simple_value


def test_a_line_a_happening_in_json(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.note("stage begins", stage=0, images=12)
        journal.note("epoch", loss=0.5, name="Ω, two\nlines", shape=[1, 2])
    first, second = lines(tmp_path)
    times = [datetime.fromisoformat(str(each.pop("time"))) for each in (first, second)]
    assert times[0] <= times[1]
    assert times[0].utcoffset() is not None
    assert first == {"event": "stage begins", "stage": 0, "images": 12}
    assert second == {"event": "epoch", "loss": 0.5, "name": "Ω, two\nlines", "shape": [1, 2]}


def test_a_line_is_on_disk_when_it_is_noted(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        for count in (1, 2, 3):
            journal.note("x")
            assert len(lines(tmp_path)) == count


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for count in (1, 2):
        with closing(Journal(tmp_path)) as journal:
            journal.note("resumed", count=count)
    assert [line["count"] for line in lines(tmp_path)] == [1, 2]


def test_tensorboard_finds_the_scalars(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.scalars({"train/loss": 0.25, "test/accuracy": 0.75}, 3)
        journal.scalars({"train/loss": 0.125}, 4)
    accuracy, *losses = sorted(scalars(tmp_path))
    assert accuracy == ("test/accuracy", 3, 0.75)
    assert losses == [("train/loss", 3, 0.25), ("train/loss", 4, 0.125)]
