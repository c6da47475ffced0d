"""SLCA: a slow learner (backbone 1e-4, head 1e-2), then classifier alignment.

Each task trains the whole backbone and a head of its own by cross-entropy over the new classes
alone; older heads rest. Then each new class leaves a Gaussian of its features, and (from the
second task on) all heads are aligned on samples of them: see `_alignment`. The aligned head
answers; the next task starts from the heads before their alignment.

*Deviations*: classes find their task by lookup, not by division (unequal tasks work); a
covariance is factored once, in float64; no pass over the training set after each epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arc_cl.backbones.heads import feature_count, narrow_linear, placed_like
from arc_cl.contracts import ParameterGroup, TaskInfo, Training, TrainingImages, TrainingPlan
from arc_cl.errors import ConfigurationError
from arc_cl.learners._alignment import Alignment, ClassGaussians, align, mean_scales
from arc_cl.learners._classifier import Classifier
from arc_cl.learners._schedules import epochs_of, multi_step

_LEAST: dict[str, float] = {
    "lr_backbone": 0.0,
    "epochs_first": 1,
    "epochs": 1,
    "batch_size": 1,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "lr_decay": 0.0,
    "alignment_epochs": 0,
    "alignment_samples": 1,
    "alignment_batch": 1,
    "alignment_lr": 0.0,
    "logit_norm": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    lr: float = 1e-2
    """Learning rate of the newest head."""
    lr_backbone: float = 1e-4
    """Learning rate of the backbone; 0 leaves it as it is."""
    momentum: float = 0.9
    """Of SGD, in training and alignment."""
    weight_decay: float = 5e-4
    """In training and alignment."""
    milestones: tuple[int, ...] = ()
    """Epochs after which both rates are multiplied by `lr_decay`, in every task."""
    lr_decay: float = 0.1
    """Factor on both rates at each milestone."""
    alignment_epochs: int = 3
    """Rounds of classifier alignment after each task but the first; 0 is none."""
    alignment_samples: int = 256
    """Features drawn of each class, each round."""
    alignment_batch: int = 256
    """Features a step of the alignment."""
    alignment_lr: float = 1e-2
    """Its first learning rate; a cosine over the rounds."""
    logit_norm: float = 0.1
    """Temperature of the normalised logits in the alignment; 0 is no normalisation."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigurationError(f"lr is {self.lr}, expected more than 0; raise it")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not value >= least:
                raise ConfigurationError(f"{name} is {value}, expected {least:g} or more; raise it")


class SLCA:
    """The learner; see the module.

    `stage_heads` in its network are the heads as training left them; `head`, which answers, is
    made of them when a task begins, and again (then aligned) when it ends.
    """

    def __init__(self, backbone: nn.Module, settings: Settings) -> None:
        self.settings = settings
        self._features = feature_count(backbone)
        self._network = nn.ModuleDict(
            {
                "backbone": backbone,
                "stage_heads": nn.ModuleList(),
                "statistics": ClassGaussians(self._features, _like(backbone)),
            }
        )

    def begin_task(self, task: TaskInfo, generator: torch.Generator) -> None:
        for old in self._heads():
            old.requires_grad_(False)
        new = narrow_linear(self._features, task.new_classes, generator)
        self._stage_heads().append(placed_like(new, self._network["backbone"]))
        self._recall()

    def plan(self, task: TaskInfo) -> TrainingPlan:
        how = self.settings
        groups = []
        if how.lr_backbone > 0:
            groups.append(_group(self._network["backbone"], how.lr_backbone, how.weight_decay))
        groups.append(_group(self._heads()[-1], how.lr, how.weight_decay))
        return TrainingPlan(
            groups=tuple(group for group in groups if group.parameters),
            optimizer="sgd",
            momentum=how.momentum,
            batch_size=how.batch_size,
            schedule=multi_step(epochs_of(how, task), how.milestones, how.lr_decay),
        )

    def loss(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        *old, newest = self._heads()
        learns = self.settings.lr_backbone > 0 and torch.is_grad_enabled()
        with torch.set_grad_enabled(learns):
            features_BD = self._network["backbone"](images_BCHW)
        loss = cross_entropy(newest(features_BD), labels_B - sum(head.out_features for head in old))
        return loss, {"loss": loss.detach()}

    def end_task(self, task: TaskInfo, images: TrainingImages, generator: torch.Generator) -> None:
        features = self.adaptable().features
        statistics = self._statistics()
        new = range(len(statistics), task.seen_classes)
        statistics.append(images.apply(features, images.of_class(position)) for position in new)
        self._recall()
        if task.index > 0 and self.settings.alignment_epochs > 0:
            self._align(generator)

    def rehearsal(self) -> Tensor:
        return torch.empty(0, dtype=torch.int64)

    def adaptable(self) -> Classifier:
        parts = {name: self._network[name] for name in ("backbone", "head")}
        return Classifier(nn.ModuleDict(parts))

    def modules(self) -> nn.Module:
        return self._network

    def _align(self, generator: torch.Generator) -> None:
        how = self.settings
        sizes = [head.out_features for head in self._heads()]
        statistics, scales_K = self._statistics(), mean_scales(sizes)
        samples = (
            statistics.sample(scales_K, how.alignment_samples, generator)
            for _ in range(how.alignment_epochs)
        )
        alignment = Alignment(
            epochs=how.alignment_epochs,
            batch_size=how.alignment_batch,
            lr=how.alignment_lr,
            momentum=how.momentum,
            weight_decay=how.weight_decay,
            temperature=how.logit_norm,
        )
        with torch.enable_grad():
            align(self.adaptable().head(), sizes, samples, alignment)

    def _recall(self) -> None:
        """The head that answers becomes the stage heads, one below the other."""
        heads = list(self._heads())
        weight_KD = torch.cat([head.weight.detach() for head in heads])
        head = nn.Linear(self._features, len(weight_KD), device="meta").to_empty(device="cpu")
        head = head.to(weight_KD.device, weight_KD.dtype)
        with torch.no_grad():
            head.weight.copy_(weight_KD)
            head.bias.copy_(torch.cat([head.bias.detach() for head in heads]))
        self._network["head"] = head

    def _stage_heads(self) -> nn.ModuleList:
        heads = self._network["stage_heads"]
        assert isinstance(heads, nn.ModuleList)
        return heads

    def _heads(self) -> list[nn.Linear]:
        return [head for head in self._stage_heads() if isinstance(head, nn.Linear)]

    def _statistics(self) -> ClassGaussians:
        statistics = self._network["statistics"]
        assert isinstance(statistics, ClassGaussians)
        return statistics


def _group(part: nn.Module, lr: float, weight_decay: float) -> ParameterGroup:
    learning = (parameter for parameter in part.parameters() if parameter.requires_grad)
    return ParameterGroup(parameters=tuple(learning), lr=lr, weight_decay=weight_decay)


def _like(backbone: nn.Module) -> Tensor:
    """A tensor of the device and dtype that new parameters must have."""
    return next(backbone.parameters(), torch.empty(0))


def create(backbone: nn.Module, settings: Settings) -> SLCA:
    return SLCA(backbone, settings)
