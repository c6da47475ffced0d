"""The head that ARC adapts, with the optimiser's memory: all state, and the rules that move it.

The optimisers are torch's SGD and Adam to the letter, written out because the closed-form gradient
needs no graph, and because `replay` must reproduce them a block of steps at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from arc_cl.core.settings import ARCSettings

ADAM_BETAS = (0.9, 0.999)
ADAM_EPSILON = 1e-8


@dataclass
class HeadState:
    """Weights, optimiser memory and counters. Classes not seen yet keep their rows at the end."""

    weight: Tensor  # [R,D], R ≥ K
    bias: Tensor | None  # [R]
    first_weight: Tensor
    first_bias: Tensor | None
    memory: dict[str, Tensor] = field(default_factory=dict)  # like weight or bias, named by use
    steps: int = 0
    undone_steps: int = 0
    nonfinite_rows: int = 0
    norm_total: float = 0.0  # Σ ‖f‖² of the finite rows so far
    norm_rows: int = 0

    @classmethod
    def start(cls, weight: Tensor, bias: Tensor | None) -> HeadState:
        return cls(
            weight=weight.clone(),
            bias=None if bias is None else bias.clone(),
            first_weight=weight,
            first_bias=bias,
        )

    def restarted(self) -> HeadState:
        return HeadState.start(self.first_weight, self.first_bias)

    def logits(self, features_BD: Tensor, num_classes: int) -> Tensor:
        logits_BK = features_BD @ self.weight[:num_classes].T
        return logits_BK if self.bias is None else logits_BK + self.bias[:num_classes]

    def parameters(self) -> dict[str, Tensor]:
        named = {"weight": self.weight}
        return named if self.bias is None else {**named, "bias": self.bias}

    def drift(self) -> float:
        """‖W-W₀‖/‖W₀‖."""
        moved = float(torch.linalg.vector_norm(self.weight - self.first_weight))
        return moved / max(float(torch.linalg.vector_norm(self.first_weight)), 1e-30)

    def mean_squared_norm(self) -> float:
        return self.norm_total / self.norm_rows if self.norm_rows else 0.0

    def step_size(self, settings: ARCSettings) -> float:
        """lr, or lr over the running mean of ‖f‖² (plain lr as long as that mean is 0)."""
        if settings.step == "absolute":
            return settings.lr
        return settings.lr / (self.mean_squared_norm() or 1.0)

    def memory_of(self, use: str, name: str) -> Tensor:
        """The optimiser's tensor for one parameter, zero at first."""
        key = f"{use}.{name}"
        if key not in self.memory:
            self.memory[key] = torch.zeros_like(self.parameters()[name])
        return self.memory[key]

    def snapshot(self) -> HeadState:
        """A copy that later steps leave alone."""
        return replace(
            self,
            weight=self.weight.clone(),
            bias=None if self.bias is None else self.bias.clone(),
            memory={key: value.clone() for key, value in self.memory.items()},
        )

    def descend(self, gradients: dict[str, Tensor], settings: ARCSettings) -> None:
        """One optimiser step in place. Gradients have R rows or, without weight decay, K."""
        self.steps += 1
        rate = self.step_size(settings)
        for name, parameter in self.parameters().items():
            gradient = gradients[name]
            rows = len(gradient)
            part = parameter[:rows]
            if settings.weight_decay:
                gradient = gradient + settings.weight_decay * part
            if settings.optimizer == "adam":
                part -= rate * self._adam_direction(name, gradient)
            else:
                part -= rate * self._sgd_direction(name, gradient, settings.momentum)

    def _sgd_direction(self, name: str, gradient: Tensor, momentum: float) -> Tensor:
        if not momentum:
            return gradient
        velocity = self.memory_of("velocity", name)[: len(gradient)]
        return velocity.mul_(momentum).add_(gradient)

    def _adam_direction(self, name: str, gradient: Tensor) -> Tensor:
        first, second = ADAM_BETAS
        mean = self.memory_of("mean", name)[: len(gradient)]
        square = self.memory_of("square", name)[: len(gradient)]
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = square.sqrt().div_(math.sqrt(1 - second**self.steps)).add_(ADAM_EPSILON)
        return mean / (1 - first**self.steps) / scale
