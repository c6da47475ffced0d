"""TENT (Wang et al., ICLR 2021): make the model sure of what it sees, by its norm layers alone.

    L = mean over the batch of H(p),  H = -Σ p log p,  p = softmax over the classes seen

One step a batch on weights and biases of all normalisation layers; the answer comes from the
forward pass that the step was computed from. Nothing is reset within a stream.

*Deviations*: the original normalises by the statistics of the test batch. A transformer's layer
norms have none; batch norms keep those of training here, since the model stays in its own mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from arc_cl.adapt._answers import answer, check, check_least, cross_entropy, readable
from arc_cl.adapt._borrowed import Borrowed, OptimizerName, with_gradients
from arc_cl.contracts import Adaptable
from arc_cl.core.decision import Decision
from arc_cl.core.detection import at_least_float32
from arc_cl.core.partition import TaskPartition


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of TENT. The default step is the authors' for ImageNet, in batches of 64."""

    lr: float = 2.5e-4
    """Step size."""
    optimizer: OptimizerName = "sgd"
    """`adam` has torch's default betas and epsilon."""
    momentum: float = 0.9
    """Momentum of SGD; Adam has no use for it."""
    steps: int = 1
    """Steps a batch; the answer comes from the forward pass of the last one."""

    def __post_init__(self) -> None:
        check_least(self, 0, "lr")
        check_least(self, 1, "steps")
        check(0 <= self.momentum < 1, "momentum", self.momentum, "0 or more, and below 1")
        choices = get_args(OptimizerName)
        check(self.optimizer in choices, "optimizer", self.optimizer, f"one of {choices}")


class Tent:
    """Changes the norm layers of the lent model from `start` to `finish`."""

    consumes: Literal["features", "images"] = "images"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def start(self, adaptable: Adaptable, partition: TaskPartition) -> None:
        self._adaptable = adaptable
        self._partition = partition
        self._norms = Borrowed(adaptable, "norms")
        how = self.settings
        self._optimizer = self._norms.optimizer(how.optimizer, how.lr, how.momentum)

    def predict(self, batch: Tensor) -> Decision:
        return with_gradients(self._predict, batch)

    def finish(self) -> None:
        self._norms.give_back()
        del self._adaptable, self._norms, self._optimizer

    def _predict(self, batch: Tensor) -> Decision:
        images_BCHW, finite_B = readable(batch)
        for _ in range(self.settings.steps):
            features_BD = self._adaptable.features(images_BCHW)
            logits_BK = at_least_float32(self._adaptable.classify(features_BD))
            if finite_B.any():
                trusted_MK = logits_BK[finite_B]
                self._norms.descend(cross_entropy(trusted_MK, trusted_MK).mean(), self._optimizer)
        return answer(logits_BK, self._partition, finite_B)


def create(settings: Settings) -> Tent:
    return Tent(settings)
