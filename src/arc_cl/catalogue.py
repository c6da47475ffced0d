"""Names to modules. A file in a room is an entry of that room: its name is the file's name.

So a learner, a test-time method, a data source or a table is added by adding one file: there is
no list to edit and no decorator. Another distribution adds one with an entry point whose group is
the room (say `arc_cl.learners`) and whose value is the module. Modules that start with an
underscore are private and not listed. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Literal

from arc_cl.errors import ConfigurationError

Room = Literal["learners", "adapt", "data.sources", "experiments.tables"]
_KINDS: Mapping[Room, str] = {
    "learners": "learner",
    "adapt": "test-time method",
    "data.sources": "data source",
    "experiments.tables": "table",
}


def names(room: Room) -> tuple[str, ...]:
    """All that can be asked for in a room, sorted."""
    return tuple(sorted(_modules(room)))


def load(room: Room, name: str) -> ModuleType:
    """The module of that name; `-` and `_` are the same, as on the command line."""
    modules = _modules(room)
    key = name.replace("-", "_")
    if key not in modules:
        raise ConfigurationError(_unknown(room, name, sorted(modules)))
    return import_module(modules[key])


def _modules(room: Room) -> dict[str, str]:
    shipped = _shipped(f"arc_cl.{room}")
    added = {point.name: point.value for point in entry_points(group=f"arc_cl.{room}")}
    clashes = sorted(shipped.keys() & added.keys())
    if clashes:
        raise ConfigurationError(
            f"the installed entry point {clashes[0]!r} = {added[clashes[0]]!r} of the group "
            f"'arc_cl.{room}' has the name of a {_KINDS[room]} of arc-cl itself; rename it, or "
            f"uninstall its distribution"
        )
    return shipped | added


def _shipped(package: str) -> dict[str, str]:
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:
        spec = None
    places = (spec.submodule_search_locations if spec else None) or []
    return {
        module.name: f"{package}.{module.name}"
        for module in iter_modules(places)
        if not module.name.startswith("_")
    }


def _unknown(room: Room, name: str, known: list[str]) -> str:
    close = get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    listing = ", ".join(known) or "none"
    return f"no {_KINDS[room]} is called {name!r}{hint} (there are: {listing})"
