"""Where and with what a run was made."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

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
)


def provenance(device: torch.device, command: str) -> dict[str, str | int]:
    """What a record says of its origin: plain values, fit for JSON."""
    return {
        "command": command,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        **{package: found for package, found in versions().items() if found},
    }


def versions() -> dict[str, str | None]:
    """Installed versions; None where a package is missing."""
    return {package: _version(package) for package in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
