"""ARC: a class-incremental classifier that repairs itself at test time.

The public names are loaded on first use, so that `import arc_cl` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arc_cl.core.decision import Decision
    from arc_cl.core.partition import TaskPartition
    from arc_cl.core.plugin import ARC
    from arc_cl.core.settings import ARCSettings

__version__ = "0.1.0"
__all__ = ["ARC", "ARCSettings", "Decision", "TaskPartition"]

_HOME = {
    "ARC": "arc_cl.core.plugin",
    "ARCSettings": "arc_cl.core.settings",
    "Decision": "arc_cl.core.decision",
    "TaskPartition": "arc_cl.core.partition",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'arc_cl' has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
