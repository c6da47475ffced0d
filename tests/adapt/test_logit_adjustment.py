"""Logit adjustment: predicted frequencies come out even, and what follows from that."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from arc_cl import Decision, TaskPartition
from arc_cl.adapt import logit_adjustment
from arc_cl.adapt.logit_adjustment import Settings
from arc_cl.errors import ConfigurationError
from lone_head import Head, draw

Array = NDArray[np.float64]
TASKS = TaskPartition.of_classes([0, 1, 0, 2, 1, 2])
BIAS = torch.tensor([0.0, 0.5, -0.5, 2.0, 0.0, 1.5], dtype=torch.float64)
"""The newest task is over-predicted."""


def run(how: Settings, batches: list[Tensor], tasks: TaskPartition = TASKS) -> list[Decision]:
    method = logit_adjustment.create(how)
    method.start(Head(draw(6, 4), BIAS), tasks)
    found = [method.predict(batch) for batch in batches]
    method.finish()
    return found


def plain(batch: Tensor) -> Tensor:
    return batch @ draw(6, 4).T + BIAS


def softmax(z: Array) -> Array:
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return np.asarray(p / p.sum(axis=1, keepdims=True))


def reference(batches: list[Array], how: Settings) -> list[Array]:
    groups = np.arange(6) if how.over == "classes" else TASKS.array
    count = groups.max() + 1
    silent = np.full((int(how.prior) * count, count), 1 / count)  # the prior as rows
    scale, window, answers = np.ones(count), np.zeros((0, count)), []
    for logits in batches:
        p = softmax(logits)
        masses = np.stack([p[:, groups == g].sum(axis=1) for g in range(count)], axis=1)
        window = np.concatenate([window, masses])[-how.memory :]
        for _ in range(how.iterations):
            q = np.concatenate([window, silent]) * scale
            q /= q.sum(axis=1, keepdims=True)
            scale = scale / count / q.mean(axis=0)
        answers.append(logits + how.strength * np.log(scale)[groups])
    return answers


@pytest.mark.parametrize(
    "how",
    [
        Settings(prior=2),
        Settings(over="classes", prior=3, memory=11, iterations=2),
        Settings(over="classes", prior=1, strength=0.5, memory=3),
    ],
    ids=["tasks", "classes, a short window", "by half, a window below a batch"],
)
@pytest.mark.parametrize("batch_size", [1, 7])
def test_logits_are_those_of_the_reference(how: Settings, batch_size: int) -> None:
    batches = list(draw(40, 4, seed=2).split(batch_size))
    expected = reference([plain(batch).numpy() for batch in batches], how)
    for found, logits in zip(run(how, batches), expected, strict=True):
        np.testing.assert_allclose(found.logits.numpy(), logits, rtol=0, atol=1e-10)
        assert found.classes.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("over", ["tasks", "classes"])
def test_frequencies_come_out_even(over: str) -> None:
    how = Settings(over=over, prior=1e-3, iterations=500)  # type: ignore[arg-type]
    batch = draw(300, 4, seed=2)
    (found,) = run(how, [batch])
    for logits, even in ((plain(batch), False), (found.logits, True)):
        mean = logits.softmax(dim=1).mean(dim=0)
        shares = (
            mean
            if over == "classes"
            else mean.new_zeros(3).index_add(0, torch.from_numpy(TASKS.array.copy()), mean)
        )
        assert torch.allclose(shares, torch.full_like(shares, 1 / len(shares)), atol=1e-3) is even


def test_within_a_task_nothing_changes() -> None:
    batch = draw(50, 4, seed=2)
    (found,) = run(Settings(), [batch])
    moved = found.logits - plain(batch)
    for task in range(3):
        shift = moved[:, list(TASKS.classes(task))]
        torch.testing.assert_close(shift, shift[:1, :1].expand_as(shift))


def test_it_mends_a_biased_head_on_an_even_stream_and_harms_on_another() -> None:
    classes, generator = torch.arange(6).repeat(100), torch.Generator().manual_seed(5)
    centres = 2.5 * torch.eye(6, dtype=torch.float64)
    noise = torch.randn(600, 6, generator=generator, dtype=torch.float64)
    order = torch.randperm(600, generator=generator)
    stream, truth = (centres[classes] + noise)[order], classes[order]
    bias = torch.tensor([0, 0, 0, 0, 3.0, 3.0], dtype=torch.float64)
    tasks = TaskPartition.of_sizes([2, 2, 2])

    def accuracies(rows: Tensor) -> tuple[float, float]:
        method = logit_adjustment.create(Settings())
        method.start(Head(2 * torch.eye(6, dtype=torch.float64), bias), tasks)
        found = torch.cat([method.predict(b).classes for b in stream[rows].split(20)])
        before = (2 * stream[rows] + bias).argmax(dim=1)
        hits = [(each == truth[rows]).double().mean().item() for each in (before, found)]
        return hits[0], hits[1]

    before, after = accuracies(torch.arange(600))
    assert after > before + 0.03
    before, after = accuracies((truth >= 4).nonzero()[:, 0])  # the newest task only
    assert after < before - 0.03


def test_a_batch_knows_nothing_of_later_ones() -> None:
    batches = list(draw(40, 4, seed=2).split(8))
    whole, part = run(Settings(), batches), run(Settings(), batches[:3])
    for one, other in zip(whole, part, strict=False):
        assert torch.equal(one.logits, other.logits)


def test_one_task_stays_as_it_is() -> None:
    batch = draw(40, 4, seed=2)
    (found,) = run(Settings(), [batch], TaskPartition.of_sizes([6]))
    torch.testing.assert_close(found.logits, plain(batch))


def test_a_row_that_is_not_finite_is_not_remembered() -> None:
    batch, later = draw(9, 4, seed=2), draw(5, 4, seed=3)
    spoilt = torch.cat([batch, torch.full((1, 4), -torch.inf, dtype=torch.float64)])
    first, found = run(Settings(), [spoilt, later])
    _, same = run(Settings(), [batch, later])
    torch.testing.assert_close(found.logits, same.logits)
    assert first.confidence.isnan().tolist() == [False] * 9 + [True]


@pytest.mark.parametrize("over", ["tasks", "classes"])
def test_masked_classes_and_huge_logits_break_nothing(over: str) -> None:
    method = logit_adjustment.create(Settings(over=over))  # type: ignore[arg-type]
    bias = BIAS.clone()
    bias[5] = -torch.inf
    method.start(Head(1e4 * draw(6, 4), bias), TASKS)
    for batch in draw(40, 4, seed=2).split(8):
        found = method.predict(batch)
        assert bool(found.logits[:, :5].isfinite().all())
        assert 5 not in found.classes.tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [("over", "images"), ("memory", 0), ("prior", 0.0), ("strength", -1.0), ("iterations", 0)],
)
def test_wrong_settings_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Settings(**{name: value})  # type: ignore[arg-type]
