"""CoTTA (Wang et al., CVPR 2022): a student learns from its own slow teacher, on all parameters.

    target   teacher(x); where the source model is unsure, the mean over random views of x
    L        mean over the batch of -Σ softmax(target) log softmax(student(x))
    teacher ← α·teacher + (1-α)·student;  then each weight of the student is the source's
              again with probability `restore`;  the answer is the target (before the step)

*Deviations*: the views have no blur, hue and gamma, and their colours move in units of the image
(`_augment`); the model stays in its own mode (the original lets batch norms and dropout train).
Draws are made on the model's device, so the answers differ a little between kinds of device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args

import torch
from torch import Tensor

from arc_cl.adapt._answers import answer, check, check_least, cross_entropy, readable
from arc_cl.adapt._augment import Strengths, augmented
from arc_cl.adapt._borrowed import Borrowed, OptimizerName, with_gradients
from arc_cl.contracts import Adaptable
from arc_cl.core.decision import Decision
from arc_cl.core.detection import at_least_float32
from arc_cl.core.partition import TaskPartition


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of CoTTA: the authors' for CIFAR-100, with a step of ours."""

    lr: float = 1e-4
    """Step size. (The authors: Adam 1e-3 on CIFAR, SGD 1e-2 on ImageNet; none on transformers.)"""
    optimizer: OptimizerName = "sgd"
    """`adam` has torch's default betas and epsilon."""
    momentum: float = 0.9
    """Momentum of SGD; Adam has no use for it."""
    teacher_decay: float = 0.999
    """α: what the teacher keeps of itself a batch."""
    threshold: float = 0.72
    """Views are made for a batch whose mean confidence under the source model is below this.

    Without them there is little to learn: the student starts as its own teacher."""
    views: int = 32
    """Random views of each image."""
    restore: float = 0.01
    """Probability with which a weight goes back to the source's after a step."""
    images_at_once: int = 256
    """Views of several kinds share a forward pass as long as they are no more than this."""
    flip: bool = True
    """Views: mirror half of them."""
    turn: float = 8.0
    """Views: turned by up to this many degrees."""
    zoom: float = 0.05
    """Views: larger or smaller by up to this share."""
    shift: float = 0.0625
    """Views: moved by up to this share of width and height."""
    brightness: float = 0.2
    """Views: lighter or darker by up to this share of the image's standard deviation."""
    contrast: float = 0.15
    """Views: more or less contrast by up to this share."""
    saturation: float = 0.25
    """Views: more or less colour by up to this share."""
    noise: float = 0.01
    """Views: standard deviation of the noise, in the units of a normalised image."""
    seed: int = 0
    """Of views and restored weights."""

    def __post_init__(self) -> None:
        check_least(self, 0, "lr", "turn", "shift", "brightness", "contrast", "saturation", "noise")
        check_least(self, 0, "seed")
        check_least(self, 1, "views", "images_at_once")
        for name in ("teacher_decay", "threshold", "restore"):
            value = getattr(self, name)
            check(0 <= value <= 1, name, value, "from 0 to 1")
        for name in ("momentum", "zoom"):
            value = getattr(self, name)
            check(0 <= value < 1, name, value, "0 or more, and below 1")
        choices = get_args(OptimizerName)
        check(self.optimizer in choices, "optimizer", self.optimizer, f"one of {choices}")

    @property
    def strengths(self) -> Strengths:
        return Strengths(
            flip=self.flip,
            turn=self.turn,
            zoom=self.zoom,
            shift=self.shift,
            brightness=self.brightness,
            contrast=self.contrast,
            saturation=self.saturation,
            noise=self.noise,
        )


class CoTTA:
    """Three sets of weights from `start` to `finish`; the lent model itself is the student."""

    consumes: Literal["features", "images"] = "images"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def start(self, adaptable: Adaptable, partition: TaskPartition) -> None:
        self._adaptable = adaptable
        self._partition = partition
        # Not every learner counts its prompts among "all".
        self._student = Borrowed(adaptable, "all", "head+prompts")
        self._teacher = self._student.copies()
        how = self.settings
        self._optimizer = self._student.optimizer(how.optimizer, how.lr, how.momentum)
        self._generator = torch.Generator(self._teacher[0].device).manual_seed(how.seed)

    def predict(self, batch: Tensor) -> Decision:
        return with_gradients(self._predict, batch)

    def finish(self) -> None:
        self._student.give_back()
        del self._adaptable, self._student, self._teacher, self._optimizer

    def _predict(self, batch: Tensor) -> Decision:
        images_BCHW, finite_B = readable(batch)
        unsure = self._is_unsure(images_BCHW, finite_B)
        with self._student.holding(self._teacher):
            target_BK = self._over_views(images_BCHW) if unsure else self._logits(images_BCHW)
        if finite_B.any():
            loss_B = cross_entropy(target_BK, self._logits(images_BCHW))
            self._student.descend(loss_B[finite_B].mean(), self._optimizer)
            self._follow()
            self._restore()
        return answer(target_BK, self._partition, finite_B)

    def _logits(self, images_BCHW: Tensor) -> Tensor:
        features_BD = self._adaptable.features(images_BCHW)
        return at_least_float32(self._adaptable.classify(features_BD))

    def _is_unsure(self, images_BCHW: Tensor, finite_B: Tensor) -> bool:
        with self._student.holding(self._student.source):
            confidence_B = self._logits(images_BCHW).softmax(dim=1).amax(dim=1)
        return bool(confidence_B[finite_B].mean() < self.settings.threshold)

    def _over_views(self, images_BCHW: Tensor) -> Tensor:
        """The mean logits over the random views."""
        views, batch = self.settings.views, len(images_BCHW)
        chunks = ceil(views / max(1, self.settings.images_at_once // batch))
        total_BK = torch.zeros((), device=images_BCHW.device)
        for chunk in range(chunks):
            count = views * (chunk + 1) // chunks - views * chunk // chunks
            many_NCHW = images_BCHW.repeat(count, 1, 1, 1)
            logits_NK = self._logits(augmented(many_NCHW, self.settings.strengths, self._generator))
            total_BK = total_BK + logits_NK.unflatten(0, (count, batch)).sum(dim=0)
        return total_BK / views

    @torch.no_grad()
    def _follow(self) -> None:
        for slow, fast in zip(self._teacher, self._student.parameters, strict=True):
            slow.lerp_(fast, 1 - self.settings.teacher_decay)

    @torch.no_grad()
    def _restore(self) -> None:
        """Draws come parameter by parameter, in their order."""
        for weight, source in zip(self._student.parameters, self._student.source, strict=True):
            draws = torch.rand(weight.shape, generator=self._generator, device=weight.device)
            weight.copy_(torch.where(draws < self.settings.restore, source, weight))


def create(settings: Settings) -> CoTTA:
    return CoTTA(settings)
