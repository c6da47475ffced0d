"""For all tests: golden vectors where they are, a fixed hypothesis profile, and one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden vectors, where ARC_CL_SHARED names one."""
    root = os.environ.get("ARC_CL_SHARED")
    if not root:
        pytest.skip("ARC_CL_SHARED is not set: no golden vectors here")
    folder = Path(root) / "golden"
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist: no golden vectors here")
    return folder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products are tiny here: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
