"""The protocols that the rooms meet in, and the plain values they pass; nothing inherits from them.

Learners, test-time methods, data sources and the protocol room are blind to each other; the
engine mediates between them through what is written here.

Shape legend, used in names everywhere: B batch, K classes seen, D features, N images,
H height, W width, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from arc_cl.core.decision import Decision
    from arc_cl.core.partition import TaskPartition

Split = Literal["train", "test"]
Scope = Literal["head", "head+prompts", "norms", "all"]


@dataclass(frozen=True, kw_only=True)
class LabelledImages:
    """Images as they are stored: uint8 [N,H,W,C], and int64 class indices [N]."""

    images_NHWC: NDArray[np.uint8]
    labels_N: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels_N)


@dataclass(frozen=True, kw_only=True)
class Example:
    """One image whose answer a test-time method changed, with the names of the classes."""

    image_HWC: NDArray[np.uint8]
    before: str
    after: str
    truth: str


class DataSource(Protocol):
    """Where images come from. Knows nothing of tasks or transforms."""

    @property
    def class_names(self) -> tuple[str, ...]: ...

    def prepare(self, root: Path | None) -> None:
        """Make the data ready to read (download, unpack, render); cheap when it already is."""

    def arrays(self, split: Split) -> LabelledImages: ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a learner is trained: what a recipe chooses."""

    lr: float
    epochs: int
    batch_size: int
    momentum: float = 0.9
    weight_decay_first: float = 5e-4
    weight_decay_later: float = 2e-4


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """What a learner may know of the task that begins: counts and places, never test images.

    Labels are positions in the class order, so the classes seen are 0 … seen_classes - 1.
    """

    index: int
    seen_classes: int
    new_classes: int

    @property
    def old_classes(self) -> int:
        return self.seen_classes - self.new_classes


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that learn at one rate."""

    parameters: tuple[nn.Parameter, ...]
    lr: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What the engine needs for one task: who learns how fast, and for how long."""

    groups: tuple[ParameterGroup, ...]
    epochs: int
    batch_size: int
    momentum: float


class Adaptable(Protocol):
    """A trained classifier as a test-time method sees it."""

    def features(self, images_BCHW: Tensor) -> Tensor: ...

    def classify(self, features_BD: Tensor) -> Tensor:
        """Logits [B,K] of the classes seen so far."""

    def head(self) -> nn.Linear:
        """The linear layer behind `classify`."""

    def parameters(self, scope: Scope) -> Iterable[tuple[str, nn.Parameter]]: ...


class Learner(Protocol):
    """A class-incremental method. It owns no loop, step, device or path.

    The catalogue finds it as a module of `learners` with
    `create(backbone: nn.Module, training: Training) -> Learner`.
    """

    def begin_task(self, task: TaskInfo, generator: torch.Generator) -> None:
        """Grow what must grow: head, prompts, branches."""

    def plan(self, task: TaskInfo) -> TrainingPlan: ...

    def loss(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The scalar to descend, and named numbers to log."""

    def end_task(self, task: TaskInfo) -> None:
        """Herding, statistics, alignment: whatever follows the last epoch."""

    def adaptable(self) -> Adaptable: ...

    def modules(self) -> nn.Module:
        """All state that a checkpoint must hold."""


class TestTimeMethod(Protocol):
    """A method that answers a stream of unlabelled test data and may learn from it.

    The catalogue finds it as a module of `adapt` with a frozen dataclass `Settings` and
    `create(settings: Settings) -> TestTimeMethod`.
    """

    consumes: Literal["features", "images"]

    def start(self, adaptable: Adaptable, partition: TaskPartition) -> None: ...

    def predict(self, batch: Tensor) -> Decision: ...

    def finish(self) -> None:
        """Give back what was borrowed."""


@runtime_checkable
class Replays(Protocol):
    """A test-time method that answers a stored stream at once, as if batch by batch."""

    def replay(self, stream: Tensor, batch_size: int) -> Decision: ...
