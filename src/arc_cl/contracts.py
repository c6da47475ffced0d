"""The protocols that the rooms meet in, and the plain values they pass; nothing inherits from them.

Learners, test-time methods, data sources and the protocol room are blind to each other; the
engine mediates between them through what is written here.

Shape legend, used in names everywhere: B batch, K classes seen, D features, N images,
H height, W width, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    """Where images come from. Knows nothing of tasks or transforms.

    The catalogue finds it as a module of `data.sources` with `create() -> DataSource`.
    """

    @property
    def class_names(self) -> tuple[str, ...]: ...

    def prepare(self, root: Path | None) -> None:
        """Make the data ready to read (download, unpack, render); cheap when it already is."""

    def arrays(self, split: Split) -> LabelledImages: ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """What every learner's `Settings` has; each learner adds its own fields in its own file."""

    lr: float
    """Learning rate."""
    epochs_first: int
    """Passes over the data of the first task."""
    epochs: int
    """Passes over the data of each later task."""
    batch_size: int
    """Images a step."""


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """What a learner may know of the task that begins: counts and places, never test images.

    Labels are positions in the class order, so the classes seen are 0 … seen_classes - 1.
    `tasks` and `classes` are those of the whole sequence: prompt pools and heads that are not
    grown are sized by them.
    """

    index: int
    seen_classes: int
    new_classes: int
    tasks: int
    classes: int

    @property
    def old_classes(self) -> int:
        return self.seen_classes - self.new_classes


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that learn at one rate."""

    parameters: tuple[nn.Parameter, ...]
    lr: float
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What the engine needs for one task: who learns how fast, and for how long."""

    groups: tuple[ParameterGroup, ...]
    optimizer: Literal["sgd", "adam"]
    batch_size: int
    schedule: tuple[float, ...]
    """One factor an epoch, on the rates of all groups; as many epochs as factors."""
    momentum: float = 0.0
    """Of SGD."""
    drop_last: bool = False
    """Leave out the last, incomplete batch of an epoch (unless it is the only one)."""

    @property
    def epochs(self) -> int:
        return len(self.schedule)


class TrainingImages(Protocol):
    """The images that a task was trained on, to look at once more when it ends.

    An image is known by its number in the training split.
    """

    def of_class(self, position: int) -> Tensor:
        """Numbers [N] of the images of one class: all of a new one, the kept ones of an old one."""

    def apply(self, function: Callable[[Tensor], Tensor], numbers_N: Tensor) -> Tensor:
        """`function` of those images [B,C,H,W] as they look at test time; no gradients, batches."""


class Adaptable(Protocol):
    """A trained classifier as a test-time method sees it."""

    def features(self, images_BCHW: Tensor) -> Tensor: ...

    def classify(self, features_BD: Tensor) -> Tensor:
        """Logits [B,K] of the classes seen so far."""

    def head(self) -> nn.Linear:
        """The linear layer behind `classify`; it may hold rows of classes not seen yet."""

    def parameters(self, scope: Scope) -> Iterable[tuple[str, nn.Parameter]]: ...


class Learner(Protocol):
    """A class-incremental method. It owns no loop, step, device or path.

    The catalogue finds it as a module of `learners` with a frozen dataclass `Settings` that
    extends `Training`, and `create(backbone: nn.Module, settings: Settings) -> Learner`.

    What a task needs and what follows from the state after the task before (a frozen teacher, say)
    is made by `begin_task` and need not be in `modules()`: a run that resumes loads the state
    after the last finished task, then begins the next one again with the same generator.
    """

    def begin_task(self, task: TaskInfo, generator: torch.Generator) -> None:
        """Grow what must grow: head, prompts, branches; fresh values come from `generator`."""

    def plan(self, task: TaskInfo) -> TrainingPlan: ...

    def loss(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The scalar to descend, and named numbers to log (detached, never read on the host)."""

    def end_task(self, task: TaskInfo, images: TrainingImages, generator: torch.Generator) -> None:
        """Herding, statistics, alignment: whatever follows the last epoch."""

    def rehearsal(self) -> Tensor:
        """Numbers [N] of the training images to be trained on again with the next task."""

    def adaptable(self) -> Adaptable: ...

    def modules(self) -> nn.Module:
        """All state that the checkpoint of a stage must hold."""


@runtime_checkable
class AsksFirst(Protocol):
    """A learner that asks its frozen backbone about the plain image before it uses prompts.

    The answer to an image never changes, so the engine keeps it wherever the image is the same.
    """

    def query(self, images_BCHW: Tensor) -> Tensor:
        """Queries [B,D]; no gradients."""

    def loss_given(
        self, images_BCHW: Tensor, queries_BD: Tensor, labels_B: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """`loss`, with the queries known."""

    def features_given(self, images_BCHW: Tensor, queries_BD: Tensor) -> Tensor:
        """The adaptable's `features`, with the queries known."""


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
