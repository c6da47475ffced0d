"""Names and plain values into a frozen dataclass: strict, with the nearest name for a wrong one.

Recipes in Python, TOML files, the released JSON files and `--set key=value` all come through here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from arc_cl.errors import ConfigurationError

T = TypeVar("T")


def names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass, in their order."""
    return tuple(each.name for each in fields(kind))


def required(kind: type) -> tuple[str, ...]:
    """The fields that have no default."""
    return tuple(
        each.name
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING
    )


def build(kind: type[T], values: Mapping[str, object], where: str) -> T:
    """`kind(**values)`, after every name and type was checked; `where` is named in errors."""
    for name in values:
        check_name(name, names(kind), where)
    missing = [name for name in required(kind) if name not in values]
    if missing:
        raise ConfigurationError(f"{where} lacks {', '.join(missing)}; give each a value")
    hints = get_type_hints(kind)
    return kind(**{name: _fit(value, hints[name], name, where) for name, value in values.items()})


def check_name(name: str, known: tuple[str, ...], where: str) -> None:
    """An unknown name is an error that names the nearest one."""
    if name in known:
        return
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigurationError(f"{where} has no {name!r}{hint} (there are: {', '.join(known)})")


def split_pair(pair: str) -> tuple[str, str]:
    """Key and text of a `key=value` of the command line."""
    key, equals, text = pair.partition("=")
    if not equals:
        raise ConfigurationError(f"--set takes key=value, not {pair!r}")
    return key, text


def parse(kind: type, name: str, text: str, where: str) -> object:
    """What `text` on the command line means for a field of `kind`: 3, 1e-3, true, 2,3,4, a name.

    A text that fits the field in no other way stays a text, and `build` judges it.
    """
    check_name(name, names(kind), where)
    hint = get_type_hints(kind)[name]
    in_brackets = get_origin(hint) is tuple and not text.startswith("[")
    try:
        return _fitted(json.loads(f"[{text}]" if in_brackets else text), hint)
    except (ValueError, TypeError):
        return text


def _fit(value: object, hint: Any, name: str, where: str) -> object:
    try:
        return _fitted(value, hint)
    except TypeError:
        raise ConfigurationError(
            f"{where}: {name} is {value!r}, expected {_in_words(hint)}"
        ) from None


def _fitted(value: object, hint: Any) -> object:
    """`value` as `hint` wants it; TypeError where it is of another kind."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _fitted_to_any(value, get_args(hint))
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_fitted(each, get_args(hint)[0]) for each in value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value)
    allowed = get_args(hint) if origin is Literal else ()
    if any(value == one and type(value) is type(one) for one in allowed) or type(value) is hint:
        return value
    raise TypeError(value)


def _finite(value: float) -> float:
    """Not infinite, and not NaN, which every later check of a bound would let pass."""
    if abs(value) < 2**1023:
        return float(value)
    raise TypeError(value)


def _fitted_to_any(value: object, hints: tuple[Any, ...]) -> object:
    for hint in hints:
        try:
            return _fitted(value, hint)
        except TypeError:
            continue
    raise TypeError(value)


_WORDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text"}


def _in_words(hint: Any) -> str:
    arguments = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_in_words(one) for one in arguments)
    if get_origin(hint) is tuple:
        return f"a list, each {_in_words(arguments[0])}"
    if get_origin(hint) is Literal:
        choices = ", ".join(repr(one) for one in arguments)
        return f"one of {choices}" if len(arguments) > 1 else choices
    return _WORDS.get(hint, "nothing")
