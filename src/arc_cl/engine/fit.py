"""The one training loop, for every learner, on Lightning Fabric."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD

from arc_cl.contracts import Learner, TaskInfo, TrainingPlan
from arc_cl.engine.images import DeviceImages
from arc_cl.engine.progress import Progress
from arc_cl.engine.runtime import Runtime
from arc_cl.errors import ConfigurationError


class _Loss(nn.Module):
    """A learner's loss as a module's forward, which is what Fabric wraps."""

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self.network = learner.modules()
        self._loss = learner.loss

    def forward(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self._loss(images_BCHW, labels_B)


def fit(
    runtime: Runtime,
    learner: Learner,
    task: TaskInfo,
    images: DeviceImages,
    labels_N: Tensor,
    progress: Progress,
) -> None:
    """Train one task: all epochs of the learner's plan, images in a fresh order each epoch."""
    plan = learner.plan(task)
    loss_of, optimizer = runtime.fabric.setup(_Loss(learner), _optimizer(plan))
    loss_of.train()
    for epoch in range(plan.epochs):
        generator = runtime.generator("order", task.index, epoch)
        order_N = torch.randperm(len(images), generator=generator)
        loss = torch.zeros(())
        for indices_B in torch.split(order_N, plan.batch_size):
            labels_B = labels_N[indices_B.to(labels_N.device)]
            loss, _ = loss_of(images.batch(indices_B), labels_B)
            optimizer.zero_grad()
            runtime.fabric.backward(loss)
            optimizer.step()
            progress.advance(len(indices_B) / (plan.epochs * len(images)), len(indices_B))
        _check(loss, task, epoch, plan)
    learner.modules().eval()


def _optimizer(plan: TrainingPlan) -> SGD:
    groups = [
        {"params": group.parameters, "lr": group.lr, "weight_decay": group.weight_decay}
        for group in plan.groups
    ]
    return SGD(groups, momentum=plan.momentum)


def _check(loss: Tensor, task: TaskInfo, epoch: int, plan: TrainingPlan) -> None:
    if not torch.isfinite(loss):
        rates = ", ".join(str(group.lr) for group in plan.groups)
        raise ConfigurationError(
            f"the training loss became {loss.item()} in task {task.index + 1}, epoch {epoch + 1}; "
            f"lower the learning rate (now {rates})"
        )
