"""Which recipe a command line means: learner and data, a recipe's name or file, or PILOT's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from arc_cl.errors import ConfigurationError
from arc_cl.experiments import pilot, toml
from arc_cl.experiments.recipes import by_name, origins, recipe
from arc_cl.experiments.spec import Recipe, Variant


@dataclass(frozen=True)
class Choice:
    """A recipe, the seed that comes with it, and what was left out of its source and why."""

    recipe: Recipe
    seed: int = 0
    ignored: tuple[str, ...] = ()


def choose(
    learner: str | None,
    data: str | None,
    recipe_name: str | None,
    pilot_file: Path | None,
    variant: Variant | None,
) -> Choice:
    """Exactly one of the three ways."""
    ways = [
        learner is not None or data is not None,
        recipe_name is not None,
        pilot_file is not None,
    ]
    if sum(ways) != 1:
        raise ConfigurationError(
            "say what to learn in one way: --learner and --data, or --recipe, or --pilot"
        )
    if pilot_file is not None:
        _no_variant(variant, "--pilot reproduces what its file would run")
        return _translated(pilot_file)
    if recipe_name is not None:
        _no_variant(variant, "a recipe has its own form")
        return Choice(_named(recipe_name))
    if learner is None or data is None:
        raise ConfigurationError("give both --learner and --data, say --learner l2p --data glyphs")
    return Choice(recipe(learner.replace("-", "_"), data, variant or "sane"))


def with_origins(recipe: Recipe) -> Recipe:
    """Whoever published a value stays its origin, also where it was typed in."""
    return replace(recipe, origins=origins(recipe.setup, recipe.settings))


def _named(name: str) -> Recipe:
    path = Path(name)
    return toml.read(_text(path), name) if path.suffix == ".toml" else by_name(name)


def _translated(path: Path) -> Choice:
    found = pilot.read(_text(path), str(path))
    ignored = tuple(f"{key}: {reason}" for key, reason in found.ignored.items())
    return Choice(found.recipe, found.seeds[0], ignored)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}; give the path of a file") from error


def _no_variant(variant: Variant | None, why: str) -> None:
    if variant is not None:
        raise ConfigurationError(f"--variant goes with --learner and --data only: {why}")
