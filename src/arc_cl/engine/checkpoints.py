"""A stage on disk: `stages/03/model.safetensors` and `meta.json`. Nothing is ever unpickled.

A stage folder is written beside its place and renamed, so that it is there whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from arc_cl.errors import RecordError

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class StageMeta:
    """What a checkpoint is of, and the checksum of its weights."""

    schema: int
    stage: int
    seed: int
    sha256: str


def save_stage(run: Path, stage: int, module: nn.Module, seed: int) -> None:
    """Write all state of `module` as the checkpoint of `stage`, replacing what was there."""
    folder = _folder(run, stage)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        weights = partial / "model.safetensors"
        save_file({k: v.contiguous() for k, v in module.state_dict().items()}, weights)
        meta = StageMeta(schema=SCHEMA, stage=stage, seed=seed, sha256=_digest(weights))
        (partial / "meta.json").write_text(json.dumps(asdict(meta), indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_stage(run: Path, stage: int, module: nn.Module) -> StageMeta:
    """Load the checkpoint of `stage` into `module`, which must have grown to it already."""
    folder = _folder(run, stage)
    weights = folder / "model.safetensors"
    try:
        meta = StageMeta(**json.loads((folder / "meta.json").read_text()))
        if (meta.schema, meta.stage, meta.sha256) != (SCHEMA, stage, _digest(weights)):
            raise ValueError("schema, stage or checksum of meta.json do not fit the weights")
        module.load_state_dict(load_file(weights))
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise RecordError(
            f"the checkpoint {folder} cannot be used: {error}; train this run again"
        ) from error
    return meta


def _folder(run: Path, stage: int) -> Path:
    return run / "stages" / f"{stage:02d}"


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
