"""Every learner that the catalogue finds: it learns a toy, and its state goes round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arc_cl import catalogue
from arc_cl.contracts import Learner, TaskInfo, Training
from arc_cl.learners.finetune import Finetune

TASKS = (
    TaskInfo(index=0, seen_classes=3, new_classes=3),
    TaskInfo(index=1, seen_classes=5, new_classes=2),
)
TRAINING = Training(lr=0.1, epochs=1, batch_size=15)
EVERY = pytest.mark.parametrize("name", catalogue.names("learners"))


class Backbone(nn.Module):
    """Images [B,1,2,4] of one bright pixel to eight features."""

    num_features = 8

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        with torch.no_grad():
            self.mix.weight.copy_(torch.eye(8))
            self.mix.bias.zero_()

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.norm(self.mix(images_BCHW.flatten(1)))  # type: ignore[no-any-return]


def images_of(labels: Tensor) -> Tensor:
    return nn.functional.one_hot(labels, 8).float().view(-1, 1, 2, 4)


def make(name: str) -> Learner:
    learner: Learner = catalogue.load("learners", name).create(Backbone(), TRAINING)
    return learner


def begin(learner: Learner, task: TaskInfo) -> None:
    learner.begin_task(task, torch.Generator().manual_seed(task.index))


def train(learner: Learner, task: TaskInfo, steps: int = 30) -> Tensor:
    """Plain gradient steps by the learner's own plan; returns the labels of the task."""
    labels = torch.arange(task.old_classes, task.seen_classes).repeat(5)
    optimizer = torch.optim.SGD(
        [
            {"params": group.parameters, "lr": group.lr, "weight_decay": group.weight_decay}
            for group in learner.plan(task).groups
        ],
        momentum=learner.plan(task).momentum,
    )
    for _ in range(steps):
        loss, _ = learner.loss(images_of(labels), labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    learner.end_task(task)
    return labels


def logits_of(learner: Learner, labels: Tensor) -> Tensor:
    adaptable = learner.adaptable()
    return adaptable.classify(adaptable.features(images_of(labels))).detach()


@EVERY
def test_it_learns_the_newest_task_of_a_toy(name: str) -> None:
    learner = make(name)
    for task in TASKS:
        begin(learner, task)
        labels = train(learner, task)
        logits = logits_of(learner, labels)
        assert logits.shape == (len(labels), task.seen_classes)
        new = logits[:, task.old_classes :].argmax(dim=1) + task.old_classes
        assert torch.equal(new, labels)


@EVERY
def test_its_state_goes_round(name: str) -> None:
    learner, other = make(name), make(name)
    for task in TASKS:
        begin(learner, task)
        train(learner, task, steps=3)
        begin(other, task)
    other.modules().load_state_dict(learner.modules().state_dict())
    assert torch.equal(logits_of(other, torch.arange(5)), logits_of(learner, torch.arange(5)))


@EVERY
def test_growing_leaves_old_answers_and_the_global_rng_alone(name: str) -> None:
    learner = make(name)
    before = torch.get_rng_state()
    begin(learner, TASKS[0])
    old = logits_of(learner, torch.arange(3))
    begin(learner, TASKS[1])
    assert torch.equal(logits_of(learner, torch.arange(3))[:, :3], old)
    assert torch.equal(torch.get_rng_state(), before)


@EVERY
def test_scopes_name_existing_parameters(name: str) -> None:
    learner = make(name)
    begin(learner, TASKS[0])
    every = dict(learner.modules().named_parameters())
    for scope in ("head", "head+prompts", "norms", "all"):
        for parameter_name, parameter in learner.adaptable().parameters(scope):
            assert every[parameter_name] is parameter
    head = [parameter for _, parameter in learner.adaptable().parameters("head")]
    assert head[0] is learner.adaptable().head().weight


def test_finetune_gives_old_rows_no_gradient_and_less_decay_later() -> None:
    learner = Finetune(Backbone(), TRAINING)
    begin(learner, TASKS[0])
    assert [group.weight_decay for group in learner.plan(TASKS[0]).groups] == [5e-4]
    begin(learner, TASKS[1])
    assert [group.weight_decay for group in learner.plan(TASKS[1]).groups] == [2e-4]
    labels = torch.tensor([3, 4, 4])
    loss, numbers = learner.loss(images_of(labels), labels)
    torch.autograd.backward(loss)
    gradient = learner.adaptable().head().weight.grad
    assert gradient is not None
    assert gradient[:3].abs().max() == 0
    assert gradient[3:].abs().min() > 0
    assert not numbers["loss"].requires_grad
