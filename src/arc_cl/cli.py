"""The command line: parse, call one function, print. Nothing heavy is imported until it is needed.

A plain `pip install arc-cl` has no parser and no training loop; whatever of them is missing, the
answer is one line that says what to install.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from arc_cl import __version__
from arc_cl.errors import ARCError

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from arc_cl.report.tables import Table

_EXTRA = {
    "PIL",
    "cyclopts",
    "lightning_fabric",
    "matplotlib",
    "rich",
    "safetensors",
    "timm",
    "torchvision",
}


def main(tokens: Sequence[str] | None = None) -> None:
    """Run one command; what this package raises on purpose becomes one message, and exit code 2."""
    try:
        from cyclopts import App

        app = App(name="arc-cl", help=_HELP, version=__version__)
        for command in (demo, bench, doctor):
            app.command(command)
        app(sys.argv[1:] if tokens is None else tokens)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        _stop(f'{error.name} is not installed; run: pip install "arc-cl[bench]"')
    except ARCError as error:
        _stop(str(error))
    except KeyboardInterrupt:
        print("arc-cl: stopped", file=sys.stderr)
        sys.exit(130)


_HELP = "Adaptive Retention & Correction: class-incremental classifiers that repair themselves."


def demo(
    *,
    out: Path = Path("runs/demo"),
    seed: int = 0,
    classes: Literal["benchmark", "tuning"] = "benchmark",
) -> None:
    """Train on Split Glyphs, repair at test time, compare: minutes on a CPU, no download.

    Finetune learns ten tasks one after another. Then the plain classifier, Retention, Correction
    and ARC are evaluated from the same checkpoints. Prints a table and writes a page (HTML).

    Example: `arc-cl demo --out runs/demo --seed 1`

    Parameters
    ----------
    out
        Folder for checkpoints, records and the page; those of an earlier demo are overwritten.
    seed
        Decides everything random: the heads, the order of the images, the test stream.
    classes
        The characters: those of the benchmark, or those that the settings were chosen on.
    """
    from rich.console import Console

    from arc_cl.engine import demo as engine
    from arc_cl.engine.progress import shown_on
    from arc_cl.experiments.demo import DEMO
    from arc_cl.report import html, tables

    console = Console()
    words = ["arc-cl", "demo", "--out", str(out), "--seed", str(seed), "--classes", classes]
    with shown_on(console) as progress:
        found = engine.demo(
            DEMO, out, seed=seed, classes=classes, command=shlex.join(words), progress=progress
        )
    page = out / "index.html"
    page.write_text(
        html.page(DEMO, found.evaluations, found.repaired, found.broken), encoding="utf-8"
    )
    console.print(_rich(tables.comparison(found.evaluations)))
    print(f"The whole story: {page.resolve()}")


def bench(*, out: Path | None = None) -> None:
    """Measure the speed of replay: beside its floor, plain autograd and a backbone's forward pass.

    Takes about two minutes on a CPU. Exits with 1 where a target is missed.

    Example: `arc-cl bench --out bench.json`

    Parameters
    ----------
    out
        File for the figures with their origin (JSON).
    """
    from arc_cl.engine.bench import measure

    words = ["arc-cl", "bench", *(["--out", str(out)] if out else [])]
    figures, record = measure(shlex.join(words))
    for figure in figures:
        print(figure)
    if out is not None:
        out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if any(figure.holds is False for figure in figures):
        sys.exit(1)


def doctor() -> None:
    """Say what is installed, what is missing, and what this machine computes with.

    Example: `arc-cl doctor`
    """
    import torch

    from arc_cl.engine.provenance import versions

    found = versions()
    for package, version in found.items():
        print(f"{package:<17} {version or 'missing'}")
    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"{'threads':<17} {torch.get_num_threads()}")
    print(f"{'devices':<17} {', '.join(['cpu', *cuda])}")
    missing = [package for package, version in found.items() if version is None]
    if missing:
        _stop(f'missing: {", ".join(missing)}; run: pip install "arc-cl[bench]"')
    print("Everything that the suite needs is here.")


def _rich(table: Table) -> RichTable:
    from rich.table import Table as RichTable

    drawn = RichTable(title=table.title, title_justify="left")
    for place, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if place else "left")
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def _stop(message: str) -> None:
    print(f"arc-cl: {message}", file=sys.stderr)
    sys.exit(2)
