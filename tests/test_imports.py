"""The rooms are held apart: who may import whom, and what, is written here and nowhere else."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import arc_cl

ROOT = Path(arc_cl.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


@dataclass(frozen=True)
class Rule:
    """Prefixes of own modules that a room may import, and third-party packages."""

    own: tuple[str, ...] = ()
    third: tuple[str, ...] = ()


RULES = {
    "errors": Rule(),
    "catalogue": Rule(),
    "contracts": Rule(("core.decision", "core.partition")),  # in annotations, see below
    "core": Rule(("core",), ("torch", "numpy", "numba", "triton")),
    "adapt": Rule(("adapt", "core", "contracts"), ("torch",)),
    "backbones": Rule(("backbones", "contracts"), ("torch", "timm", "safetensors")),
    "learners": Rule(("learners", "backbones", "core.partition", "contracts"), ("torch",)),
    "data": Rule(
        ("data", "contracts"), ("torch", "torchvision", "PIL", "numpy", "matplotlib", "safetensors")
    ),
    "protocol": Rule(("protocol", "core.partition", "contracts"), ("numpy",)),
    "experiments": Rule(("experiments", "core.settings", "contracts")),
    "engine": Rule(
        (
            "engine",
            "core",
            "adapt",
            "backbones",
            "learners",
            "data",
            "protocol",
            "experiments.spec",
            "experiments.fields",
            "experiments.toml",
            "contracts",
            "catalogue",
        ),
        ("torch", "numpy", "lightning_fabric", "safetensors", "rich", "tensorboardX"),
    ),
    "report": Rule(
        ("report", "experiments", "protocol.metrics", "protocol.record", "contracts"),
        ("numpy", "PIL"),
    ),
    "cli": Rule(("engine", "report", "experiments", "catalogue"), ("cyclopts", "rich", "torch")),
    "__init__": Rule(("core",)),
}


@dataclass(frozen=True)
class Import:
    module: str
    for_types: bool


def imports(path: Path) -> Iterator[Import]:
    """Every import of a file; those under `if TYPE_CHECKING` are marked."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write it in full"
            names = [_imported(str(node.module), alias.name) for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(name, id(node) in for_types)


def _imported(module: str, name: str) -> str:
    """`from arc_cl import catalogue` imports a module, `from arc_cl import ARC` does not."""
    place = ROOT.joinpath(*module.split(".")[1:], name)
    is_own = module.split(".")[0] == "arc_cl"
    return f"{module}.{name}" if is_own and _is_module(place) else module


def _is_module(place: Path) -> bool:
    return place.with_suffix(".py").is_file() or place.is_dir()


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def test_every_room_has_a_rule() -> None:
    assert {room_of(path) for path in FILES} <= set(RULES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_room_may(path: Path) -> None:
    rule = RULES[room_of(path)]
    for found in imports(path):
        top, _, inner = found.module.partition(".")
        if top == "arc_cl":
            allowed = inner in ("", "errors") or any(within(inner, each) for each in rule.own)
        else:
            stdlib = top in sys.stdlib_module_names
            allowed = stdlib or top in rule.third or found.for_types
        assert allowed, f"{path.relative_to(ROOT)} may not import {found.module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_modules_stay_in_their_room(path: Path) -> None:
    for found in imports(path):
        parts = found.module.split(".")
        if parts[0] == "arc_cl" and any(part.startswith("_") for part in parts[1:]):
            assert parts[1] == room_of(path), f"{found.module} is private to {parts[1]}"


def test_contracts_import_nothing_of_the_package_at_run_time() -> None:
    own = [f for f in imports(ROOT / "contracts.py") if within(f.module, "arc_cl")]
    assert all(found.for_types for found in own)


def test_package_files_are_empty() -> None:
    filled = [path for path in FILES if path.name == "__init__.py" and path.stat().st_size]
    assert filled == [ROOT / "__init__.py"]


HEAVY = ("torch", "numba", "timm", "matplotlib", "lightning_fabric", "torchvision")


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("arc_cl", (*HEAVY, "numpy")),
        ("arc_cl.cli", (*HEAVY, "numpy")),
        ("arc_cl.catalogue, arc_cl.contracts", (*HEAVY, "numpy")),
        ("arc_cl.experiments.demo", HEAVY),
        ("arc_cl.protocol.metrics, arc_cl.protocol.record", HEAVY),
        ("arc_cl.report.tables, arc_cl.report.html", HEAVY),
    ],
)
def test_what_is_light_stays_light(modules: str, absent: tuple[str, ...]) -> None:
    script = f"import sys, {modules}; print(*sorted(set({absent!r}) & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == []


def test_public_names_are_those_promised() -> None:
    assert set(arc_cl.__all__) <= set(dir(arc_cl))
    for name in arc_cl.__all__:
        assert getattr(arc_cl, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = arc_cl.nothing_such
