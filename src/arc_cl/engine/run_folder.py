"""What a run is, in its folder: `recipe.toml`, and `provenance.json` with all else that decides it.

A folder holds one run for ever: another recipe, seed, precision, weights or data are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from arc_cl.contracts import LabelledImages, Split
from arc_cl.engine.resolve import Resolved
from arc_cl.engine.runtime import Runtime
from arc_cl.engine.whole import written_whole
from arc_cl.errors import RecordError
from arc_cl.experiments.spec import Recipe
from arc_cl.experiments.toml import dump, read

_RECIPE, _PROVENANCE = "recipe.toml", "provenance.json"


@dataclass(frozen=True)
class Identity:
    """What decides a run's numbers: its recipe, and facts by name."""

    recipe: Recipe
    facts: Mapping[str, str | int]

    @classmethod
    def of(
        cls, runtime: Runtime, resolved: Resolved, data: Mapping[Split, LabelledImages]
    ) -> Identity:
        facts: dict[str, str | int] = {
            "seed": runtime.seed,
            "precision": runtime.precision,
            "backbone": resolved.backbone.name,
            "weights": resolved.backbone.weights,
            "weights sha256": resolved.backbone.sha256,
        }
        digests = {f"{split} images sha256": _digest(images) for split, images in data.items()}
        return cls(resolved.recipe, facts | digests)

    def difference(self, other: Identity) -> str:
        """Where `other` differs, in words; empty where it does not."""
        mine, theirs = self._lines(), other._lines()
        odd = sorted(mine ^ theirs, key=lambda line: (line.partition(" ")[0], line in theirs))
        return "; ".join(f"{'it has' if line in mine else 'now'} {line}" for line in odd[:4])

    def _lines(self) -> set[str]:
        """The recipe without its comments, and the facts."""
        recipe = (line.partition("#")[0].strip() for line in dump(self.recipe).splitlines())
        return {*filter(None, recipe), *(f"{name} = {value}" for name, value in self.facts.items())}


def claim(folder: Path, identity: Identity, origin: Mapping[str, object]) -> None:
    """Write what the run is; a folder that holds another run is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(
            f"cannot write to the run folder {folder}: {error.strerror}; choose another with --out"
        ) from error
    if (folder / _PROVENANCE).is_file():
        if different := read_identity(folder).difference(identity):
            raise RecordError(
                f"the folder {folder} holds another run ({different}); choose another folder with "
                f"--out, or delete that one"
            )
        return
    whole = {"run": dict(identity.facts), "origin": dict(origin)}
    _write(folder / _RECIPE, dump(identity.recipe))
    _write(folder / _PROVENANCE, json.dumps(whole, indent=1) + "\n")


def read_identity(folder: Path) -> Identity:
    """What the run in a folder is."""
    recipe = read(_read(folder / _RECIPE, str), str(folder / _RECIPE))
    facts = _read(folder / _PROVENANCE, lambda text: json.loads(text)["run"])
    return Identity(recipe, facts)


def _write(path: Path, text: str) -> None:
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"cannot read {path}: {error!r}; is its folder a run that arc-cl train made?"
        ) from error


def _digest(data: LabelledImages) -> str:
    whole = sha256(data.images_NHWC.tobytes())
    whole.update(data.labels_N.tobytes())
    return whole.hexdigest()
