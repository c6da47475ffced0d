"""What the prompt learners share: a frozen transformer, one head over all classes, and prompts.

The backbone never learns and stays in eval mode, so that its answer to a plain image, the query,
never changes. There is one copy of it. What a loss must know of the task that is learnt are
*marks*: tensors that are changed in place, so that one compiled loss serves all tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arc_cl.backbones import pools
from arc_cl.backbones.heads import placed_like
from arc_cl.backbones.prompting import promptable
from arc_cl.contracts import AsksFirst, ParameterGroup, Scope, TaskInfo, Training, TrainingPlan
from arc_cl.errors import ConfigurationError
from arc_cl.learners._classifier import Classifier

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer


class Network(nn.ModuleDict):
    """{backbone, head, prompts}; head and prompts come with the first task.

    Marks follow from the task and are no part of the state dict.
    """

    def __init__(self, backbone: nn.Module, layers: tuple[int, ...] = ()) -> None:
        super().__init__({"backbone": promptable(backbone, layers).requires_grad_(False).eval()})

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self["backbone"].eval()
        return self

    @property
    def vit(self) -> VisionTransformer:
        return cast("VisionTransformer", self["backbone"])

    @property
    def linear(self) -> nn.Linear:
        return cast(nn.Linear, self["head"])

    def prompt(self, name: str) -> nn.Parameter:
        return self["prompts"].get_parameter(name)

    def mark(self, name: str) -> Tensor:
        return self["prompts"].get_buffer(name)

    def complete(
        self, head: nn.Linear, prompts: dict[str, Tensor], marks: dict[str, Tensor]
    ) -> None:
        """Add what learns, on the device and in the type of the backbone."""
        self["head"] = placed_like(head, self.vit)
        self["prompts"] = nn.Module()
        for name, value in prompts.items():
            self["prompts"].register_parameter(name, nn.Parameter(value))
        for name, value in (marks | {"new_classes": torch.zeros(head.out_features)}).items():
            self["prompts"].register_buffer(name, value, persistent=False)
        placed_like(self["prompts"], self.vit)

    def begin(self, task: TaskInfo) -> None:
        self.mark("new_classes").fill_(-torch.inf)[task.old_classes : task.seen_classes] = 0

    def loss(self, features_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Cross-entropy over the classes of the task alone: all others have logits of -∞."""
        return cross_entropy(self.linear(features_BD) + self.mark("new_classes"), labels_B)

    def plan(
        self, settings: Training, schedule: tuple[float, ...], drop_last: bool = False
    ) -> TrainingPlan:
        """Adam on head and prompts, without decay."""
        learning = (*self.linear.parameters(), *self["prompts"].parameters())
        return TrainingPlan(
            groups=(ParameterGroup(parameters=learning, lr=settings.lr),),
            optimizer="adam",
            batch_size=settings.batch_size,
            schedule=schedule,
            drop_last=drop_last,
        )


@dataclass(frozen=True)
class Prompted:
    """A prompt learner as a test-time method sees it."""

    learner: AsksFirst
    network: Network
    seen_classes: int

    def features(self, images_BCHW: Tensor) -> Tensor:
        return self.learner.features_given(images_BCHW, self.learner.query(images_BCHW))

    def classify(self, features_BD: Tensor) -> Tensor:
        logits_BK: Tensor = self.network.linear(features_BD)[:, : self.seen_classes]
        return logits_BK

    def head(self) -> nn.Linear:
        return self.network.linear

    def parameters(self, scope: Scope) -> Iterator[tuple[str, nn.Parameter]]:
        if scope == "all":
            yield from self.network.named_parameters()
        elif scope == "head+prompts":
            yield from self.network["head"].named_parameters(prefix="head")
            yield from self.network["prompts"].named_parameters(prefix="prompts")
        else:
            yield from Classifier(self.network).parameters(scope)


def pulled_loss(
    network: Network,
    features_BD: Tensor,
    queries_BD: Tensor,
    labels_B: Tensor,
    indices_RK: Tensor,
    weight: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the task, less `weight` times the similarity of queries to chosen keys."""
    entropy = network.loss(features_BD, labels_B)
    pull = pools.pull(pools.similarity(queries_BD, network.prompt("keys")), indices_RK)
    loss = entropy - weight * pull
    numbers = {"loss": loss, "cross_entropy": entropy, "similarity": pull}
    return loss, {name: number.detach() for name, number in numbers.items()}


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Entries drawn from -1 to 1."""
    return torch.empty(shape).uniform_(-1, 1, generator=generator)


def check_positive(settings: Training, *names: str) -> None:
    for name in names:
        if (value := getattr(settings, name)) < 1:
            raise ConfigurationError(f"{name} is {value}, expected 1 or more; give a larger one")


def check_layers(name: str, layers: tuple[int, ...]) -> None:
    if min(layers, default=0) < 0 or len(set(layers)) < len(layers):
        raise ConfigurationError(
            f"{name} is {layers}, expected different layers, counted from 0; name each layer once"
        )
