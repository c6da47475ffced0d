"""A learner's state on disk. Nothing is ever unpickled.

`stages/03/` is the state after a stage; `unfinished/03-002-00150/` the one after step 150 of epoch
2 of stage 3, with the optimiser's memory and the sums of what was logged. A folder is written
beside its place and renamed, so that it is there whole or not at all.

A tensor that a stage has in common with an earlier one (a frozen backbone, say) is not stored
again: `meta.json` names the stage whose file holds it, and the sha256 of each tensor.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from time import time_ns
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from arc_cl.errors import RecordError

SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class StageMeta:
    """What a checkpoint is of: for each tensor its checksum and the stage whose file holds it."""

    schema: int
    stage: int
    seed: int
    tensors: Mapping[str, tuple[int, str]]

    @property
    def sha256(self) -> str:
        """One checksum for the whole state."""
        return sha256(json.dumps(sorted(self.tensors.items())).encode()).hexdigest()


@dataclass(frozen=True, order=True)
class Place:
    """A step of a run: so many steps of this epoch of this stage are done."""

    stage: int
    epoch: int
    step: int


def save_stage(run: Path, stage: int, module: nn.Module, seed: int) -> StageMeta:
    """Write all state of `module` as the checkpoint of `stage`, replacing what was there."""
    state = _state(module)
    before = {} if stage == 0 else dict(read_meta(run, stage - 1).tensors)
    tensors = {}
    for name, tensor in state.items():
        digest = _digest(tensor)
        same = before.get(name, (stage, ""))
        tensors[name] = same if same[1] == digest else (stage, digest)
    meta = StageMeta(schema=SCHEMA, stage=stage, seed=seed, tensors=tensors)
    with _folder(_stage(run, stage)) as folder:
        new = {name: state[name] for name, (holder, _) in tensors.items() if holder == stage}
        save_file(new, folder / "model.safetensors")
        _write_json(folder / "meta.json", asdict(meta))
    return meta


def read_meta(run: Path, stage: int) -> StageMeta:
    """What the checkpoint of a stage says of itself."""
    path = _stage(run, stage) / "meta.json"
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        if whole.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {whole.get('schema')!r}, not {SCHEMA}")
        tensors = {name: (int(at), str(digest)) for name, (at, digest) in whole["tensors"].items()}
        meta = StageMeta(**{**whole, "tensors": tensors})
        if meta.stage != stage:
            raise ValueError(f"it is of stage {meta.stage}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RecordError(
            f"the checkpoint {path} cannot be used: {error}; train this run again"
        ) from error
    return meta


def load_stage(run: Path, stage: int, module: nn.Module) -> StageMeta:
    """Load the checkpoint of `stage` into `module`, which must have grown to it already."""
    meta = read_meta(run, stage)
    try:
        module.load_state_dict(dict(_tensors(run, meta)))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise RecordError(
            f"the checkpoint {_stage(run, stage)} cannot be used: {error}; train this run again"
        ) from error
    return meta


def finished_stages(run: Path) -> int:
    """How many stages, counted from the first, have a checkpoint."""
    stage = 0
    while (_stage(run, stage) / "meta.json").is_file():
        stage += 1
    return stage


def save_unfinished(
    run: Path, place: Place, module: nn.Module, optimizer: Optimizer, numbers: Mapping[str, Tensor]
) -> None:
    """Write the state within a stage, and drop older ones."""
    name = f"{place.stage:02d}-{place.epoch:03d}-{place.step:05d}"
    with _folder(run / "unfinished" / name) as folder:
        save_file(_state(module), folder / "model.safetensors")
        save_file(_optimizer_state(optimizer), folder / "optimizer.safetensors")
        save_file(dict(numbers), folder / "numbers.safetensors")
        digests = {path.name: _file_digest(path) for path in sorted(folder.glob("*.safetensors"))}
        _write_json(folder / "meta.json", {"schema": SCHEMA, **asdict(place), "files": digests})
    for other in (run / "unfinished").iterdir():
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)


def load_unfinished(
    run: Path, stage: int, module: nn.Module, optimizer: Optimizer
) -> tuple[Place, dict[str, Tensor]] | None:
    """Load the state within `stage` where there is one: the place it was left at, and its numbers.

    A damaged one is an error, as it would be for a stage: it is never passed over in silence.
    """
    folders = sorted((run / "unfinished").glob(f"{stage:02d}-*-*"))
    if not folders:
        return None
    folder = folders[-1]
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        found = {name: _file_digest(folder / name) for name in meta["files"]}
        if meta["schema"] != SCHEMA or found != meta["files"]:
            raise ValueError("schema or checksums do not fit")
        device = next(module.parameters()).device
        module.load_state_dict(load_file(folder / "model.safetensors"))
        _load_optimizer(optimizer, load_file(folder / "optimizer.safetensors", str(device)))
        numbers = load_file(folder / "numbers.safetensors", str(device))
        place = Place(meta["stage"], meta["epoch"], meta["step"])
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise RecordError(
            f"the unfinished state {folder} cannot be used: {error}; delete that folder to go on "
            f"from the end of the stage before"
        ) from error
    return place, numbers


def drop_unfinished(run: Path) -> None:
    """A stage is finished: what was kept within it is of no use any more."""
    shutil.rmtree(run / "unfinished", ignore_errors=True)


def _tensors(run: Path, meta: StageMeta) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a state, each from the file that holds it, checked."""
    for holder in sorted({at for at, _ in meta.tensors.values()}):
        with safe_open(_stage(run, holder) / "model.safetensors", framework="pt") as file:
            for name, (at, digest) in meta.tensors.items():
                if at != holder:
                    continue
                tensor = file.get_tensor(name)
                if _digest(tensor) != digest:
                    raise ValueError(f"the checksum of {name} in stage {holder} does not fit")
                yield name, tensor


def _optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Per parameter, in the order of the groups: what the optimiser remembers of it."""
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"{place}.{name}": value.contiguous()
        for place, remembered in state.items()
        for name, value in remembered.items()
        if isinstance(value, Tensor)
    }


def _load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        place, _, name = key.partition(".")
        state.setdefault(int(place), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.contiguous() for name, value in module.state_dict().items()}


@contextmanager
def _folder(place: Path) -> Iterator[Path]:
    """A new folder, which gets its name when all is written."""
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f".{place.name}-{os.getpid()}-{time_ns()}")
    partial.mkdir()
    try:
        yield partial
        for path in partial.glob("*.safetensors"):
            shutil.copymode(partial / "meta.json", path)  # safetensors lets nobody else read
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _stage(run: Path, stage: int) -> Path:
    return run / "stages" / f"{stage:02d}"


def _write_json(path: Path, whole: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().flatten()
    header = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return sha256(header + flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def _file_digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
