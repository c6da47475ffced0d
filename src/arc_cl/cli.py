"""The command line: parse, call one function, print. Nothing heavy is imported until it is needed.

A plain `pip install arc-cl` has no parser and no training loop; whatever of them is missing, the
answer is one line that says what to install.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from arc_cl import __version__, catalogue
from arc_cl.errors import ARCError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

    from arc_cl.engine.resolve import Resolved
    from arc_cl.engine.training import Order
    from arc_cl.report.tables import Table

_EXTRA = {
    "PIL",
    "cyclopts",
    "lightning_fabric",
    "matplotlib",
    "rich",
    "safetensors",
    "tensorboardX",
    "timm",
    "torchvision",
}


def main(tokens: Sequence[str] | None = None) -> None:
    """Run one command; what this package raises on purpose becomes one message, and exit code 2."""
    try:
        from cyclopts import App, Parameter

        as_written = Parameter(consume_multiple=True, negative=())
        app = App(name="arc-cl", help=_HELP, version=__version__, default_parameter=as_written)
        for command in (demo, train, evaluate, bench, doctor):
            app.command(_with_names(command))
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


def _with_names(command: Callable[..., None]) -> Callable[..., None]:
    """Its help lists what the catalogue finds at this moment."""
    from arc_cl.experiments.recipes import DATA

    listed: dict[str, Callable[[], Iterable[str]]] = {
        "{learners}": lambda: catalogue.names("learners"),
        "{methods}": lambda: catalogue.names("adapt"),
        "{data}": lambda: DATA,
    }
    for place, found in listed.items():
        if place in (text := command.__doc__ or ""):
            command.__doc__ = text.replace(place, ", ".join(found()))
    return command


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
    from arc_cl.engine.runtime import Runtime
    from arc_cl.engine.training import Order
    from arc_cl.experiments.demo import DEMO
    from arc_cl.report import html, tables

    console = Console()
    words = ["arc-cl", "demo", "--out", str(out), "--seed", str(seed), "--classes", classes]
    order = Order(out, Runtime.open(seed), shlex.join(words))
    with shown_on(console) as progress:
        found = engine.demo(DEMO, order, tuning=classes == "tuning", progress=progress)
    page = out / "index.html"
    page.write_text(
        html.page(DEMO.title, DEMO.notes, found.evaluations, found.repaired, found.broken),
        encoding="utf-8",
    )
    console.print(_rich(tables.comparison(found.evaluations)))
    print(f"The whole story: {page.resolve()}")


def train(
    *,
    learner: str | None = None,
    data: str | None = None,
    recipe: str | None = None,
    pilot: Path | None = None,
    variant: Literal["sane", "released"] | None = None,
    set: tuple[str, ...] = (),
    coupling: Literal["none", "freeze", "released"] | None = None,
    seed: int | None = None,
    out: Path | None = None,
    root: Path | None = None,
    devices: str = "auto",
    precision: Literal["fp32", "bf16"] = "fp32",
    compile: bool = False,
    keep_minutes: float = 5.0,
    fast: bool = False,
    show: bool = False,
) -> None:
    """Learn a sequence of tasks: a recipe into a run folder. The same command again resumes.

    What to learn is a learner and its data, or a recipe by name or file, or a configuration of
    PILOT or the ARC release. Every stage leaves a checkpoint and the features of its test stream.

    Example: `arc-cl train --learner l2p --data glyphs --out runs/l2p-glyphs`

    Parameters
    ----------
    learner
        One of those found here: {learners}.
    data
        One of the settings that recipes are shipped for: {data}.
    recipe
        A shipped recipe by its name (`slca-cifar100-inc10`), or a TOML file.
    pilot
        A JSON configuration of PILOT or of the ARC release (`exps/l2p.json`).
    variant
        The learner's form: ours (sane), or as in the released code with its slips.
    set
        Values to change in the recipe: `--set lr=0.01 epochs=3`.
    coupling
        What evaluations between tasks do to training; all but none are reported as coupled.
    seed
        Decides everything random; if not given 0, or the first seed of a PILOT configuration.
    out
        The run folder; if not given `runs/` and the recipe's name.
    root
        The folder of the data sets.
    devices
        auto, cpu, or cuda:N.
    precision
        Of the network's arithmetic; statistics and heads count in fp32 at least.
    compile
        Compile the loss by torch.compile: minutes once, worth it on long runs with a GPU.
    keep_minutes
        Between two states kept within a stage, which an interrupted run goes on from.
    fast
        A miniature of the recipe that ends in seconds on a CPU; its numbers mean nothing.
    show
        Print the resolved recipe, and stop.
    """
    from arc_cl.engine.resolve import changed, complete, resolve
    from arc_cl.experiments import toml
    from arc_cl.experiments.choice import choose, with_origins
    from arc_cl.experiments.fast import fast as miniature

    choice = choose(learner, data, recipe, pilot, variant)
    pairs = (*set, *([f"coupling={coupling}"] if coupling else []))
    chosen = complete(changed(choice.recipe, pairs))
    if fast:
        chosen = complete(changed(miniature(chosen), pairs))
    chosen = with_origins(chosen)
    for line in choice.ignored:
        print(f"ignored: {line}", file=sys.stderr)
    if show:
        print(toml.dump(chosen), end="")
        return
    from arc_cl.engine.runtime import Runtime
    from arc_cl.engine.training import Order

    runtime = Runtime.open(
        choice.seed if seed is None else seed, devices, precision, compile=compile
    )
    folder = Path("runs") / chosen.name if out is None else out
    words = shlex.join(["arc-cl", *(sys.argv[1:] or ["train"])])
    _train(Order(folder, runtime, words, keep_minutes * 60), resolve(chosen, root))


def _train(order: Order, resolved: Resolved) -> None:
    from rich.console import Console

    from arc_cl.engine.progress import shown_on
    from arc_cl.engine.training import plain
    from arc_cl.engine.training import train as engine_train
    from arc_cl.report import tables

    console = Console()
    with shown_on(console) as progress:
        trained = engine_train(order, resolved, progress)
        evaluation = plain(order, trained, progress)
    console.print(_rich(tables.stages(evaluation)))
    print(f"The run: {order.folder.resolve()}")


def evaluate(
    run: Path,
    *,
    method: tuple[str, ...] = ("none", "arc"),
    settings: Literal["paper", "released"] | None = None,
    set: tuple[str, ...] = (),
    stream: Literal["shuffled", "sorted"] = "shuffled",
    batch_size: int = 16,
    devices: str = "auto",
    root: Path | None = None,
    json: bool = False,
) -> None:
    """Answer the test stream of every stage of a run by test-time methods; train nothing.

    Every method starts from the stage as it was trained and sees no label. The first one is what
    the others are compared with. Records go to the run's `evaluations/`.

    Example: `arc-cl evaluate runs/l2p-glyphs --method none arc --set beta=0.7 gamma=1.5`

    Parameters
    ----------
    run
        A folder that `arc-cl train` made.
    method
        Some of: {methods}.
    settings
        ARC as the paper states it or as it was released; if not given, our defaults.
    set
        Settings of the methods: `beta=0.7` for all that have it, or `arc.beta=0.7`.
    stream
        Test images in random order, by the run's seed, or class by class.
    batch_size
        Images a step.
    devices
        auto, cpu, or cuda:N.
    root
        The folder of the data sets.
    json
        Print the records instead of a table.
    """
    from arc_cl.engine.compare import evaluate_rows
    from arc_cl.engine.evaluate import Stream
    from arc_cl.engine.progress import shown_on
    from arc_cl.engine.rows import rows_of
    from arc_cl.engine.runs import open_run
    from arc_cl.report import tables

    rows = rows_of([name.replace("-", "_") for name in method], set, settings)
    trained = open_run(run, devices, root)
    words = shlex.join(["arc-cl", *(sys.argv[1:] or ["evaluate", str(run)])])
    console = _console(to_stderr=json)
    with shown_on(console) as progress:
        arriving = Stream(stream == "shuffled", batch_size)
        results = evaluate_rows(trained, rows, arriving, words, progress)
    records = [each.evaluation for each in results]
    if json:
        print("[" + ",\n".join(record.text() for record in records) + "]")
    else:
        console.print(_rich(tables.comparison(records)))


def bench(
    what: Literal["replay", "training"] = "replay",
    *,
    out: Path | None = None,
    backbone: str = "vit_base_patch16_224",
    learners: tuple[str, ...] = (),
    devices: str = "auto",
    precision: Literal["fp32", "bf16"] = "fp32",
    compile: bool = False,
    steps: int = 20,
    released: Path | None = None,
) -> None:
    """Measure speed: of replay, or of the training of each learner, beside what bounds it.

    Replay takes about two minutes on a CPU: beside its floor, plain autograd and a backbone's
    forward pass. Training stands beside plain forward and backward passes of the same backbone.
    Exits with 1 where a target is missed.

    Example: `arc-cl bench --out bench.json`

    Example: `arc-cl bench training --backbone vit_tiny_patch16_224 --steps 2`

    Parameters
    ----------
    what
        What to measure.
    out
        File for the figures with their origin (JSON).
    backbone
        Of training: a timm name; its weights are random.
    learners
        Of training: which ones; all that have a recipe if not given.
    devices
        Of training: auto, cpu, or cuda:N.
    precision
        Of training.
    compile
        Of training: compile both sides.
    steps
        Of training: steps measured at a time.
    released
        Of training: what `benchmarks/released.py` wrote just before on this machine.
    """
    from arc_cl.engine import bench as speed
    from arc_cl.engine.runtime import Runtime

    machine = Runtime.open(0, devices, precision, compile=compile)
    if what == "replay":
        measured = speed.measure(machine.device)
    else:
        from arc_cl.engine.bench_training import Bench, measure_training, speeds_of
        from arc_cl.experiments.recipes import LEARNERS, recipe

        settings = {
            name: recipe(name.replace("-", "_"), "cifar100").settings
            for name in learners or LEARNERS
        }
        theirs = speeds_of(released)
        measured = measure_training(Bench(backbone, machine, steps), settings, theirs)
    words = shlex.join(["arc-cl", *(sys.argv[1:] or ["bench", what])])
    figures = []
    for figure in measured:
        print(figure, flush=True)
        figures.append(figure)
        if out is not None:
            record = speed.recorded(figures, machine.device, words)
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


def _console(*, to_stderr: bool) -> Console:
    from rich.console import Console

    return Console(stderr=to_stderr)


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
