"""The one training loop, for every learner, on Lightning Fabric.

The host never waits for the device within an epoch: what a loss names is summed on the device and
read when the epoch is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from arc_cl.contracts import AsksFirst, Learner, TaskInfo, TrainingPlan
from arc_cl.engine.images import DeviceImages
from arc_cl.engine.progress import Progress
from arc_cl.engine.queries import Queries
from arc_cl.engine.runtime import Runtime
from arc_cl.errors import ConfigurationError

LossAndNumbers: TypeAlias = tuple[Tensor, Mapping[str, Tensor]]


@dataclass(frozen=True)
class TaskData:
    """What one task is trained on: the numbers of its images in the training split, and labels."""

    images: DeviceImages
    numbers_N: Tensor
    labels_N: Tensor
    queries: Queries | None = None
    """Where the learner asks first and its images do not vary."""

    def __len__(self) -> int:
        return len(self.numbers_N)


@dataclass
class Progressed:
    """How far a task is: epochs done, steps of the next one, and the sums of what it logged."""

    epoch: int = 0
    step: int = 0
    sums: dict[str, Tensor] | None = None


class Keeper(Protocol):
    """Keeps a task's state from time to time, and knows where it was left."""

    def left_at(self, module: nn.Module, optimizer: Optimizer) -> Progressed:
        """Loads the state that was kept of this task, if any."""

    def step_done(self, module: nn.Module, optimizer: Optimizer, at: Progressed) -> None: ...

    def epoch_done(self, epoch: int, means: Mapping[str, float], images: int) -> None: ...


def fit(
    runtime: Runtime,
    learner: Learner,
    task: TaskInfo,
    data: TaskData,
    losses: Losses,
    keeper: Keeper,
    progress: Progress,
) -> None:
    """Train one task: all epochs of the learner's plan, images in a fresh order each epoch."""
    plan = learner.plan(task)
    steps = _steps(plan, task, data)
    module = losses.of(learner, with_queries=data.queries is not None)
    loss_of, optimizer = runtime.fabric.setup(module, _optimizer(plan))
    at = keeper.left_at(learner.modules(), optimizer.optimizer)
    progress.advance((at.epoch + at.step / steps) / plan.epochs, 0)
    loss_of.train()
    for epoch in range(at.epoch, plan.epochs):
        _set_rates(optimizer.optimizer, plan, epoch)
        order_N = torch.randperm(len(data), generator=runtime.generator("order", task.index, epoch))
        order_N = order_N.to(runtime.device)
        sums = at.sums or {}
        for step in range(at.step, steps):
            rows_B = order_N[step * plan.batch_size : (step + 1) * plan.batch_size]
            augment = runtime.generator("augment", task.index, epoch, step)
            torch.compiler.cudagraph_mark_step_begin()
            loss, numbers = loss_of(*_inputs(data, rows_B, augment))
            optimizer.zero_grad()
            runtime.fabric.backward(loss)
            optimizer.step()
            sums = _added(sums, numbers, len(rows_B))
            progress.advance(1 / (plan.epochs * steps), len(rows_B))
            keeper.step_done(
                learner.modules(), optimizer.optimizer, Progressed(epoch, step + 1, sums)
            )
        images = min(steps * plan.batch_size, len(data))
        means = {name: float(value) / images for name, value in sums.items()}
        _check(means, task, epoch, plan)
        keeper.epoch_done(epoch, means, images)
        at = Progressed(epoch + 1)
    learner.modules().eval()


class Losses:
    """A learner's loss as a module, which is what Fabric wraps, from task to task.

    Compiled, it is kept as long as the network has the same shape: a prompt learner is compiled
    once, a head that grows once a task.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._kept: tuple[object, nn.Module] | None = None

    def of(self, learner: Learner, *, with_queries: bool) -> nn.Module:
        shape = (
            id(learner),
            with_queries,
            tuple((n, p.shape, p.requires_grad) for n, p in learner.modules().named_parameters()),
        )
        if self._kept is None or self._kept[0] != shape:
            self._kept = (shape, self._made(learner, with_queries))
        return self._kept[1]

    def _made(self, learner: Learner, with_queries: bool) -> nn.Module:
        function: Callable[..., LossAndNumbers] = learner.loss
        if with_queries and isinstance(learner, AsksFirst):
            function = learner.loss_given
        module = _Loss(learner.modules(), function)
        compile_if_asked(self._runtime, module)
        return module


def compile_if_asked(runtime: Runtime, module: nn.Module) -> None:
    """On a GPU the launches of a small batch take longer than its arithmetic: replay graphs."""
    if runtime.compile:
        torch.compiler.reset()
        module.compile(mode="reduce-overhead" if runtime.device.type == "cuda" else None)


class _Loss(nn.Module):
    def __init__(self, network: nn.Module, function: Callable[..., LossAndNumbers]) -> None:
        super().__init__()
        self.network = network
        self._function = function

    def forward(self, *inputs: Tensor) -> LossAndNumbers:
        return self._function(*inputs)


def _inputs(data: TaskData, rows_B: Tensor, augment: torch.Generator) -> tuple[Tensor, ...]:
    numbers_B = data.numbers_N[rows_B]
    images_BCHW = data.images.in_training(numbers_B, augment)
    labels_B = data.labels_N[rows_B]
    if data.queries is None:
        return images_BCHW, labels_B
    return images_BCHW, data.queries.of(numbers_B), labels_B


def _optimizer(plan: TrainingPlan) -> Optimizer:
    groups = [
        {"params": group.parameters, "lr": group.lr, "weight_decay": group.weight_decay}
        for group in plan.groups
    ]
    fused = all(p.is_cuda for group in plan.groups for p in group.parameters)
    if plan.optimizer == "sgd":
        return SGD(groups, momentum=plan.momentum, fused=fused)
    return Adam(groups, fused=fused)


def _set_rates(optimizer: Optimizer, plan: TrainingPlan, epoch: int) -> None:
    for group, planned in zip(optimizer.param_groups, plan.groups, strict=True):
        group["lr"] = planned.lr * plan.schedule[epoch]


def _steps(plan: TrainingPlan, task: TaskInfo, data: TaskData) -> int:
    """Steps an epoch."""
    if not len(data):
        raise ConfigurationError(
            f"task {task.index + 1} has no training image; use a data set with images of its "
            f"classes {task.old_classes} … {task.seen_classes - 1}"
        )
    whole, rest = divmod(len(data), plan.batch_size)
    return whole if plan.drop_last and whole else whole + bool(rest)


def _added(
    sums: dict[str, Tensor], numbers: Mapping[str, Tensor], images: int
) -> dict[str, Tensor]:
    return {name: value.detach() * images + sums.get(name, 0.0) for name, value in numbers.items()}


def _check(means: Mapping[str, float], task: TaskInfo, epoch: int, plan: TrainingPlan) -> None:
    if not all(torch.isfinite(torch.tensor(value)) for value in means.values()):
        rates = ", ".join(str(group.lr) for group in plan.groups)
        named = ", ".join(f"{name} {value}" for name, value in means.items())
        raise ConfigurationError(
            f"training went out of bounds ({named}) in task {task.index + 1}, epoch {epoch + 1}; "
            f"lower the learning rate (now {rates})"
        )
