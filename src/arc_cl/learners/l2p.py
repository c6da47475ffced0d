"""L2P: prompts from a pool, chosen by the image, are put in as tokens before a frozen transformer.

    feature = mean of the prompts' own outputs
    loss    = cross-entropy over the classes of the task - pull · Σ_k mean cos(query, key_k)

*Deviations* from the released code: an image's prompts are chosen by its own query, in training
and at test time. Released (`selection="batch"`): those that most images of the batch would choose,
so that an answer depends on the batch, and ties that `torch.topk` breaks; here the mean similarity
does. One transformer answers the query and carries the prompts (released: two copies).
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
    check_positive,
    pulled_loss,
    uniform,
)
from arc_cl.learners._schedules import epochs_of


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """Of L2P."""

    pool: int = 10
    """Prompts in the pool."""
    prompt_length: int = 5
    """Tokens a prompt."""
    top_k: int = 5
    """Prompts an image."""
    pull: float = 0.1
    """Weight of the similarity between queries and the keys they chose."""
    selection: pools.Selection = "sample"
    """Prompts chosen for each image, or by vote of the batch (released)."""

    def __post_init__(self) -> None:
        check_positive(self, "pool", "prompt_length", "top_k")
        if self.top_k > self.pool:
            raise ConfigurationError(
                f"top_k is {self.top_k}, expected at most pool ({self.pool}); lower it, or raise "
                f"pool"
            )


class L2P:
    """The learner; see the module."""

    def __init__(self, network: Network, settings: Settings) -> None:
        self.settings = settings
        self._network = network
        self._task: TaskInfo

    def begin_task(self, task: TaskInfo, generator: torch.Generator) -> None:
        if task.index == 0:
            how, width = self.settings, self._network.vit.num_features
            self._network.complete(
                narrow_linear(width, task.classes, generator),
                {
                    "pool": uniform((how.pool, how.prompt_length, width), generator),
                    "keys": uniform((how.pool, width), generator),
                },
                marks={},
            )
        self._network.begin(task)
        self._task = task

    def plan(self, task: TaskInfo) -> TrainingPlan:
        return self._network.plan(self.settings, (1.0,) * epochs_of(self.settings, task))

    def query(self, images_BCHW: Tensor) -> Tensor:
        return prompting.query(self._network.vit, images_BCHW)

    def choose(self, queries_BD: Tensor) -> Tensor:
        """Indices of the prompts of each image [B,K], or of all images alike [1,K]."""
        similarity_BP = pools.similarity(queries_BD, self._network.prompt("keys"))
        return pools.select(similarity_BP, self.settings.top_k, self.settings.selection)

    def features_from(self, images_BCHW: Tensor, indices_RK: Tensor) -> Tensor:
        """Features with prompts that were chosen already; R is B or 1."""
        inserted_RPD = pools.inserted(self._network.prompt("pool"), indices_RK)
        end = 1 + inserted_RPD.shape[1]
        tokens_BND = prompting.encode(
            self._network.vit, images_BCHW, inserted_BPD=inserted_RPD, leading=end
        )
        return tokens_BND[:, 1:end].mean(dim=1)

    def loss_from(
        self, images_BCHW: Tensor, queries_BD: Tensor, labels_B: Tensor, indices_RK: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss with prompts that were chosen already; R is B or 1."""
        features_BD = self.features_from(images_BCHW, indices_RK)
        return pulled_loss(
            self._network, features_BD, queries_BD, labels_B, indices_RK, self.settings.pull
        )

    def features_given(self, images_BCHW: Tensor, queries_BD: Tensor) -> Tensor:
        return self.features_from(images_BCHW, self.choose(queries_BD))

    def loss_given(
        self, images_BCHW: Tensor, queries_BD: Tensor, labels_B: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss_from(images_BCHW, queries_BD, labels_B, self.choose(queries_BD))

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


def create(backbone: nn.Module, settings: Settings) -> L2P:
    return L2P(Network(backbone), settings)
