"""How the loops of this room are compiled: cached on disk where that is possible.

numba's cache looks at a function's own file alone, not at the functions it calls, and trusts time
stamps that wheels do not keep. So the name under which a function is cached carries a digest of
the whole room: after any change of it, nothing stale is found.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import njit

# Reassociation lets sums and products use vector registers; NaN and infinity keep their meaning.
_REASSOCIATE = {"reassoc", "contract", "nsz", "arcp"}
_SOURCES = sorted(Path(__file__).parent.glob("*.py"))
_DIGEST = sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:12]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled on first use; on a read-only installation it is compiled each time."""
    function.__qualname__ = f"{function.__name__}_{_DIGEST}"
    try:
        return _compiled(function, cache=True)
    except RuntimeError:  # numba found no folder that it may write its cache to
        return _compiled(function, cache=False)


def _compiled(function: Callable[..., Any], *, cache: bool) -> Callable[..., Any]:
    options = njit(cache=cache, fastmath=_REASSOCIATE, error_model="numpy", forceinline=True)
    return options(function)
