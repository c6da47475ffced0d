"""SLCA: training and alignment as recorded, statistics made once, heads restored."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arc_cl.contracts import TaskInfo
from arc_cl.errors import ConfigurationError, DataError
from arc_cl.learners._alignment import Alignment, ClassGaussians, align, balanced, mean_scales
from arc_cl.learners.slca import SLCA, Settings, create

SETTINGS = Settings(epochs_first=4, epochs=4, batch_size=10, lr=0.1, lr_backbone=1e-3)
SIZES = (3, 1, 2)


class Backbone(nn.Module):
    num_features = 8

    def __init__(self, inputs: int = 6) -> None:
        super().__init__()
        self.lin = nn.Linear(inputs, 8)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            self.lin.weight.copy_(torch.randn(8, inputs, generator=generator) / 2)
            self.lin.bias.zero_()

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh(self.lin(images))


@dataclass
class Images:
    """Training images by class; remembers which classes it was asked for."""

    of: Mapping[int, Tensor]
    asked: list[int] = field(default_factory=list)

    def of_class(self, position: int) -> Tensor:
        self.asked.append(position)
        start = sum(len(self.of[earlier]) for earlier in range(position))
        return torch.arange(start, start + len(self.of[position]))

    @torch.no_grad()
    def apply(self, function: Callable[[Tensor], Tensor], numbers_N: Tensor) -> Tensor:
        every = torch.cat([self.of[position] for position in sorted(self.of)])
        return function(every[numbers_N])


def tasks_of(sizes: tuple[int, ...]) -> Iterator[TaskInfo]:
    for index, size in enumerate(sizes):
        seen = sum(sizes[: index + 1])
        yield TaskInfo(
            index=index, seen_classes=seen, new_classes=size, tasks=len(sizes), classes=sum(sizes)
        )


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def clouds(classes: int = sum(SIZES)) -> Images:
    """Twenty images of each class around a centre of its own."""
    centres = torch.randn(classes, 6, generator=seeded(3)) * 1.5
    noise = torch.randn(classes, 20, 6, generator=seeded(4)) / 4
    return Images(dict(enumerate(centres[:, None] + noise)))


def train(learner: SLCA, task: TaskInfo, batches: list[tuple[Tensor, Tensor]]) -> None:
    """The learner's own plan, by plain SGD; every epoch takes these batches in this order."""
    plan = learner.plan(task)
    optimizer = torch.optim.SGD(
        [
            {"params": group.parameters, "lr": group.lr, "weight_decay": group.weight_decay}
            for group in plan.groups
        ],
        momentum=plan.momentum,
    )
    for factor in plan.schedule:
        for group, planned in zip(optimizer.param_groups, plan.groups, strict=True):
            group["lr"] = planned.lr * factor
        for images, labels in batches:
            loss, _ = learner.loss(images, labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()


def learn(learner: SLCA, task: TaskInfo, images: Images, seed: int = 7) -> None:
    learner.begin_task(task, seeded(task.index))
    new = range(task.old_classes, task.seen_classes)
    inputs = torch.cat([images.of[position] for position in new])
    labels = torch.tensor([position for position in new for _ in images.of[position]])
    train(learner, task, [(inputs, labels)])
    learner.end_task(task, images, seeded(seed))


def head_of(learner: SLCA) -> Tensor:
    return learner.adaptable().head().weight.detach().clone()


def stage_heads_of(learner: SLCA) -> Tensor:
    state = learner.modules().state_dict()
    names = [name for name in state if name.startswith("stage_heads.") and name.endswith("weight")]
    return torch.cat([state[name] for name in names])


# What was recorded


def recorded(golden: Path) -> list[Mapping[str, Any]]:
    files = [np.load(path) for path in sorted(golden.glob("slca_*_seed*.npz"))]
    assert files
    return files


def arguments(file: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(file["args"]))
    return found


def settings_of(given: dict[str, Any]) -> Settings:
    return Settings(
        lr=given["lrate"],
        lr_backbone=given["lrate"] / 100,
        epochs_first=given["epochs"],
        epochs=given["epochs"],
        batch_size=given["batch_size"],
        weight_decay=given["weight_decay"],
        milestones=tuple(given["milestones"]),
        lr_decay=given["lrate_decay"],
        alignment_epochs=0,
    )


def tensor(array: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(np.asarray(array)).to(dtype)


def parameters(file: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """Recorded parameters, by our names."""
    found = {}
    for name in file:
        if name.startswith(f"{prefix}/"):
            own = name.removeprefix(f"{prefix}/").removeprefix("fc.")
            own = own.replace("heads.", "stage_heads.").replace(".0.weight", ".weight")
            found[own.replace(".0.bias", ".bias")] = tensor(file[name])
    return found


def assert_close(learner: SLCA, expected: Mapping[str, Tensor], tolerance: float) -> None:
    state = learner.modules().state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=tolerance)


def old_heads(start: Mapping[str, Tensor], task: TaskInfo) -> dict[str, Tensor]:
    """Not the backbone: the recorded alignment ran in float32 and left it rounded to that."""
    newest = f"stage_heads.{task.index}."
    return {
        name: value
        for name, value in start.items()
        if name.startswith("stage_heads.") and not name.startswith(newest)
    }


def recorded_tasks(file: Mapping[str, Any]) -> tuple[TaskInfo, ...]:
    sizes: list[int] = []
    while f"task{len(sizes)}_x" in file:
        sizes.append(arguments(file)["init_cls"])
    return tuple(tasks_of(tuple(sizes)))


def test_training_and_statistics_are_the_recorded_ones(golden: Path) -> None:
    for file in recorded(golden):
        tasks = recorded_tasks(file)
        classes = range(tasks[-1].classes)
        images = Images({position: tensor(file[f"class_data_{position}"]) for position in classes})
        learner = create(Backbone().double(), settings_of(arguments(file)))
        for task in tasks:
            stage = f"task{task.index}"
            learner.begin_task(task, seeded())
            start = parameters(file, f"{stage}_start")
            assert_close(learner, old_heads(start, task), 1e-9)
            learner.modules().load_state_dict({**learner.modules().state_dict(), **start})
            inputs = tensor(file[f"{stage}_x"])
            labels = tensor(file[f"{stage}_y"], torch.int64)
            train(learner, task, list(zip(inputs, labels, strict=True)))
            assert_close(learner, parameters(file, f"{stage}_after_stage1"), 1e-9)
            learner.end_task(task, images, seeded())
            state = learner.modules().state_dict()
            factors = state["statistics.factors_KDD"]
            covariances = factors @ factors.mT
            means = tensor(file[f"{stage}_class_means"])
            expected = tensor(file[f"{stage}_class_covs"])
            torch.testing.assert_close(state["statistics.means_KD"], means, rtol=0, atol=1e-9)
            torch.testing.assert_close(covariances, expected, rtol=0, atol=1e-9)
            assert_close(learner, parameters(file, f"{stage}_after_recall_head"), 1e-9)


def test_alignment_is_the_recorded_one(golden: Path) -> None:
    for file in recorded(golden):
        temperature = arguments(file).get("ca_with_logit_norm", 0.0)
        for task in recorded_tasks(file)[1:]:
            stage = f"task{task.index}"
            sizes = [task.new_classes] * (task.index + 1)
            scales = mean_scales(sizes)
            torch.testing.assert_close(scales, tensor(file[f"{stage}_scale_factor"]))
            means = tensor(file[f"{stage}_class_means"]) * scales[:, None]
            given = tensor(file[f"{stage}_ca_mean_given_to_sampler"], torch.float32)
            torch.testing.assert_close(means.float(), given)
            head = joined(parameters(file, f"{stage}_after_stage1"))
            check_logits(file, stage, sizes, temperature)
            how = Alignment(
                epochs=3,
                batch_size=256,
                lr=arguments(file)["lrate"],
                momentum=0.9,
                weight_decay=arguments(file)["weight_decay"],
                temperature=temperature,
            )
            losses = align(head, sizes, recorded_samples(file, stage), how)
            expected = tensor(file[f"{stage}_ca_losses"], torch.float32)
            torch.testing.assert_close(losses, expected, rtol=0, atol=1e-4)
            after = joined(parameters(file, f"{stage}_after_ca_head"))
            torch.testing.assert_close(head.weight, after.weight, rtol=0, atol=1e-4)
            torch.testing.assert_close(head.bias, after.bias, rtol=0, atol=1e-4)


def joined(state: Mapping[str, Tensor]) -> nn.Linear:
    """All heads as one, in float32."""
    count = len([name for name in state if name.endswith(".weight") and "heads" in name])
    weight = torch.cat([state[f"stage_heads.{index}.weight"] for index in range(count)])
    head = nn.Linear(weight.shape[1], len(weight))
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(torch.cat([state[f"stage_heads.{index}.bias"] for index in range(count)]))
    return head


def recorded_samples(file: Mapping[str, Any], stage: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The sampler that stood in for the Gaussians: mean + 0.3·noise, then the shuffle."""
    means = file[f"{stage}_ca_mean_given_to_sampler"]
    seed = int(file[f"{stage}_ca_offsets_seed_start"])
    for order in file[f"{stage}_ca_perms"]:
        drawn = []
        for mean in means:
            drawn.append(mean + 0.3 * np.random.RandomState(seed).randn(256, len(mean)))
            seed += 1
        labels = np.repeat(np.arange(len(means)), 256)
        yield (
            tensor(np.concatenate(drawn)[order], torch.float32),
            tensor(labels[order], torch.int64),
        )


def check_logits(file: Mapping[str, Any], stage: str, sizes: list[int], temperature: float) -> None:
    for batch in (0, 1):
        raw = tensor(file[f"{stage}_ca_batch{batch}_raw_logits"], torch.float32)
        expected = tensor(file[f"{stage}_ca_batch{batch}_logits_into_ce"], torch.float32)
        torch.testing.assert_close(balanced(raw, sizes, temperature), expected)


# Our own, without recordings


def test_a_class_is_described_once_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    factor, factored = torch.linalg.cholesky_ex, []

    def counting(matrix: Tensor) -> Any:
        factored.append(matrix)
        return factor(matrix)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counting)
    images, learner = clouds(), create(Backbone(), SETTINGS)
    first: dict[str, Tensor] = {}
    for task in tasks_of(SIZES):
        learn(learner, task, images)
        state = learner.modules().state_dict()
        first = first or {name: state[f"statistics.{name}"] for name in ("means_KD", "factors_KDD")}
    assert images.asked == list(range(6))
    assert len(factored) == 6
    for name, value in first.items():
        assert torch.equal(learner.modules().state_dict()[f"statistics.{name}"][:3], value)


def test_statistics_are_mean_and_covariance_of_the_features() -> None:
    features = torch.randn(50, 4, generator=seeded(), dtype=torch.float64)
    gaussians = ClassGaussians(4, features)
    gaussians.append([features, features * 2])
    assert len(gaussians) == 2
    torch.testing.assert_close(gaussians.means_KD[1], 2 * features.mean(0))
    factors = gaussians.factors_KDD
    expected = torch.cov(features.T) + 1e-4 * torch.eye(4)
    torch.testing.assert_close(factors[0] @ factors[0].T, expected.double())


def test_samples_have_the_scaled_mean_and_the_covariance() -> None:
    features = torch.randn(50, 4, generator=seeded(), dtype=torch.float64) + 3
    gaussians = ClassGaussians(4, features)
    gaussians.append([features, features * 2])
    drawn, labels = gaussians.sample(torch.tensor([0.5, 1.0]), 20_000, seeded(1))
    assert labels[:50].unique().tolist() == [0, 1]  # shuffled
    assert labels.bincount().tolist() == [20_000, 20_000]
    for position, scale in ((0, 0.5), (1, 1.0)):
        rows = drawn[labels == position]
        mean = gaussians.means_KD[position] * scale
        factor = gaussians.factors_KDD[position]
        torch.testing.assert_close(rows.mean(0), mean, rtol=0, atol=0.05)
        torch.testing.assert_close(torch.cov(rows.T), factor @ factor.T, rtol=0.05, atol=0.1)


def test_a_task_is_looked_up_not_divided() -> None:
    """Unequal tasks: the released code divides by the size of the newest one."""
    scales = mean_scales(SIZES)
    third = 0.1 / 3
    assert scales.tolist() == pytest.approx([0.9 + third] * 3 + [0.9 + 2 * third] + [1.0] * 2)
    logits = torch.tensor([[3.0, 4.0, 0.0, 2.0, 0.0, 6.0]])
    mean_norm = (5 + 2 + 6) / 3
    torch.testing.assert_close(balanced(logits, SIZES, 0.1), logits / mean_norm / 0.1)
    assert balanced(logits, SIZES, 0.0) is logits


def test_unequal_tasks_are_learnt() -> None:
    images, learner = clouds(), create(Backbone(), SETTINGS)
    for task in tasks_of(SIZES):
        learn(learner, task, images)
    assert learner.adaptable().head().out_features == 6
    inputs = torch.cat(list(images.of.values()))
    labels = torch.arange(6).repeat_interleave(20)
    adaptable = learner.adaptable()
    answers = adaptable.classify(adaptable.features(inputs)).argmax(1)
    assert (answers == labels).float().mean() > 0.9


def test_the_next_task_starts_from_the_heads_before_alignment() -> None:
    images, learner = clouds(), create(Backbone(), SETTINGS)
    first, second, third = tasks_of(SIZES)
    learn(learner, first, images)
    assert torch.equal(head_of(learner), stage_heads_of(learner))  # nothing to align in task 1
    learn(learner, second, images)
    aligned = head_of(learner)
    before = stage_heads_of(learner)
    assert (aligned - before).abs().max() > 1e-3
    learner.begin_task(third, seeded(2))
    assert torch.equal(stage_heads_of(learner)[:4], before)
    assert torch.equal(head_of(learner), stage_heads_of(learner))


def test_no_alignment_on_request() -> None:
    images = clouds()
    learner = create(Backbone(), replace(SETTINGS, alignment_epochs=0))
    for task in tasks_of(SIZES):
        learn(learner, task, images)
    assert torch.equal(head_of(learner), stage_heads_of(learner))


def test_alignment_obeys_its_generator_and_leaves_the_global_one_alone() -> None:
    images = clouds()
    first, second, _ = tasks_of(SIZES)
    learners = [create(Backbone(), SETTINGS) for _ in range(3)]
    before, heads = torch.get_rng_state(), []
    for learner, seed in zip(learners, (7, 7, 8), strict=True):
        learn(learner, first, images)
        learn(learner, second, images, seed)
        heads.append(head_of(learner))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_the_rate_of_the_alignment_is_a_cosine() -> None:
    """Without momentum and decay, equal batches move the head in proportion to the rate."""
    moved = []
    for epochs in (1, 2):
        head = nn.Linear(2, 2)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        how = Alignment(
            epochs=3, batch_size=4, lr=1e-4, momentum=0.0, weight_decay=0.0, temperature=0.0
        )
        batch = (torch.eye(2), torch.tensor([0, 1]))
        align(head, (1, 1), [batch] * epochs, how)
        moved.append(head.weight[0, 0].item())
    assert moved[1] == pytest.approx(1.75 * moved[0], rel=1e-3)


def test_one_image_is_enough_for_a_class() -> None:
    images = Images({**clouds(3).of, 3: torch.ones(1, 6)})
    learner = create(Backbone(), SETTINGS)
    for task in tasks_of((3, 1)):
        learn(learner, task, images)
    factor = learner.modules().state_dict()["statistics.factors_KDD"][3]
    torch.testing.assert_close(factor, 1e-2 * torch.eye(8))
    assert head_of(learner).isfinite().all()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.empty(0, 6), r"class 0 has no training images"),
        (torch.full((4, 6), torch.nan), r"class 0 are not finite.*lower lr"),
    ],
)
def test_a_class_that_cannot_be_described(images: Tensor, message: str) -> None:
    learner = create(Backbone(), SETTINGS)
    (task,) = tasks_of((1,))
    learner.begin_task(task, seeded())
    with pytest.raises(DataError, match=message):
        learner.end_task(task, Images({0: images}), seeded())


def test_the_plan_has_two_rates_and_the_newest_head_only() -> None:
    learner = create(Backbone(), replace(SETTINGS, milestones=(2,), epochs=3))
    first, second, _ = tasks_of(SIZES)
    learner.begin_task(first, seeded())
    assert learner.plan(first).schedule == pytest.approx((1, 1, 0.1, 0.1))
    learner.begin_task(second, seeded())
    plan = learner.plan(second)
    assert plan.schedule == pytest.approx((1, 1, 0.1))
    assert [group.lr for group in plan.groups] == [1e-3, 0.1]
    assert [group.weight_decay for group in plan.groups] == [5e-4, 5e-4]
    backbone, head = plan.groups
    assert [tuple(parameter.shape) for parameter in backbone.parameters] == [(8, 6), (8,)]
    assert [tuple(parameter.shape) for parameter in head.parameters] == [(1, 8), (1,)]


def test_the_loss_is_that_of_the_new_classes_alone() -> None:
    learner = create(Backbone(), SETTINGS)
    first, second, third = tasks_of(SIZES)
    for task in (first, second, third):
        learner.begin_task(task, seeded(task.index))
    images, labels = torch.randn(5, 6, generator=seeded()), torch.tensor([4, 5, 5, 4, 4])
    loss, numbers = learner.loss(images, labels)
    adaptable = learner.adaptable()
    logits = adaptable.classify(adaptable.features(images))[:, 4:]
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits, labels - 4))
    assert not numbers["loss"].requires_grad
    torch.autograd.backward(loss)
    reached = {name for name, p in learner.modules().named_parameters() if p.grad is not None}
    newest = {"stage_heads.2.weight", "stage_heads.2.bias"}
    assert reached == {"backbone.lin.weight", "backbone.lin.bias"} | newest


def test_a_backbone_at_rate_0_rests() -> None:
    images, learner = clouds(), create(Backbone(), replace(SETTINGS, lr_backbone=0.0))
    before = copy.deepcopy(learner.modules()["backbone"].state_dict())  # type: ignore[index]
    for task in tasks_of(SIZES):
        learn(learner, task, images)
        assert len(learner.plan(task).groups) == 1
    after = learner.modules().state_dict()
    assert all(torch.equal(after[f"backbone.{name}"], value) for name, value in before.items())


def test_what_somebody_froze_stays_frozen() -> None:
    backbone = Backbone().requires_grad_(False)
    images, learner = clouds(), create(backbone, SETTINGS)
    for task in tasks_of(SIZES):
        learn(learner, task, images)
        assert [group.lr for group in learner.plan(task).groups] == [0.1]
    assert not any(parameter.requires_grad for parameter in backbone.parameters())


def test_fresh_heads_are_small_and_drawn_from_the_generator() -> None:
    learner = create(Backbone(), SETTINGS)
    task = TaskInfo(index=0, seen_classes=500, new_classes=500, tasks=1, classes=500)
    learner.begin_task(task, seeded(5))
    head = learner.adaptable().head()
    assert head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not head.bias.any()
    other = create(Backbone(), SETTINGS)
    other.begin_task(task, seeded(5))
    assert torch.equal(head.weight, other.adaptable().head().weight)


def test_new_parts_land_where_the_backbone_is() -> None:
    learner = create(Backbone().double(), SETTINGS)
    images = Images({position: value.double() for position, value in clouds().of.items()})
    for task in tasks_of(SIZES):
        learn(learner, task, images)
    assert {value.dtype for value in learner.modules().state_dict().values()} == {torch.float64}


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped() -> None:
    images, learner, other = clouds(), create(Backbone(), SETTINGS), create(Backbone(), SETTINGS)
    first, second, third = tasks_of(SIZES)
    learn(learner, first, images)
    learn(learner, second, images)
    other.begin_task(first, seeded())
    other.begin_task(second, seeded())
    other.modules().load_state_dict(learner.modules().state_dict())
    assert torch.equal(head_of(other), head_of(learner))
    for one in (learner, other):
        learn(one, third, images)
    assert torch.equal(head_of(other), head_of(learner))
    assert other.rehearsal().tolist() == []
    assert other.rehearsal().dtype == torch.int64


def test_the_adaptable_knows_the_head_that_answers_alone() -> None:
    images, learner = clouds(), create(Backbone(), SETTINGS)
    for task in tasks_of(SIZES):
        learn(learner, task, images)
    names = {name for name, _ in learner.adaptable().parameters("all")}
    assert names == {"backbone.lin.weight", "backbone.lin.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0.0), ("lr_backbone", -1e-4), ("alignment_samples", 0), ("logit_norm", -0.1)],
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name} is {value}, expected .*raise it"):
        replace(SETTINGS, **{name: value})  # type: ignore[arg-type]
