"""Every learner that the catalogue finds, on a toy that a tiny vision transformer can learn.

A new learner is tested by appearing: it needs fields of `Settings` that the table below or its own
defaults fill.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from arc_cl import catalogue
from arc_cl.contracts import AsksFirst, Learner, Scope, TaskInfo, TrainingPlan

TASKS = tuple(
    TaskInfo(index=index, seen_classes=seen, new_classes=new, tasks=3, classes=7)
    for index, (seen, new) in enumerate([(3, 3), (5, 2), (7, 2)])
)
IMAGES_A_CLASS = 4
TOY = {
    "lr": 0.02,
    "epochs_first": 2,
    "epochs": 2,
    "batch_size": 6,
    "memory": 14,
    "lr_backbone": 0.01,
    "general_layers": (0,),
    "expert_layers": (1,),
    "layers": (0, 1),
    "components": 6,
    "top_k": 2,
    "pool": 4,
    "alignment_samples": 8,
}
EVERY = pytest.mark.parametrize("name", catalogue.names("learners"))


def backbone() -> VisionTransformer:
    """At random, but with blocks strong enough that what a patch shows reaches every token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = VisionTransformer(
            img_size=8, patch_size=4, embed_dim=24, depth=2, num_heads=2, num_classes=0
        )
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval()


def make(module: ModuleType) -> Learner:
    known = {each.name for each in fields(module.Settings)}
    values = {name: value for name, value in TOY.items() if name in known}
    if module.__name__.endswith("finetune"):
        del values["memory"]
    learner: Learner = module.create(backbone(), module.Settings(**values))
    return learner


def named(name: str) -> Learner:
    return make(catalogue.load("learners", name))


def images_of(labels: Tensor, variety: float = 0.1) -> Tensor:
    """A class is a pattern of bright patches; images of it differ by noise."""
    generator = torch.Generator().manual_seed(11)
    patterns = torch.randn(8, 3, 8, 8, generator=generator)
    noise = torch.randn(len(labels), 3, 8, 8, generator=generator)
    return patterns[labels] + variety * noise


class Split:
    """A training split of the toy, as `contracts.TrainingImages` shows one."""

    def __init__(self, task: TaskInfo, rehearsal: Tensor) -> None:
        self.labels = torch.arange(TASKS[-1].classes).repeat_interleave(IMAGES_A_CLASS)
        self.images = images_of(self.labels)
        new = (self.labels >= task.old_classes) & (self.labels < task.seen_classes)
        self.numbers = torch.cat([torch.nonzero(new).flatten(), rehearsal])

    def of_class(self, position: int) -> Tensor:
        return self.numbers[self.labels[self.numbers] == position]

    @torch.no_grad()
    def apply(self, function: Callable[[Tensor], Tensor], numbers_N: Tensor) -> Tensor:
        return function(self.images[numbers_N])


def begin(learner: Learner, task: TaskInfo) -> None:
    learner.begin_task(task, torch.Generator().manual_seed(task.index))


def optimizer_of(plan: TrainingPlan) -> torch.optim.Optimizer:
    groups = [
        {"params": group.parameters, "lr": group.lr, "weight_decay": group.weight_decay}
        for group in plan.groups
    ]
    if plan.optimizer == "adam":
        return torch.optim.Adam(groups)
    return torch.optim.SGD(groups, momentum=plan.momentum)


def train(learner: Learner, task: TaskInfo, steps: int = 60) -> Split:
    """Full-batch steps by the learner's own plan, then what follows the last epoch."""
    split = Split(task, learner.rehearsal())
    optimizer = optimizer_of(learner.plan(task))
    learner.modules().train()
    for _ in range(steps):
        loss, _ = learner.loss(split.images[split.numbers], split.labels[split.numbers])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    learner.modules().eval()
    learner.end_task(task, split, torch.Generator().manual_seed(50 + task.index))
    return split


def logits_of(learner: Learner, labels: Tensor) -> Tensor:
    adaptable = learner.adaptable()
    return adaptable.classify(adaptable.features(images_of(labels))).detach()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@EVERY
def test_it_learns_the_newest_task_of_a_toy(name: str) -> None:
    learner = named(name)
    for task in TASKS:
        begin(learner, task)
        train(learner, task)
        new = torch.arange(task.old_classes, task.seen_classes).repeat(3)
        logits = logits_of(learner, new)
        assert logits.shape == (len(new), task.seen_classes)
        found = logits[:, task.old_classes :].argmax(dim=1) + task.old_classes
        assert (found == new).float().mean() >= 0.8


@EVERY
def test_its_state_goes_round(name: str) -> None:
    learner, other = named(name), named(name)
    for task in TASKS[:2]:
        begin(learner, task)
        train(learner, task, steps=3)
        begin(other, task)
    other.modules().load_state_dict(copy.deepcopy(learner.modules().state_dict()))
    other.modules().eval()
    assert torch.equal(logits_of(other, torch.arange(5)), logits_of(learner, torch.arange(5)))
    assert torch.equal(other.rehearsal(), learner.rehearsal())


@EVERY
def test_a_loaded_learner_goes_on_like_one_that_never_stopped(name: str) -> None:
    learner, other = named(name), named(name)
    for task in TASKS[:2]:
        begin(learner, task)
        train(learner, task, steps=3)
        begin(other, task)
    other.modules().load_state_dict(copy.deepcopy(learner.modules().state_dict()))
    for each in (learner, other):
        begin(each, TASKS[2])
        train(each, TASKS[2], steps=3)
    assert same(learner.modules().state_dict(), other.modules().state_dict())


@EVERY
def test_the_global_rng_stays_alone_and_numbers_stay_on_the_device(name: str) -> None:
    learner = named(name)
    before = torch.get_rng_state()
    for task in TASKS[:2]:
        begin(learner, task)
        train(learner, task, steps=2)
    assert torch.equal(torch.get_rng_state(), before)
    loss, numbers = learner.loss(images_of(torch.tensor([3, 4])), torch.tensor([3, 4]))
    assert loss.shape == ()
    assert numbers
    assert all(isinstance(value, Tensor) and not value.requires_grad for value in numbers.values())


@EVERY
def test_the_plan_lists_what_learns_and_nothing_else_changes(name: str) -> None:
    learner = named(name)
    for task in TASKS[:2]:
        begin(learner, task)
        plan = learner.plan(task)
        listed = {id(each) for group in plan.groups for each in group.parameters}
        assert len(listed) == sum(len(group.parameters) for group in plan.groups)
        before = {n: p.detach().clone() for n, p in learner.modules().named_parameters()}
        ids = {n: id(p) for n, p in learner.modules().named_parameters()}
        split = Split(task, learner.rehearsal())
        loss, _ = learner.loss(split.images[split.numbers], split.labels[split.numbers])
        torch.autograd.backward(loss)
        optimizer_of(plan).step()
        after = dict(learner.modules().named_parameters())
        moved = {n for n in before if not torch.equal(before[n], after[n])}
        assert moved
        assert all(ids[n] in listed for n in moved)
        for parameter in learner.modules().parameters():
            parameter.grad = None
        learner.end_task(task, split, torch.Generator().manual_seed(0))


@EVERY
def test_evaluating_changes_no_state(name: str) -> None:
    learner = named(name)
    for task in TASKS[:2]:
        begin(learner, task)
        train(learner, task, steps=2)
    before = copy.deepcopy(learner.modules().state_dict())
    flags = [p.requires_grad for p in learner.modules().parameters()]
    logits_of(learner, torch.arange(5))
    assert same(learner.modules().state_dict(), before)
    assert [p.requires_grad for p in learner.modules().parameters()] == flags


@EVERY
def test_scopes_name_existing_parameters(name: str) -> None:
    learner = named(name)
    begin(learner, TASKS[0])
    train(learner, TASKS[0], steps=1)
    every = dict(learner.modules().named_parameters())
    for scope in ("head", "head+prompts", "norms", "all"):
        for parameter_name, parameter in learner.adaptable().parameters(scope):
            assert every[parameter_name] is parameter
    scopes: dict[Scope, set[str]] = {
        scope: {found for found, _ in learner.adaptable().parameters(scope)}
        for scope in get_args(Scope)
    }
    assert scopes["head"] <= scopes["head+prompts"] <= scopes["all"]
    assert scopes["norms"] <= scopes["all"]
    head = [parameter for _, parameter in learner.adaptable().parameters("head")]
    assert head[0] is learner.adaptable().head().weight
    assert isinstance(learner.adaptable().head(), nn.Linear)


@EVERY
def test_the_head_is_what_classifies(name: str) -> None:
    learner = named(name)
    for task in TASKS[:2]:
        begin(learner, task)
        train(learner, task, steps=2)
    adaptable = learner.adaptable()
    features = adaptable.features(images_of(torch.arange(5)))
    by_head = adaptable.head()(features)[:, : TASKS[1].seen_classes]
    torch.testing.assert_close(adaptable.classify(features), by_head)


@EVERY
def test_an_answer_does_not_depend_on_the_batch(name: str) -> None:
    learner = named(name)
    for task in TASKS[:2]:
        begin(learner, task)
        train(learner, task, steps=2)
    labels = torch.tensor([0, 1, 2, 3, 4, 1, 3])
    whole = learner.adaptable().features(images_of(labels)).detach()
    alone = torch.cat([learner.adaptable().features(one[None]) for one in images_of(labels)])
    torch.testing.assert_close(alone.detach(), whole, atol=1e-5, rtol=1e-4)


@EVERY
def test_known_queries_change_nothing(name: str) -> None:
    learner = named(name)
    begin(learner, TASKS[0])
    if not isinstance(learner, AsksFirst):
        pytest.skip(f"{name} asks no queries")
    labels = torch.arange(3)
    images = images_of(labels)
    queries = learner.query(images)
    assert torch.equal(
        learner.loss_given(images, queries, labels)[0], learner.loss(images, labels)[0]
    )
    given = learner.features_given(images, queries)
    assert torch.equal(given, learner.adaptable().features(images))


NINTH = '''
from dataclasses import dataclass
import torch
from torch import nn
from arc_cl.backbones.heads import grow_linear
from arc_cl.contracts import ParameterGroup, Training, TrainingPlan

@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    pass

class Probe:
    """A linear head on a frozen backbone."""
    def __init__(self, backbone, settings):
        self.settings = settings
        self.network = nn.ModuleDict({"backbone": backbone.requires_grad_(False)})
    def begin_task(self, task, generator):
        old = self.network["head"] if "head" in self.network else None
        self.network["head"] = grow_linear(old, 24, task.seen_classes, generator)
    def plan(self, task):
        group = ParameterGroup(parameters=tuple(self.network["head"].parameters()), lr=0.1)
        return TrainingPlan(groups=(group,), optimizer="sgd", batch_size=6, schedule=(1.0,))
    def loss(self, images, labels):
        loss = nn.functional.cross_entropy(self.classify(self.features(images)), labels)
        return loss, {"loss": loss.detach()}
    def end_task(self, task, images, generator): ...
    def rehearsal(self):
        return torch.empty(0, dtype=torch.int64)
    def adaptable(self):
        return self
    def modules(self):
        return self.network
    def features(self, images):
        return self.network["backbone"](images)
    def classify(self, features):
        return self.network["head"](features)
    def head(self):
        return self.network["head"]
    def parameters(self, scope):
        return self.network["head"].named_parameters(prefix="head")

def create(backbone, settings):
    return Probe(backbone, settings)
'''


def test_a_ninth_learner_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file alone puts it in the catalogue, and the suite above takes it as it is."""
    import arc_cl.learners as room

    (tmp_path / "ninth.py").write_text(NINTH)
    monkeypatch.setattr(room, "__path__", [*room.__path__, str(tmp_path)])
    spec_paths = [*room.__path__]
    assert str(tmp_path) in spec_paths
    assert room.__spec__ is not None
    monkeypatch.setattr(room.__spec__, "submodule_search_locations", spec_paths)
    try:
        assert "ninth" in catalogue.names("learners")
        for check in (
            test_it_learns_the_newest_task_of_a_toy,
            test_its_state_goes_round,
            test_a_loaded_learner_goes_on_like_one_that_never_stopped,
            test_the_global_rng_stays_alone_and_numbers_stay_on_the_device,
            test_the_plan_lists_what_learns_and_nothing_else_changes,
            test_evaluating_changes_no_state,
            test_scopes_name_existing_parameters,
            test_the_head_is_what_classifies,
            test_an_answer_does_not_depend_on_the_batch,
        ):
            check("ninth")
    finally:
        sys.modules.pop("arc_cl.learners.ninth", None)
