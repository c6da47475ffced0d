"""DualPrompt: prefixes in a frozen transformer, general ones and those of the image's task.

    feature = CLS; general prefixes in the first layers, one expert prefix of the pool in the next
    loss    = cross-entropy over the classes of the task - pull · mean cos(query, key of the task)

Training uses the task's own expert, which starts as a copy of the one before; at test time the key
nearest to the query decides. *Deviations* from the released code: as many experts as tasks, of
which those not trained yet are never chosen (released: `pool=10`, all choosable; later tasks choose
by key in training too); chosen for each image (released: `selection="batch"`); keys and values go
to their own rows (released: `prefix_order="scrambled"`, see `pools.prefix_pairs`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arc_cl.backbones import pools, prompting
from arc_cl.backbones.heads import narrow_linear
from arc_cl.contracts import TaskInfo, Training, TrainingImages, TrainingPlan
from arc_cl.errors import ConfigurationError
from arc_cl.learners._prompted import (
    Network,
    Prompted,
    check_layers,
    check_positive,
    pulled_loss,
    uniform,
)
from arc_cl.learners._schedules import epochs_of


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """Of DualPrompt."""

    general_layers: tuple[int, ...] = (0, 1)
    """Layers with a prefix for every image, counted from 0."""
    general_length: int = 5
    """Keys and values of a general prefix."""
    expert_layers: tuple[int, ...] = (2, 3, 4)
    """Layers with a prefix by task, counted from 0."""
    expert_length: int = 5
    """Keys and values of an expert prefix."""
    pool: int = 0
    """Experts; 0 makes one a task, of which only those of tasks seen are chosen (released: 10)."""
    pull: float = 0.1
    """Weight of the similarity between queries and the key of their expert."""
    selection: pools.Selection = "sample"
    """Expert chosen for each image, or by vote of the batch (released)."""
    prefix_order: pools.PrefixOrder = "permuted"
    """Keys and values in their own rows, or mixed across the batch (released)."""
    transfer: bool = True
    """An expert starts as a copy of the one before."""

    def __post_init__(self) -> None:
        check_positive(self, "general_length", "expert_length")
        check_layers("general_layers", self.general_layers)
        check_layers("expert_layers", self.expert_layers)
        if not self.expert_layers or set(self.expert_layers) & set(self.general_layers):
            raise ConfigurationError(
                f"expert_layers is {self.expert_layers}, expected some layer, and none of "
                f"general_layers ({self.general_layers}); give each layer one kind of prefix"
            )
        if self.pool < 0:
            raise ConfigurationError(
                f"pool is {self.pool}, expected 0 (one expert a task) or more; use 0"
            )


class DualPrompt:
    """The learner; see the module."""

    def __init__(self, network: Network, settings: Settings) -> None:
        self.settings = settings
        self._network = network
        self._task: TaskInfo

    def begin_task(self, task: TaskInfo, generator: torch.Generator) -> None:
        self._task = task
        self._has_own = task.index < self._experts
        if task.index == 0:
            self._complete(task, generator)
        elif self.settings.transfer and self._has_own:
            with torch.no_grad():
                experts_S2PLD = self._network.prompt("experts")
                experts_S2PLD[:, :, task.index] = experts_S2PLD[:, :, task.index - 1]
        self._network.begin(task)
        self._network.mark("own").fill_(task.index)
        if not self.settings.pool:
            self._network.mark("trained")[: task.index + 1] = 0

    def plan(self, task: TaskInfo) -> TrainingPlan:
        return self._network.plan(self.settings, (1.0,) * epochs_of(self.settings, task))

    def query(self, images_BCHW: Tensor) -> Tensor:
        return prompting.query(self._network.vit, images_BCHW)

    def choose(self, queries_BD: Tensor) -> Tensor:
        """The index of the expert of each image [B,1], or of all images alike [1,1]."""
        similarity_BP = pools.similarity(queries_BD, self._network.prompt("keys"))
        candidates_BP = similarity_BP + self._network.mark("trained")
        return pools.select(candidates_BP, 1, self.settings.selection)

    def features_from(self, images_BCHW: Tensor, indices_R1: Tensor) -> Tensor:
        """Features with experts that were chosen already; R is B or 1."""
        how = self.settings
        general_S2LD = self._network.prompt("general")
        chosen_S2RLD = self._network.prompt("experts").index_select(2, indices_R1[:, 0])
        keys_SRLD, values_SRLD = pools.prefix_pairs(
            chosen_S2RLD, len(images_BCHW), how.prefix_order
        )
        prefixes = {
            layer: (general_S2LD[place, 0][None], general_S2LD[place, 1][None])
            for place, layer in enumerate(how.general_layers)
        } | {
            layer: (keys_SRLD[place], values_SRLD[place])
            for place, layer in enumerate(how.expert_layers)
        }
        return prompting.encode(self._network.vit, images_BCHW, prefixes=prefixes, leading=1)[:, 0]

    def loss_from(
        self, images_BCHW: Tensor, queries_BD: Tensor, labels_B: Tensor, indices_R1: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss with experts that were chosen already; R is B or 1."""
        features_BD = self.features_from(images_BCHW, indices_R1)
        return pulled_loss(
            self._network, features_BD, queries_BD, labels_B, indices_R1, self.settings.pull
        )

    def features_given(self, images_BCHW: Tensor, queries_BD: Tensor) -> Tensor:
        return self.features_from(images_BCHW, self.choose(queries_BD))

    def loss_given(
        self, images_BCHW: Tensor, queries_BD: Tensor, labels_B: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        indices_R1 = self._network.mark("own") if self._has_own else self.choose(queries_BD)
        return self.loss_from(images_BCHW, queries_BD, labels_B, indices_R1)

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

    @property
    def _experts(self) -> int:
        return self.settings.pool or self._task.tasks

    def _complete(self, task: TaskInfo, generator: torch.Generator) -> None:
        how, width = self.settings, self._network.vit.num_features
        general = (len(how.general_layers), 2, how.general_length, width)
        experts = (len(how.expert_layers), 2, self._experts, how.expert_length, width)
        self._network.complete(
            narrow_linear(width, task.classes, generator),
            {
                "general": uniform(general, generator),
                "experts": uniform(experts, generator),
                "keys": uniform((self._experts, width), generator),
            },
            {
                "own": torch.zeros(1, 1, dtype=torch.int64),
                "trained": torch.full((self._experts,), 0.0 if how.pool else -torch.inf),
            },
        )


def create(backbone: nn.Module, settings: Settings) -> DualPrompt:
    return DualPrompt(Network(backbone, settings.general_layers + settings.expert_layers), settings)
