"""LAME against a slow numpy version, and what makes it LAME."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from arc_cl import Decision, TaskPartition
from arc_cl.adapt import lame
from arc_cl.errors import ConfigurationError
from lone_head import Head, draw

Array = NDArray[np.float64]
TASKS = TaskPartition.of_sizes([3, 2])


def answer(how: lame.Settings, batch: Tensor) -> Decision:
    method = lame.create(how)
    method.start(Head(draw(5, 4), draw(5, seed=1)), TASKS)
    return method.predict(batch)


def plain(batch: Tensor) -> Tensor:
    return (batch @ draw(5, 4).T + draw(5, seed=1)).softmax(dim=1)


def affinity(x: Array, how: lame.Settings) -> Array:
    w = np.zeros((len(x), len(x)))
    for i, one in enumerate(x):
        angles = [
            np.arccos(np.clip(one @ other / np.linalg.norm(one) / np.linalg.norm(other), -1, 1))
            for other in x
        ]
        others = [j for j in np.argsort(angles) if j != i]
        w[i, others[: how.neighbours]] = 1
    return np.asarray((w + w.T) / 2) if how.symmetric else w


def reference(x: Array, p: Array, how: lame.Settings, rounds: int) -> Array:
    w, y = affinity(x, how), p
    for _ in range(rounds):
        y = p * np.exp(how.strength * w @ y)
        y = y / y.sum(axis=1, keepdims=True)
    return y


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("neighbours", [1, 3, 50])
def test_answers_are_those_of_the_reference(rounds: int, symmetric: bool, neighbours: int) -> None:
    how = lame.Settings(
        neighbours=neighbours, symmetric=symmetric, strength=0.7, iterations=rounds, tolerance=0
    )
    batch = draw(12, 4, seed=2)
    found = answer(how, batch).logits.exp()
    expected = reference(batch.numpy(), plain(batch).numpy(), how, rounds)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)


def test_it_stops_at_rest() -> None:
    batch = draw(12, 4, seed=2)
    how = lame.Settings(neighbours=3, strength=0.5)
    rest = answer(how, batch).logits.exp().numpy()
    w, p = affinity(batch.numpy(), how), plain(batch).numpy()
    once_more = p * np.exp(how.strength * w @ rest)
    once_more /= once_more.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(rest, once_more, rtol=0, atol=1e-4)


def test_neighbours_overrule_a_doubtful_row() -> None:
    weight = torch.eye(5, 4, dtype=torch.float64)
    sure = torch.tensor([[6.0, 5.0, 0, 0]] * 4, dtype=torch.float64)
    doubtful = torch.tensor([[5.0, 5.1, 0, 0]], dtype=torch.float64)
    far = torch.tensor([[0, 0, 5.0, 5.1]] * 4, dtype=torch.float64)
    method = lame.create(lame.Settings(neighbours=4))
    method.start(Head(weight), TASKS)
    assert method.predict(doubtful).classes.tolist() == [1]
    assert method.predict(torch.cat([sure, doubtful, far])).classes.tolist() == [0] * 5 + [3] * 4


@pytest.mark.parametrize("strength", [0.0, 3.0])
def test_a_batch_of_one_and_a_strength_of_zero_change_nothing(strength: float) -> None:
    batch = draw(12, 4, seed=2) if strength == 0 else draw(1, 4, seed=2)
    found = answer(lame.Settings(strength=strength), batch)
    torch.testing.assert_close(found.logits.exp(), plain(batch))


def test_a_batch_is_answered_by_itself_and_in_any_order() -> None:
    method, batch = lame.create(lame.Settings()), draw(12, 4, seed=2)
    method.start(Head(draw(5, 4), draw(5, seed=1)), TASKS)
    first = method.predict(batch).logits
    method.predict(draw(30, 4, seed=9))
    assert torch.equal(method.predict(batch).logits, first)
    torch.testing.assert_close(method.predict(batch.flip(0)).logits.flip(0), first)


def test_a_row_that_is_not_finite_is_nobodys_neighbour() -> None:
    batch = draw(9, 4, seed=2)
    spoilt = torch.cat([batch, torch.full((1, 4), torch.nan, dtype=torch.float64)])
    found = answer(lame.Settings(neighbours=20), spoilt)
    torch.testing.assert_close(found.logits[:9], answer(lame.Settings(neighbours=20), batch).logits)
    torch.testing.assert_close(found.logits[9:].exp(), plain(torch.zeros_like(batch[:1])))
    assert found.confidence.isnan().tolist() == [False] * 9 + [True]


def test_a_masked_class_stays_masked() -> None:
    bias = draw(5, seed=1)
    bias[4] = -torch.inf
    method = lame.create(lame.Settings())
    method.start(Head(draw(5, 4), bias), TASKS)
    found = method.predict(draw(12, 4, seed=2))
    assert bool(found.logits[:, :4].isfinite().all())
    assert 4 not in found.classes.tolist()


@pytest.mark.parametrize(
    ("name", "value"), [("neighbours", 0), ("iterations", 0), ("strength", -1.0)]
)
def test_wrong_settings_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is {value}"):
        lame.Settings(**{name: value})  # type: ignore[arg-type]
