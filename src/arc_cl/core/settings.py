"""The settings of ARC: every choice that the paper, its released code, or a user can make."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from arc_cl.errors import ConfigurationError

Optimizer = Literal["sgd", "adam"]
StepRule = Literal["absolute", "relative"]
Candidates = Literal["task", "cumulative"]
Ratio = Literal["normalised", "confidence"]
CorrectionRule = Literal["tss", "mask_newest"]


@dataclass(frozen=True, kw_only=True)
class ARCSettings:
    """What ARC does with a batch. Checked when made; `paper` and `released` are the presets."""

    retention: bool = True
    """Learn from past-task samples that the classifier is sure of."""
    correction: bool = True
    """Re-decide samples that look wrongly pulled to the newest task."""

    beta: float = 0.8
    """Retention needs a confidence above this."""
    gamma: float = 1.0
    """Correction needs a ratio below this; above 1 is meaningful."""
    temperature: float = 1.1
    """T of the task-based softmax score; 1 switches the temperature off."""

    cross_entropy: bool = True
    """Descend the cross-entropy with the pseudo-label. With both losses off it is used alone."""
    entropy: bool = True
    """Descend the entropy of the prediction."""
    label_smoothing: float = 0.0
    """Share of the pseudo-label that is spread over the other classes."""

    optimizer: Optimizer = "sgd"
    """`adam` has torch's default betas and epsilon, and no use for `momentum`."""
    lr: float = 1e-6
    """Step size."""
    momentum: float = 0.9
    """Momentum of SGD, without dampening."""
    weight_decay: float = 0.0
    """L2 decay, added to the gradient; reaches the rows of unseen classes too, as in torch."""
    step: StepRule = "absolute"
    """`relative` divides `lr` by the running mean of the features' squared norm."""

    max_drift: float | None = None
    """Guard: a step that carries ‖W-W₀‖/‖W₀‖ beyond this is undone. None: off."""
    step_warning: bool = True
    """Guard: warn once where the step is far too large for the features' norm."""

    past_only: bool = True
    """Retention looks only at samples predicted in a past task."""
    recompute: bool = True
    """Decide on the logits after the step rather than before it."""
    candidates: Candidates = "task"
    """After correction: the classes of the chosen task, or of all tasks up to it (`cumulative`)."""
    adapt_first_task: bool = False
    """Retention also where there is one task only."""
    ratio: Ratio = "normalised"
    """`normalised`: c/ĉ. `confidence`: c alone (the paper's ablation)."""
    correction_rule: CorrectionRule = "tss"
    """`mask_newest`: take the best past class (the naive rule that the paper argues against)."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, str(field.type), getattr(self, field.name))
        _check(0 <= self.beta <= 1, "beta", self.beta, "a confidence from 0 to 1")
        _check(self.gamma >= 0, "gamma", self.gamma, "a ratio of at least 0")
        _check(self.temperature > 0, "temperature", self.temperature, "above 0 (1 = no effect)")
        _check(0 <= self.label_smoothing < 1, "label_smoothing", self.label_smoothing, "in [0, 1)")
        _check(self.lr >= 0, "lr", self.lr, "at least 0")
        _check(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        _check(self.weight_decay >= 0, "weight_decay", self.weight_decay, "at least 0")
        if self.max_drift is not None:
            _check(self.max_drift > 0, "max_drift", self.max_drift, "above 0, or None for no guard")

    @classmethod
    def paper(cls, **changes: Any) -> Self:
        """The paper's Algorithm 1, every field pinned, no guards; changes on top."""
        return cls(**{**_PAPER, **changes})

    @classmethod
    def released(cls, **changes: Any) -> Self:
        """What the authors' released code does, every field pinned, no guards; changes on top."""
        return cls(**{**_PAPER, **_RELEASED, **changes})


_PAPER: dict[str, Any] = {
    "retention": True,
    "correction": True,
    "beta": 0.8,
    "gamma": 1.0,
    "temperature": 1.1,
    "cross_entropy": True,
    "entropy": True,
    "label_smoothing": 0.0,
    "optimizer": "sgd",
    "lr": 1e-6,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "step": "absolute",
    "max_drift": None,
    "step_warning": False,
    "past_only": True,
    "recompute": True,
    "candidates": "task",
    "adapt_first_task": False,
    "ratio": "normalised",
    "correction_rule": "tss",
}
_RELEASED: dict[str, Any] = {
    "past_only": False,
    "recompute": False,
    "candidates": "cumulative",
    "adapt_first_task": True,
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "Optimizer": get_args(Optimizer),
    "StepRule": get_args(StepRule),
    "Candidates": get_args(Candidates),
    "Ratio": get_args(Ratio),
    "CorrectionRule": get_args(CorrectionRule),
}


def _check(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ConfigurationError(f"ARCSettings({name}={value!r}): {name} must be {expected}.")


def _check_type(name: str, declared: str, value: object) -> None:
    if declared == "bool":
        _check(isinstance(value, bool), name, value, "True or False")
    elif declared in _CHOICES:
        choices = _CHOICES[declared]
        _check(value in choices, name, value, "one of " + ", ".join(map(repr, choices)))
    elif value is not None or "None" not in declared:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        _check(is_number and math.isfinite(value), name, value, "a finite number")  # type: ignore[arg-type]
