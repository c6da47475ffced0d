"""Where and with what a run was made."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import which

import torch

_PACKAGES = (
    "arc-cl",
    "torch",
    "numpy",
    "numba",
    "timm",
    "torchvision",
    "lightning-fabric",
    "safetensors",
    "rich",
    "cyclopts",
    "matplotlib",
    "pillow",
    "tensorboardX",
)


def provenance(device: torch.device, command: str) -> dict[str, str | int]:
    """What a record says of its origin: plain values, fit for JSON."""
    return {
        "command": command,
        "commit": _commit(),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}",
        **{package: found for package, found in versions().items() if found},
    }


def versions() -> dict[str, str | None]:
    """Installed versions; None where a package is missing."""
    return {package: _version(package) for package in _PACKAGES}


def _commit() -> str:
    """The checkout's commit; GIT_COMMIT says it where the code was copied without its history.

    Only if this file is tracked there: an installation may lie inside somebody else's checkout.
    """
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return "unknown"
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or "unknown"


def _git(*words: str) -> str | None:
    """What git says in this folder; None where it says no, or is not installed."""
    if which("git") is None:
        return None
    asked = subprocess.run(
        ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() if asked.returncode == 0 else None


def _processor() -> str:
    """The processor's name and how many cores there are."""
    names = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        names = next((x.partition(":")[2].strip() for x in lines if "model name" in x), names)
    return f"{os.cpu_count()} x {names}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
