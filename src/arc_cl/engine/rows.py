"""What a command line says of test-time methods, as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from arc_cl import catalogue
from arc_cl.core.settings import ARCSettings
from arc_cl.experiments.fields import build, check_name, names, parse, split_pair
from arc_cl.experiments.spec import Row

Preset = Literal["paper", "released"]
_WHERE = "--set"


def rows_of(methods: Sequence[str], pairs: Sequence[str], preset: Preset | None) -> list[Row]:
    """A row for each method, with its settings.

    A pair is `key=value` for every method that has the key, or `method.key=value` for that one.
    """
    kinds = {name: catalogue.load("adapt", name).Settings for name in methods}
    wanted: dict[str, dict[str, object]] = {name: {} for name in methods}
    for pair in pairs:
        for name, key, text in _meant(pair, kinds):
            wanted[name][key] = parse(kinds[name], key, text, _WHERE)
    return [
        Row(title=name, method=name, settings=_settings(kinds[name], wanted[name], preset))
        for name in methods
    ]


def _meant(pair: str, kinds: Mapping[str, type[Any]]) -> list[tuple[str, str, str]]:
    """Method, key and text of each setting that a pair is about."""
    key, text = split_pair(pair)
    method, dot, inner = key.partition(".")
    if dot:
        check_name(method, tuple(kinds), "the list of methods asked for")
        check_name(inner, names(kinds[method]), f"{_WHERE} of {method}")
        return [(method, inner, text)]
    known = {name: names(kind) for name, kind in kinds.items()}
    check_name(key, tuple(dict.fromkeys(each for all_ in known.values() for each in all_)), _WHERE)
    return [(name, key, text) for name, all_ in known.items() if key in all_]


def _settings(kind: type[Any], values: Mapping[str, object], preset: Preset | None) -> object:
    """A preset is ARC's alone; other methods have one form."""
    if kind is not ARCSettings or preset is None:
        return build(kind, values, _WHERE)
    base = ARCSettings.paper() if preset == "paper" else ARCSettings.released()
    return build(kind, {**asdict(base), **values}, _WHERE)
