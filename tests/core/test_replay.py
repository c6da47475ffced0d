"""A replayed stream gives what the same stream gives batch by batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from arc_cl import ARC, ARCSettings, Decision, TaskPartition

FIELDS = ("classes", "logits", "confidence", "ratio", "retained", "corrected", "tasks")


def problem(
    classes: int = 30,
    width: int = 24,
    rows: int = 300,
    *,
    seed: int = 0,
    unseen: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = 0.4 * torch.randn(classes + unseen, width, generator=generator, dtype=torch.float64)
    bias = 0.3 * torch.randn(classes + unseen, generator=generator, dtype=torch.float64)
    features = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return (weight.to(dtype), bias.to(dtype)), features.to(dtype)


def batch_by_batch(arc: ARC, features: Tensor, batch_size: int) -> dict[str, Tensor]:
    return joined([arc(batch) for batch in features.split(batch_size)])


def joined(parts: list[Decision]) -> dict[str, Tensor]:
    return {name: torch.cat([getattr(part, name) for part in parts]) for name in FIELDS}


def assert_same(found: Decision | dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    values = found if isinstance(found, dict) else joined([found])
    for name, wanted in expected.items():
        if wanted.is_floating_point():
            assert torch.allclose(values[name], wanted, rtol=1e-9, atol=1e-9, equal_nan=True), name
        else:
            assert torch.equal(values[name], wanted), name


def assert_same_state(found: ARC, expected: ARC) -> None:
    """An optimiser's memory that is not there yet is zero."""
    wanted, values = expected.state_dict(), found.state_dict()
    for name in wanted.keys() | values.keys():
        like = wanted.get(name, values.get(name))
        assert like is not None
        one, two = (state.get(name, torch.zeros_like(like)) for state in (values, wanted))
        assert torch.allclose(one, two, rtol=1e-9, atol=1e-12), name


VARIANTS: list[dict[str, Any]] = [
    {},
    {"beta": 0.0},
    {"beta": 0.0, "past_only": False, "recompute": False, "candidates": "cumulative"},
    {"beta": 0.2, "weight_decay": 0.05},
    {"beta": 0.1, "step": "relative"},
    {"beta": 0.1, "step": "relative", "optimizer": "adam"},
    {"beta": 0.1, "momentum": 0.0},
    {"beta": 0.1, "momentum": 0.0, "weight_decay": 0.01},
    {"beta": 0.1, "max_drift": 0.1},
    {"beta": 0.1, "max_drift": 0.1, "weight_decay": 0.01},
    {"beta": 0.1, "max_drift": 0.02, "optimizer": "adam", "lr": 1e-3},
    {"beta": 0.2, "label_smoothing": 0.1, "entropy": False},
    {"beta": 0.2, "cross_entropy": False, "ratio": "confidence", "gamma": 0.5},
    {"beta": 0.1, "optimizer": "adam", "lr": 1e-3},
    {"beta": 0.1, "optimizer": "adam", "lr": 1e-3, "weight_decay": 0.05, "recompute": False},
    {"retention": False, "correction_rule": "mask_newest"},
    {"correction": False, "beta": 0.1},
]


@pytest.mark.filterwarnings("ignore::arc_cl.errors.ARCWarning")
@pytest.mark.parametrize("batch_size", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_setting(changes: dict[str, Any], batch_size: int) -> None:
    settings = ARCSettings.paper(**{"lr": 0.02, **changes})
    head, features = problem(unseen=3)
    stepped, replayed = (ARC(head, tasks=[10] * 3, settings=settings) for _ in range(2))
    expected = batch_by_batch(stepped, features, batch_size)
    assert_same(replayed.replay(features, batch_size=batch_size), expected)
    assert_same_state(replayed, stepped)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
@pytest.mark.parametrize("beta", [0.0, 0.95])
def test_many_classes_and_long_streams(momentum: float, beta: float) -> None:
    """Where the velocity is kept as the latest rows, whether or not they fade in time."""
    head, features = problem(classes=210, rows=700)
    settings = ARCSettings.paper(beta=beta, lr=0.02, momentum=momentum)
    stepped, replayed = (ARC(head, tasks=[70] * 3, settings=settings) for _ in range(2))
    assert_same(replayed.replay(features), batch_by_batch(stepped, features, 1))
    assert_same_state(replayed, stepped)


@given(
    st.integers(1, 12),
    st.integers(0, 200),
    st.integers(0, 10_000),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_any_stream_in_any_pieces(
    batch_size: int, rows: int, seed: int, sizes: list[int], released: bool, with_bias: bool
) -> None:
    """Replays and calls may be mixed; a head may lack a bias; streams may be empty."""
    (weight, bias), features = problem(sum(sizes), 5, rows, seed=seed)
    preset = ARCSettings.released if released else ARCSettings.paper
    settings = preset(beta=0.3, lr=0.05, gamma=1.5)
    head = weight, bias if with_bias else None
    stepped, replayed = (ARC(head, tasks=sizes, settings=settings) for _ in range(2))
    expected = batch_by_batch(stepped, features, batch_size)
    cut = rows // 2 // batch_size * batch_size
    parts = [
        replayed.replay(features[:cut], batch_size=batch_size),
        *(replayed(batch) for batch in features[cut : cut + batch_size].split(batch_size)),
        replayed.replay(features[cut + batch_size :], batch_size=batch_size),
    ]
    assert_same(joined(parts), expected)
    assert_same_state(replayed, stepped)


def test_interleaved_tasks() -> None:
    tasks = TaskPartition.of_classes([k % 3 for k in range(30)])
    head, features = problem()
    settings = ARCSettings.paper(beta=0.3, lr=0.02)
    stepped, replayed = (ARC(head, tasks=tasks, settings=settings) for _ in range(2))
    assert_same(replayed.replay(features), batch_by_batch(stepped, features, 1))


@pytest.mark.filterwarnings("ignore::arc_cl.errors.ARCWarning")
@pytest.mark.parametrize("max_drift", [None, 0.05])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_rows_that_are_not_finite_or_huge(optimizer: Any, max_drift: float | None) -> None:
    head, features = problem()
    features[17, 3], features[80], features[200, 0] = torch.nan, torch.inf, 1e12
    settings = ARCSettings.paper(beta=0.1, lr=1e-2, optimizer=optimizer, max_drift=max_drift)
    stepped, replayed = (ARC(head, tasks=[10] * 3, settings=settings) for _ in range(2))
    assert_same(replayed.replay(features), batch_by_batch(stepped, features, 1))
    assert replayed.nonfinite_rows == stepped.nonfinite_rows == 2
    features[201, 0] = 1e200
    stepped.reset()
    replayed.reset()
    assert_same(replayed.replay(features), batch_by_batch(stepped, features, 1))


def test_masked_classes() -> None:
    (weight, bias), features = problem()
    bias[[3, 14, 29]] = -torch.inf
    settings = ARCSettings.paper(beta=0.1, lr=0.02, label_smoothing=0.1)
    stepped, replayed = (ARC((weight, bias), tasks=[10] * 3, settings=settings) for _ in range(2))
    assert_same(replayed.replay(features), batch_by_batch(stepped, features, 1))
    assert torch.equal(replayed.weight[[3, 14, 29]], weight[[3, 14, 29]])


@pytest.mark.parametrize("scale", [1.0, 12.0])
@pytest.mark.parametrize("batch_size", [1, 16])
def test_float32_differs_only_where_rounding_decides(batch_size: int, scale: float) -> None:
    """Ties, β and γ come closer than 1e-4 on few rows, and only those may differ."""
    rows, classes, width = (10_000 if batch_size == 1 else 100_000), 40, 32
    generator = torch.Generator().manual_seed(4)
    head = torch.randn(classes, width, generator=generator) / scale, None
    features = scale * torch.randn(rows, width, generator=generator)
    settings = ARCSettings.paper(beta=0.6, lr=1e-4 / scale**2, gamma=1.1)
    stepped, replayed = (ARC(head, tasks=[10] * 4, settings=settings) for _ in range(2))
    found = replayed.replay(features, batch_size=batch_size)
    expected = batch_by_batch(stepped, features, batch_size)
    best = expected["logits"].topk(2, dim=1).values
    close = (best[:, 0] - best[:, 1] < 1e-4) | ((expected["confidence"] - 0.6).abs() < 1e-4)
    close |= (expected["ratio"] - 1.1).abs() < 1e-4
    for name in ("classes", "retained", "corrected"):
        differing = getattr(found, name) != expected[name]
        assert not (differing & ~close).any(), name
        assert differing.float().mean() <= 1e-3
    assert (replayed.weight - stepped.weight).norm() <= 1e-5 * stepped.weight.norm()


GPU_KERNEL_ON_CPU = """
import torch
from arc_cl import ARC, ARCSettings
from arc_cl.core import _sgd_gpu
from arc_cl.core._stream import Stream

changes = {changes}
for batch_size in (1, 3):
    generator = torch.Generator().manual_seed(0)
    weight = 0.4 * torch.randn(32, 24, generator=generator)
    bias = {bias}
    features = torch.randn(100, 24, generator=generator)
    settings = ARCSettings.paper(**{{"lr": 0.01, "beta": 0.1, **changes}})
    one, two = (ARC((weight, bias), tasks=[10] * 3, settings=settings) for _ in range(2))
    expected = one.replay(features, batch_size=batch_size)
    norm = features.norm(dim=1)
    stream = Stream(features, norm, norm > 0, batch_size)
    found = _sgd_gpu.replay_sgd(two._state, stream, two.partition, settings)
    assert one.steps == two.steps > 0
    assert torch.equal(found.retained, expected.retained)
    for name in ("logits", "confidence", "ratio"):
        pair = getattr(found, name), getattr(expected, name)
        assert torch.allclose(*pair, atol=2e-5, rtol=1e-5, equal_nan=True), name
    for name, value in one.state_dict().items():
        assert torch.allclose(two.state_dict()[name], value, atol=1e-5, rtol=1e-5), name
"""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"step": "relative", "label_smoothing": 0.1, "recompute": False},
        {"weight_decay": 0.05, "past_only": False, "entropy": False},
    ],
    ids=str,
)
def test_the_gpu_kernel_under_its_interpreter(changes: dict[str, Any]) -> None:
    """The same kernel that runs on a GPU, executed step by step on the CPU."""
    pytest.importorskip("triton")
    bias = "None" if "weight_decay" in changes else "0.3 * torch.randn(32, generator=generator)"
    code = GPU_KERNEL_ON_CPU.format(changes=changes, bias=bias)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("batch_size", [1, 16])
def test_a_gpu_gives_what_the_cpu_gives(batch_size: int) -> None:
    head, features = problem(dtype=torch.float32, rows=1000)
    settings = ARCSettings.paper(beta=0.1, lr=0.003)
    here = ARC(head, tasks=[10] * 3, settings=settings)
    there = ARC((head[0].cuda(), head[1].cuda()), tasks=[10] * 3, settings=settings)
    expected = here.replay(features, batch_size=batch_size)
    found = there.replay(features.cuda(), batch_size=batch_size)
    assert torch.equal(found.retained.cpu(), expected.retained)
    assert torch.allclose(found.logits.cpu(), expected.logits, atol=1e-4)
    assert torch.allclose(there.weight.cpu(), here.weight, rtol=1e-5, atol=1e-6)
