"""CODA-Prompt: prefixes in a frozen transformer, each a weighted sum of learnt components.

    prompt  = Σ_m cos(query ⊙ attention_m, key_m) · component_m; its halves are keys and values
    loss    = cross-entropy over the classes of the task + orthogonality · mean((M Mᵀ − I)²)
    rate    = lr · cos(99π e / (200 (E − 1))) in epoch e of E

Each task brings components of its own, orthogonal to those before; training moves only these.
*Deviations* from the released code: all components are used, however many tasks (`remainder`); new
ones are orthogonal to trained ones too (`gram_schmidt`); the rate is not an epoch late (`delayed`)
and one epoch is allowed; the backbone needs no gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import cos, pi
from typing import Literal

import torch
from torch import Tensor, nn

from arc_cl.backbones import pools, prompting
from arc_cl.backbones.orthogonal import GramSchmidt, orthogonal_rows, penalty
from arc_cl.contracts import TaskInfo, Training, TrainingImages, TrainingPlan
from arc_cl.errors import ConfigurationError
from arc_cl.learners._prompted import Network, Prompted, check_layers, check_positive
from arc_cl.learners._schedules import epochs_of

_PARTS = ("attention", "keys", "components")


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """Of CODA-Prompt."""

    layers: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Layers with a prefix, counted from 0."""
    components: int = 100
    """Components a layer, for all tasks together."""
    prompt_length: int = 8
    """Rows of a component: one half for keys, the other for values."""
    orthogonality: float = 0.0
    """Weight of the penalty on components, keys and attention that are not orthogonal."""
    delayed: bool = False
    """The schedule comes one epoch late (released)."""
    remainder: Literal["spread", "dropped"] = "spread"
    """Components left over when tasks share: one more for the first tasks, or unused (released)."""
    gram_schmidt: GramSchmidt = "exact"
    """New components orthogonal to all before, or as if those were orthogonal (released)."""

    def __post_init__(self) -> None:
        check_positive(self, "components", "prompt_length")
        check_layers("layers", self.layers)
        if not self.layers:
            raise ConfigurationError("layers is empty, expected some layer; name one, such as 0")
        if self.prompt_length % 2:
            raise ConfigurationError(
                f"prompt_length is {self.prompt_length}, expected an even number: one half is "
                f"keys, the other values; add or take away one"
            )
        if self.orthogonality < 0:
            raise ConfigurationError(
                f"orthogonality is {self.orthogonality}, expected 0 or more; 0 is no penalty"
            )


class CODAPrompt:
    """The learner; see the module."""

    def __init__(self, network: Network, settings: Settings) -> None:
        self.settings = settings
        self._network = network
        self._task: TaskInfo

    def begin_task(self, task: TaskInfo, generator: torch.Generator) -> None:
        first, end = _share(self.settings, task)
        if task.index == 0:
            self._complete(task, generator)
        self._task = task
        self._network.begin(task)
        self._network.mark("new").fill_(False)[first:end] = True
        self._network.mark("used")[:end] = 1
        with torch.no_grad():
            for part in _PARTS:
                for rows_MX in self._network.prompt(part).flatten(2):
                    rows_MX[first:end] = orthogonal_rows(
                        rows_MX[:first], end - first, generator, self.settings.gram_schmidt
                    )

    def plan(self, task: TaskInfo) -> TrainingPlan:
        schedule = cosine(epochs_of(self.settings, task), self.settings.delayed)
        return self._network.plan(self.settings, schedule, drop_last=True)

    def query(self, images_BCHW: Tensor) -> Tensor:
        return prompting.query(self._network.vit, images_BCHW)

    def features_given(self, images_BCHW: Tensor, queries_BD: Tensor) -> Tensor:
        """All components so far count, and all learn; those to come are zero and get nothing."""
        return self._features(images_BCHW, queries_BD, map(self._network.prompt, _PARTS))

    def loss_given(
        self, images_BCHW: Tensor, queries_BD: Tensor, labels_B: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        parts = [self._only_new_learn(self._network.prompt(part)) for part in _PARTS]
        entropy = self._network.loss(self._features(images_BCHW, queries_BD, parts), labels_B)
        numbers = {"loss": entropy, "cross_entropy": entropy}
        if self.settings.orthogonality:
            used_M = self._network.mark("used")
            overlap = torch.stack([penalty(rows.flatten(2), used_M) for rows in parts]).sum()
            numbers["loss"] = entropy + self.settings.orthogonality * overlap
            numbers["orthogonality"] = overlap
        return numbers["loss"], {name: number.detach() for name, number in numbers.items()}

    def loss(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss_given(images_BCHW, self.query(images_BCHW), labels_B)

    def end_task(self, task: TaskInfo, images: TrainingImages, generator: torch.Generator) -> None:
        """Nothing follows."""

    def rehearsal(self) -> Tensor:
        return torch.empty(0, dtype=torch.int64)

    def adaptable(self) -> Prompted:
        return Prompted(self, self._network, self._task.seen_classes)

    def modules(self) -> nn.Module:
        return self._network

    def _complete(self, task: TaskInfo, generator: torch.Generator) -> None:
        how, width = self.settings, self._network.vit.num_features
        rows = (len(how.layers), how.components, width)
        self._network.complete(
            _head(width, task.classes, generator),
            {
                "attention": torch.zeros(rows),
                "keys": torch.zeros(rows),
                "components": torch.zeros(*rows[:2], how.prompt_length, width),
            },
            {
                "new": torch.zeros(how.components, dtype=torch.bool),
                "used": torch.zeros(how.components),
            },
        )

    def _only_new_learn(self, rows: Tensor) -> Tensor:
        """The same values, with gradients for the components of this task alone."""
        is_new = self._network.mark("new").view(1, -1, *[1] * (rows.dim() - 2))
        return torch.where(is_new, rows, rows.detach())

    def _features(self, images_BCHW: Tensor, queries_BD: Tensor, parts: Iterable[Tensor]) -> Tensor:
        keys_SBLD, values_SBLD = pools.weighted(queries_BD, *parts).chunk(2, dim=2)
        prefixes = {
            layer: (keys_SBLD[place], values_SBLD[place])
            for place, layer in enumerate(self.settings.layers)
        }
        return prompting.encode(self._network.vit, images_BCHW, prefixes=prefixes, leading=1)[:, 0]


def cosine(epochs: int, delayed: bool = False) -> tuple[float, ...]:
    """One factor an epoch; `delayed` uses the first twice and never comes to the last."""
    late = [max(epoch - 1, 0) if delayed else epoch for epoch in range(epochs)]
    return tuple(cos(99 * pi * epoch / (200 * max(epochs - 1, 1))) for epoch in late)


def create(backbone: nn.Module, settings: Settings) -> CODAPrompt:
    return CODAPrompt(Network(backbone, settings.layers), settings)


def _share(settings: Settings, task: TaskInfo) -> tuple[int, int]:
    """First and end of the components that belong to the task."""
    if settings.components < task.tasks:
        raise ConfigurationError(
            f"components is {settings.components}, expected at least one a task ({task.tasks} "
            f"tasks); raise it"
        )
    each, extra = divmod(settings.components, task.tasks)
    if settings.remainder == "dropped":
        extra = 0
    first, end = (index * each + min(index, extra) for index in (task.index, task.index + 1))
    return first, end


def _head(features: int, classes: int, generator: torch.Generator) -> nn.Linear:
    """As torch draws a linear layer: uniform, with bound 1/√D."""
    head = nn.Linear(features, classes, device="meta").to_empty(device="cpu")
    for parameter in head.parameters():
        nn.init.uniform_(parameter, -(features**-0.5), features**-0.5, generator=generator)
    return head
