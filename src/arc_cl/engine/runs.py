"""A run that was trained, to be read again: `open_run` makes it from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arc_cl.contracts import LabelledImages
from arc_cl.engine.checkpoints import finished_stages
from arc_cl.engine.resolve import Resolved, resolve
from arc_cl.engine.run_folder import Identity, read_identity
from arc_cl.engine.runtime import Runtime
from arc_cl.engine.sequence import Run
from arc_cl.errors import RecordError


@dataclass(frozen=True)
class Trained:
    """A finished run, with the data that it is tested on."""

    run: Run
    resolved: Resolved
    test: LabelledImages


def open_run(folder: Path, devices: str = "auto", root: Path | None = None) -> Trained:
    """The run in `folder`, which must be finished, and whose weights and data are as they were."""
    identity = read_identity(folder)
    resolved = resolve(identity.recipe, root)
    seed, precision = identity.facts["seed"], identity.facts["precision"]
    runtime = Runtime.open(int(seed), devices, "bf16" if precision == "bf16" else "fp32")
    test = resolved.source.arrays("test")
    now = Identity.of(runtime, resolved, {"test": test})
    known = {name: value for name, value in identity.facts.items() if name in now.facts}
    if different := Identity(identity.recipe, known).difference(now):
        raise RecordError(
            f"the run {folder} was made with other weights or data ({different}); bring those "
            f"back, or train it again"
        )
    run = Run(folder, resolved.scenario, runtime, resolved.appearance)
    if (done := finished_stages(folder)) < run.stages:
        raise RecordError(
            f"the run {folder} has {done} of its {run.stages} stages; finish it first, by the "
            f"command in its provenance.json"
        )
    return Trained(run, resolved, test)
