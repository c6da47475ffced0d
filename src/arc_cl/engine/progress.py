"""How far a run is: bars on a terminal, now and then a plain line elsewhere.

A phase counts in stages, whatever one costs; a loop reports the share of a stage it has done and
how many images that were, so time left is known without knowing the work ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

_SECONDS_BETWEEN_LINES = 10.0


class Progress(Protocol):
    """Where loops report to."""

    def phase(self, title: str, stages: int) -> None:
        """What was before is over; `title` begins."""

    def advance(self, share: float, images: int) -> None: ...


class Silent:
    """Reports nothing."""

    def phase(self, title: str, stages: int) -> None: ...

    def advance(self, share: float, images: int) -> None: ...


@contextmanager
def shown_on(console: Console) -> Iterator[Progress]:
    """Bars where the console is a terminal, lines where it is not."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[rate]}", justify="right"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Bars(*columns, console=console) as bars:
        yield _Bars(bars)


class _Meter:
    """Stages and images done since a phase began."""

    def __init__(self, stages: int) -> None:
        self.stages, self.done, self.images = stages, 0.0, 0
        self.began = monotonic()

    def add(self, share: float, images: int) -> None:
        self.done += share
        self.images += images

    @property
    def seconds(self) -> float:
        return max(monotonic() - self.began, 1e-6)

    @property
    def rate(self) -> str:
        return f"{self.images / self.seconds:,.0f} images/s"


class _Bars:
    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._meter = _Meter(0)
        self._bar: TaskID | None = None

    def phase(self, title: str, stages: int) -> None:
        self._meter = _Meter(stages)
        self._bar = self._bars.add_task(title, total=stages, rate="")

    def advance(self, share: float, images: int) -> None:
        self._meter.add(share, images)
        if self._bar is not None:
            self._bars.update(self._bar, advance=share, rate=self._meter.rate)


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._title = ""
        self._meter = _Meter(0)
        self._last = 0.0

    def phase(self, title: str, stages: int) -> None:
        self._title, self._meter = title, _Meter(stages)
        self._last = monotonic()

    def advance(self, share: float, images: int) -> None:
        meter = self._meter
        meter.add(share, images)
        finished = meter.done > meter.stages - 1e-6
        if finished or monotonic() - self._last > _SECONDS_BETWEEN_LINES:
            self._last = monotonic()
            left = meter.seconds * (meter.stages / meter.done - 1)
            time = f"took {meter.seconds:.0f} s" if finished else f"{left:.0f} s left"
            stage = f"{meter.done:.0f}/{meter.stages}"
            self._console.print(f"{self._title} {stage} · {meter.rate} · {time}", highlight=False)
