"""Recipes as TOML files: a user's own, and the complete one that a run folder keeps.

Tables: `[setup]`, what every recipe has; `[settings]`, those of its learner; and `[arc]`, the
values of a released configuration, where there are any. Who chose a value stands in a comment,
and is not read back: it follows from the value itself (`recipes.origins`), so that it stays true
where somebody edits the file.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from typing import TypeGuard

from arc_cl.errors import ConfigurationError
from arc_cl.experiments.fields import build, check_name
from arc_cl.experiments.recipes import origins
from arc_cl.experiments.spec import Origin, Recipe, ReleasedARC, Setup, Value

_HEAD = "# A recipe of arc-cl. Comments say who chose a value: paper, released (code), or ours."
_TABLES = ("setup", "settings", "arc")


def dump(recipe: Recipe) -> str:
    """The whole recipe, with the origin of each value beside it."""
    parts = [
        f"{_HEAD}\nname = {_plain(recipe.name)}",
        _table("setup", asdict(recipe.setup), recipe.origins),
        _table("settings", recipe.settings, recipe.origins),
    ]
    if recipe.arc is not None:
        parts.append(_table("arc", asdict(recipe.arc), None))
    return "\n\n".join(parts) + "\n"


def read(text: str, where: str) -> Recipe:
    """The recipe that a file holds; `where` names it in errors.

    Names in `[settings]` are the learner's to check, by whoever knows the learner.
    """
    try:
        held = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{where} is not TOML: {error}; see docs/recipes.md") from None
    for name in held:
        check_name(name, ("name", *_TABLES), where)
    tables = {name: _held_table(held, name, where) for name in _TABLES}
    setup = build(Setup, tables["setup"], f"[setup] of {where}")
    settings = {name: _value(name, one, where) for name, one in tables["settings"].items()}
    name = held.get("name", f"{setup.learner}-{setup.data}")
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{where}: name is {name!r}, expected a text")
    return Recipe(
        name=name,
        setup=setup,
        settings=settings,
        origins=origins(setup, settings),
        arc=_arc(tables["arc"], where) if "arc" in held else None,
    )


def _arc(table: Mapping[str, object], where: str) -> ReleasedARC:
    """TOML has no None, which is what iCaRL's batch size is."""
    return build(ReleasedARC, {"batch_size": None, **table}, f"[arc] of {where}")


def _held_table(held: Mapping[str, object], name: str, where: str) -> dict[str, object]:
    table = held.get(name, {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{where}: {name} is {table!r}, expected a table [{name}]")
    return table


def _value(name: str, value: object, where: str) -> Value:
    if isinstance(value, bool | int | float | str):
        return value
    if _are_numbers(value):
        return tuple(value)
    raise ConfigurationError(
        f"[settings] of {where}: {name} is {value!r}, expected true or false, a number, a text, "
        f"or a list of whole numbers"
    )


def _are_numbers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int for each in value)


def _table(title: str, values: Mapping[str, object], sources: Mapping[str, Origin] | None) -> str:
    """`name = value` a line, the comments in one column; None is left out, as TOML has no such."""
    pairs = {_key(name): _plain(value) for name, value in values.items() if value is not None}
    lines = [f"{name} = {value}" for name, value in pairs.items()]
    if sources is not None:
        width = max(map(len, lines), default=0)
        notes = [sources.get(name, "ours") for name, value in values.items() if value is not None]
        lines = [f"{line:<{width}}  # {note}" for line, note in zip(lines, notes, strict=True)]
    return "\n".join([f"[{title}]", *lines])


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else _plain(name)


def _plain(value: object) -> str:
    """A value in TOML. JSON writes texts in the same way, but for DEL."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
