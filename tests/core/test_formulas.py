"""The mathematics by its properties: detection, losses and gradient, task scores, correction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from arc_cl import ARC, ARCSettings, TaskPartition
from arc_cl.core.correction import choose_task, task_scores
from arc_cl.core.detection import detect
from arc_cl.core.retention import retention_gradient, retention_loss

PRESETS = [ARCSettings.paper, ARCSettings.released]
LOSSES = [(True, True), (True, False), (False, True), (False, False)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, TaskPartition]:
    """Random float64 logits and any partition of their classes, interleaved or not."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    classes = [task for task, size in enumerate(sizes) for _ in range(size)]
    if draw(st.booleans()):
        classes = draw(st.permutations(classes))
    scale = draw(st.sampled_from([0.1, 1.0, 10.0, 1e4]))
    seed = draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(6, len(classes), generator=generator, dtype=torch.float64)
    return logits, TaskPartition.of_classes(classes)


@given(problems(), st.floats(1.0, 3.0))
def test_scores_lie_between_their_bounds(
    problem: tuple[Tensor, TaskPartition], temperature: float
) -> None:
    """1 / (number of classes up to the task) bounds only the best of its classes; S ≤ 1 always."""
    logits, partition = problem
    scores = task_scores(logits, partition, temperature)
    assert scores.shape == (len(logits), partition.num_tasks)
    assert ((scores >= 0) & (scores <= 1 + 1e-12)).all()
    oldest = 1 / partition.sizes[0]
    assert (scores[:, 0] >= oldest - 1e-12).all()
    confidence = detect(logits, partition).confidence
    newest = detect(logits, partition).newest
    assert torch.allclose(scores[newest, -1], confidence[newest])


@given(problems(), st.floats(-500, 500))
def test_shifting_the_logits_changes_nothing(
    problem: tuple[Tensor, TaskPartition], shift: float
) -> None:
    logits, partition = problem
    moved, settings = logits + shift, ARCSettings.paper()
    labels = logits.argmax(1)
    assert torch.allclose(
        task_scores(logits, partition, 1.3), task_scores(moved, partition, 1.3), atol=1e-9
    )
    before, after = detect(logits, partition), detect(moved, partition)
    assert torch.allclose(before.confidence, after.confidence, atol=1e-9)
    assert torch.allclose(before.ratio, after.ratio, rtol=1e-7, equal_nan=True)
    assert torch.allclose(
        retention_gradient(logits, labels, settings),
        retention_gradient(moved, labels, settings),
        atol=1e-7,
    )


@given(problems(), st.integers(0, 1000))
def test_the_order_of_classes_inside_a_task_does_not_matter(
    problem: tuple[Tensor, TaskPartition], seed: int
) -> None:
    logits, partition = problem
    order = np.arange(partition.num_classes)
    rng = np.random.default_rng(seed)
    for task in range(partition.num_tasks):
        members = np.array(partition.classes(task))
        order[members] = rng.permutation(members)
    shuffled = logits[:, torch.from_numpy(order)]
    assert torch.allclose(
        task_scores(logits, partition, 1.2), task_scores(shuffled, partition, 1.2)
    )
    assert torch.allclose(
        detect(logits, partition).ratio, detect(shuffled, partition).ratio, equal_nan=True
    )


@given(problems())
def test_relabelling_classes_relabels_the_answers(problem: tuple[Tensor, TaskPartition]) -> None:
    """Interleaved tasks get the answers of the same tasks laid side by side."""
    logits, partition = problem
    order = np.argsort(partition.array, kind="stable")
    sorted_partition = TaskPartition.of_sizes(partition.sizes)
    for preset in PRESETS:
        settings = preset(beta=0.3, gamma=2.0, lr=0.01)
        direct = identity_arc(partition, settings)(logits)
        sorted_logits = logits[:, torch.from_numpy(order)]
        other = identity_arc(sorted_partition, settings)(sorted_logits)
        assert (torch.from_numpy(order)[other.classes] == direct.classes).all()
        assert (other.corrected == direct.corrected).all()
        assert (other.retained == direct.retained).all()


def identity_arc(partition: TaskPartition, settings: ARCSettings) -> ARC:
    head = torch.eye(partition.num_classes, dtype=torch.float64), None
    return ARC(head, tasks=partition, settings=settings)


@given(problems())
def test_with_temperature_one_a_cumulative_winner_lies_in_the_chosen_task(
    problem: tuple[Tensor, TaskPartition],
) -> None:
    logits, partition = problem
    settings = ARCSettings.released(temperature=1.0)
    chosen = choose_task(logits, partition, settings)
    task_K = torch.tensor(partition.task_of_class)
    for row, task in zip(logits, chosen, strict=True):
        allowed = row.masked_fill(task_K > task, -torch.inf)
        scores = task_scores(row[None], partition, 1.0)[0]
        if (scores == scores.max()).sum() == 1:
            assert task_K[allowed.argmax()] == task


@pytest.mark.parametrize("preset", PRESETS)
def test_a_single_task_is_never_corrected(preset: Any) -> None:
    logits = torch.randn(20, 4, dtype=torch.float64)
    decision = identity_arc(TaskPartition.of_sizes([4]), preset(beta=0.0, gamma=9.0))(logits)
    assert not decision.corrected.any()
    assert decision.ratio.isnan().all()
    assert decision.retained.all().item() == preset().adapt_first_task


@given(problems(), st.sampled_from(LOSSES), st.sampled_from([0.0, 0.1]))
def test_the_closed_form_gradient_is_autograds(
    problem: tuple[Tensor, TaskPartition], losses: tuple[bool, bool], smoothing: float
) -> None:
    logits, _ = problem
    settings = ARCSettings.paper(
        cross_entropy=losses[0], entropy=losses[1], label_smoothing=smoothing
    )
    labels = logits.argmax(1)
    leaf = logits.clone().requires_grad_()
    retention_loss(leaf, labels, settings).sum().backward()
    assert leaf.grad is not None
    assert torch.allclose(retention_gradient(logits, labels, settings), leaf.grad, atol=1e-9)


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_is_that_of_finite_differences(
    losses: tuple[bool, bool], smoothing: float
) -> None:
    settings = ARCSettings.paper(
        cross_entropy=losses[0], entropy=losses[1], label_smoothing=smoothing
    )
    logits = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels, h = logits.argmax(1), 1e-6
    gradient = retention_gradient(logits, labels, settings)
    for k in range(7):
        step = torch.zeros(7, dtype=torch.float64)
        step[k] = h
        up = retention_loss(logits + step, labels, settings)
        down = retention_loss(logits - step, labels, settings)
        assert torch.allclose((up - down) / (2 * h), gradient[:, k], atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_large_logits_of_any_dtype_give_finite_answers(dtype: torch.dtype, scale: float) -> None:
    partition = TaskPartition.of_sizes([3, 1, 2])
    logits = (scale * torch.randn(50, 6, generator=torch.Generator().manual_seed(2))).to(dtype)
    logits[0] = torch.tensor([1e4, -1e4, 0, 0, 1e4, 1e4]).to(dtype)
    found = detect(logits, partition)
    assert found.confidence.isfinite().all()
    assert (found.ratio.isnan() == ~found.newest).all()
    assert found.ratio[found.newest].isfinite().all()
    assert task_scores(logits, partition, 1.1).isfinite().all()
    labels = logits.float().argmax(1)
    for smoothing in (0.0, 0.1):
        settings = ARCSettings.paper(label_smoothing=smoothing)
        assert retention_gradient(logits, labels, settings).isfinite().all()
        assert retention_loss(logits, labels, settings).isfinite().all()


def test_masked_classes_are_as_if_they_were_not_there() -> None:
    """A class at -inf gets no probability, no smoothing, no gradient; the others all of it."""
    full = TaskPartition.of_classes([0, 0, 0, 1, 1, 2, 2])
    bare = TaskPartition.of_classes([0, 0, 1, 2])
    keep = torch.tensor([0, 2, 4, 5])
    logits = torch.full((30, 7), -torch.inf, dtype=torch.float64)
    logits[:, keep] = torch.randn(
        30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    settings = ARCSettings.paper(label_smoothing=0.1)
    wide, narrow = detect(logits, full), detect(logits[:, keep], bare)
    assert torch.allclose(wide.confidence, narrow.confidence)
    assert torch.allclose(wide.ratio, narrow.ratio, equal_nan=True)
    assert torch.allclose(task_scores(logits, full, 1.2), task_scores(logits[:, keep], bare, 1.2))
    gradient = retention_gradient(logits, wide.classes, settings)
    assert torch.allclose(
        gradient[:, keep], retention_gradient(logits[:, keep], narrow.classes, settings)
    )
    assert (gradient[:, [1, 3, 6]] == 0).all()
    assert torch.allclose(
        retention_loss(logits, wide.classes, settings),
        retention_loss(logits[:, keep], narrow.classes, settings),
    )


def test_a_task_that_is_wholly_masked_is_never_chosen() -> None:
    partition = TaskPartition.of_sizes([2, 2, 2])
    logits = torch.tensor([[-torch.inf, -torch.inf, 1.0, 0.9, 1.1, -2.0]], dtype=torch.float64)
    scores = task_scores(logits, partition, 1.1)
    assert scores[0, 0] == 0
    assert scores.isfinite().all()
    assert choose_task(logits, partition, ARCSettings.paper()).item() != 0


def test_equal_scores_go_to_the_newer_task() -> None:
    partition = TaskPartition.of_sizes([1, 1])
    # S_1 = 1 (one class), S_2 = softmax([-inf, 0]) = 1.
    logits = torch.tensor([[-800.0, 0.0]], dtype=torch.float64)
    assert choose_task(logits, partition, ARCSettings.paper(temperature=1.0)).item() == 1


def test_the_naive_rule_takes_the_best_past_class() -> None:
    partition = TaskPartition.of_sizes([2, 2, 2])
    logits = torch.tensor([[0.3, 0.1, 0.2, 0.0, 0.9, 0.0]], dtype=torch.float64)
    settings = ARCSettings.paper(correction_rule="mask_newest", gamma=9.0)
    decision = identity_arc(partition, settings)(logits)
    assert decision.corrected.item()
    assert decision.classes.item() == 0
    assert decision.top(5).tolist() == [[0, 2, 1, 3, -1]]


def test_the_confidence_ablation_judges_by_confidence_alone() -> None:
    partition = TaskPartition.of_sizes([2, 2])
    logits = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    found = detect(logits, partition, ARCSettings.paper(ratio="confidence"))
    assert torch.equal(found.ratio, found.confidence)


def test_one_class_in_all() -> None:
    partition = TaskPartition.of_sizes([1])
    logits = torch.tensor([[3.0], [-2.0]], dtype=torch.float64)
    for smoothing in (0.0, 0.1):
        settings = ARCSettings.released(label_smoothing=smoothing, beta=0.0)
        assert (retention_gradient(logits, logits.argmax(1), settings) == 0).all()
        assert identity_arc(partition, settings)(logits).classes.tolist() == [0, 0]
