"""T3A against a slow numpy version, and what makes it T3A."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from arc_cl import Decision, TaskPartition
from arc_cl.adapt import t3a
from arc_cl.errors import ConfigurationError
from lone_head import Head, draw

Array = NDArray[np.float64]
TASKS = TaskPartition.of_sizes([3, 2])


def unit(x: Array) -> Array:
    return np.asarray(x / np.sqrt((x**2).sum(axis=-1, keepdims=True)))


def scores(w: Array, b: Array, x: Array) -> tuple[Array, Array]:
    """Pseudo-labels and entropies."""
    z = x @ w.T + b
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return p.argmax(axis=1), -(p * np.log(p)).sum(axis=1)


def reference(w: Array, b: Array, batches: list[Array], kept: int) -> list[Array]:
    """Every batch: put all supports in one heap, sort it anew, and throw the rest away."""
    supports, labels = unit(w), np.arange(len(w))
    entropies = scores(w, b, w)[1]
    answers = []
    for x in batches:
        new_labels, new_entropies = scores(w, b, x)
        supports = np.concatenate([supports, unit(x)])
        labels = np.concatenate([labels, new_labels])
        entropies = np.concatenate([entropies, new_entropies])
        chosen: list[int] = []
        for k in range(len(w)):
            own = np.flatnonzero(labels == k)
            own = own[np.argsort(entropies[own], kind="stable")]
            chosen.extend(own[:kept] if kept else own)
        keep = np.sort(np.array(chosen))
        supports, labels, entropies = supports[keep], labels[keep], entropies[keep]
        centres = np.stack([unit(supports[labels == k].sum(axis=0)) for k in range(len(w))])
        answers.append(x @ centres.T)
    return answers


def run(head: Head, batches: list[Tensor], supports: int) -> list[Decision]:
    method = t3a.create(t3a.Settings(supports=supports))
    method.start(head, TASKS)
    found = [method.predict(batch) for batch in batches]
    method.finish()
    return found


@pytest.mark.parametrize("supports", [0, 1, 3, 100])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_logits_are_those_of_the_reference(supports: int, batch_size: int) -> None:
    weight, bias = draw(5, 4), draw(5, seed=1)
    batches = list((3 * draw(60, 4, seed=2)).split(batch_size))
    expected = reference(weight.numpy(), bias.numpy(), [b.numpy() for b in batches], supports)
    for found, logits in zip(run(Head(weight, bias), batches, supports), expected, strict=True):
        np.testing.assert_allclose(found.logits.numpy(), logits, rtol=0, atol=1e-12)
        assert found.classes.tolist() == logits.argmax(axis=1).tolist()


def test_an_uncertain_row_never_replaces_a_sure_one() -> None:
    weight = 5 * torch.eye(5, 4, dtype=torch.float64)
    sure, unsure = torch.eye(1, 4, dtype=torch.float64) * 9, torch.full((1, 4), 0.01).double()
    unsure[0, 0] += 1e-3  # class 0, barely
    batches = [sure, unsure]
    before, after = run(Head(weight), batches, supports=1)
    direction = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(before.logits[0, 0], sure[0] @ direction)
    torch.testing.assert_close(after.logits[0, 0], unsure[0] @ direction)


def test_prototypes_follow_a_stream_that_moved() -> None:
    weight = torch.eye(5, dtype=torch.float64) * 4
    turn = torch.roll(torch.eye(5, dtype=torch.float64), 1, dims=1)
    stream = weight.repeat(8, 1) + 2.5 * turn.repeat(8, 1) + 0.1 * draw(40, 5, seed=3)
    late = run(Head(weight), list(stream.split(5)), supports=0)[-1]
    centre = (weight + 2.5 * turn)[0] / (weight + 2.5 * turn)[0].norm()
    assert late.classes.tolist() == [0, 1, 2, 3, 4]
    assert late.logits[0, 0] > 0.99 * (stream[-5] @ centre)


def test_the_head_is_only_read() -> None:
    head = Head(draw(5, 4))
    before = head.linear.weight.detach().clone()
    run(head, list(draw(20, 4, seed=2).split(5)), supports=2)
    assert torch.equal(head.linear.weight, before)


def test_a_row_that_is_not_finite_supports_nothing() -> None:
    spoilt = draw(9, 4, seed=2)
    spoilt[3, 1] = torch.nan
    rest = spoilt[[0, 1, 2, 4, 5, 6, 7, 8]]
    later = draw(6, 4, seed=4)
    first, second = run(Head(draw(5, 4)), [spoilt, later], 2)
    _, same = run(Head(draw(5, 4)), [rest, later], 2)
    torch.testing.assert_close(second.logits, same.logits)
    assert first.confidence.isnan().nonzero().tolist() == [[3]]
    assert bool(first.logits.isfinite().all())


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigurationError, match="supports is -1"):
        t3a.Settings(supports=-1)
