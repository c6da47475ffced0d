"""iCaRL: teacher, exemplars, nearest means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arc_cl.contracts import TaskInfo
from arc_cl.errors import ConfigurationError
from arc_cl.learners.icarl import ICaRL, Settings, create

VALUES: dict[str, Any] = {"lr": 0.1, "epochs_first": 1, "epochs": 1, "batch_size": 8, "memory": 8}
TASKS = tuple(
    TaskInfo(index=stage, seen_classes=2 * stage + 2, new_classes=2, tasks=2, classes=4)
    for stage in range(2)
)


class Images:
    """Four images a class, each class around a point of its own; numbered class after class."""

    def __init__(self, size: int = 4) -> None:
        generator = torch.Generator().manual_seed(5)
        points = torch.randn(4, 1, 3, size, size, generator=generator)
        noise = torch.randn(4, 4, 3, size, size, generator=generator)
        self.pixels = (points + 0.1 * noise).flatten(0, 1)
        self.labels = torch.arange(4).repeat_interleave(4)

    def of_class(self, position: int) -> Tensor:
        return torch.arange(4) + 4 * position

    def apply(self, function: Callable[[Tensor], Tensor], numbers_N: Tensor) -> Tensor:
        with torch.no_grad():
            return function(self.pixels[numbers_N])


class Backbone(nn.Module):
    """Images [B,3,4,4] to five features, with a norm that remembers what it sees."""

    num_features = 5

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.BatchNorm1d(5))
        weight = self.layers[1].weight
        assert isinstance(weight, Tensor)
        nn.init.uniform_(weight, -0.3, 0.3, generator=torch.Generator().manual_seed(0))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features: Tensor = self.layers(images_BCHW)
        return features


def train(learner: ICaRL, task: TaskInfo, images: Images, steps: int = 3) -> dict[str, Tensor]:
    """A few steps on the new classes and what is rehearsed; the numbers of the last one."""
    new = torch.cat([images.of_class(c) for c in range(task.old_classes, task.seen_classes)])
    numbers_N = torch.cat([new, learner.rehearsal()])
    (group,) = learner.plan(task).groups
    optimizer = torch.optim.SGD(group.parameters, lr=group.lr)
    learner.modules().train()
    numbers: dict[str, Tensor] = {}
    for _ in range(steps):
        loss, numbers = learner.loss(images.pixels[numbers_N], images.labels[numbers_N])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return numbers


def begin(learner: ICaRL, task: TaskInfo) -> ICaRL:
    learner.begin_task(task, torch.Generator().manual_seed(task.index))
    return learner


def after_first(images: Images, **changes: Any) -> ICaRL:
    learner = begin(create(Backbone(), Settings(**{**VALUES, **changes})), TASKS[0])
    train(learner, TASKS[0], images)
    learner.end_task(TASKS[0], images, torch.Generator())
    return learner


def answers(learner: ICaRL, images: Tensor) -> Tensor:
    with torch.no_grad():
        classifier = learner.adaptable()
        return classifier.classify(classifier.features(images))


def test_the_loss_has_two_parts_from_the_second_task_on() -> None:
    images = Images()
    learner = begin(create(Backbone(), Settings(**VALUES)), TASKS[0])
    assert set(learner.loss(images.pixels[:4], images.labels[:4])[1]) == {"loss"}
    learner = after_first(images, temperature=3.0)
    before = answers(learner, images.pixels)
    begin(learner, TASKS[1])
    loss, numbers = learner.loss(images.pixels, images.labels)
    logits = answers(learner, images.pixels)
    soft = (before / 3).softmax(dim=1)
    taught = -(soft * (logits[:, :2] / 3).log_softmax(dim=1)).sum(dim=1).mean()
    assert numbers["distillation"].item() == pytest.approx(taught.item(), rel=1e-5)
    plain = cross_entropy(logits, images.labels).item()
    assert numbers["classification"].item() == pytest.approx(plain, rel=1e-5)
    assert loss.item() == pytest.approx(plain + taught.item(), rel=1e-5)


def test_the_teacher_stands_still_while_the_network_learns() -> None:
    images = Images()
    learner = begin(after_first(images), TASKS[1])
    first = learner.loss(images.pixels, images.labels)[1]["distillation"]
    state = {name: value.clone() for name, value in learner.modules().state_dict().items()}
    train(learner, TASKS[1], images, steps=5)
    assert not torch.equal(learner.loss(images.pixels, images.labels)[1]["distillation"], first)
    learner.modules().load_state_dict(state)
    learner.modules().eval()
    again = learner.loss(images.pixels, images.labels)[1]["distillation"]
    assert torch.equal(again, first)
    assert not any("teacher" in name for name in state)


def test_a_resumed_run_has_the_same_teacher() -> None:
    images = Images()
    one = after_first(images)
    other = begin(create(Backbone(), Settings(**VALUES)), TASKS[0])
    other.modules().load_state_dict(one.modules().state_dict())
    assert torch.equal(other.rehearsal(), one.rehearsal())
    last = [train(begin(each, TASKS[1]), TASKS[1], images) for each in (one, other)]
    assert last[0] == last[1]


def test_exemplars_and_nearest_means_follow_each_task() -> None:
    images = Images()
    learner = after_first(images, memory=6)
    assert [number // 4 for number in learner.rehearsal().tolist()] == [0] * 3 + [1] * 3
    begin(learner, TASKS[1])
    train(learner, TASKS[1], images)
    learner.end_task(TASKS[1], images, torch.Generator())
    assert [number // 4 for number in learner.rehearsal().tolist()] == [0, 1, 2, 3]
    features = images.apply(learner.adaptable().features, torch.arange(16))
    nearest = learner.distances_to_means(features).argmin(dim=1)
    assert (nearest == images.labels).float().mean() > 0.9


def test_ending_a_task_leaves_the_network_as_it_was() -> None:
    images = Images()
    learner = begin(create(Backbone(), Settings(**VALUES)), TASKS[0])
    learner.modules().train()
    before = learner.modules().state_dict()
    names = [name for name in before if not name.startswith("exemplars")]
    kept = {name: before[name].clone() for name in names}
    learner.end_task(TASKS[0], images, torch.Generator())
    after = learner.modules().state_dict()
    assert all(torch.equal(after[name], kept[name]) for name in names)


def test_a_resnet_can_keep_exemplars() -> None:
    images = Images(size=32)
    with torch.random.fork_rng(devices=[]):
        backbone = timm.create_model("resnet10t", num_classes=0)
    learner = begin(create(backbone, Settings(**VALUES)), TASKS[0])
    train(learner, TASKS[0], images, steps=1)
    learner.end_task(TASKS[0], images, torch.Generator())
    assert len(learner.rehearsal()) == 8
    features = images.apply(learner.adaptable().features, torch.arange(8))
    assert features.shape == (8, 512)
    assert learner.distances_to_means(features).shape == (8, 2)
    begin(learner, TASKS[1])
    numbers = train(learner, TASKS[1], images, steps=1)
    assert torch.isfinite(numbers["distillation"])


def test_a_temperature_must_be_positive() -> None:
    with pytest.raises(ConfigurationError, match="temperature=0"):
        Settings(**VALUES, temperature=0.0)
