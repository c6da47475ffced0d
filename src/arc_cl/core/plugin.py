"""`ARC`: the plug-in. A head goes in; features are answered, and the head repairs itself.

The head that was passed is never modified: ARC works on a copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from arc_cl.core.decision import Decision, Observation, decide
from arc_cl.core.head import HeadState
from arc_cl.core.partition import TaskPartition
from arc_cl.core.replay import replay
from arc_cl.core.settings import ARCSettings
from arc_cl.core.step import advance
from arc_cl.errors import ARCWarning, CompatibilityError, ConfigurationError

if TYPE_CHECKING:
    from arc_cl.core.wrap import WrappedModel

Head = nn.Linear | tuple[Tensor, Tensor | None]
_COUNTERS = ("steps", "undone_steps", "nonfinite_rows", "norm_total", "norm_rows")
# The logits of a row move by about rate·‖f‖²·gradient a step. A tenth of that, built up over the
# memory of the momentum, is where heads begin to be ruined (docs/log.md).
_TOO_FAR = 0.5


class ARC:
    """Adaptive Retention & Correction on a linear head.

    arc = ARC(model.fc, tasks=[10] * 10)
    decision = arc(features)          # adapts, corrects, returns a Decision
    decision = arc.replay(features)   # a whole stream at once, with the same result
    """

    def __init__(
        self,
        head: Head,
        *,
        tasks: TaskPartition | Sequence[int],
        settings: ARCSettings | None = None,
    ) -> None:
        self.settings = ARCSettings() if settings is None else settings
        if not isinstance(self.settings, ARCSettings):
            raise ConfigurationError(f"settings={settings!r}: expected an ARCSettings.")
        self.partition = TaskPartition.parse(tasks)
        weight, bias = _checked_head(head, self.partition)
        self._state = HeadState.start(weight, bias)
        self._warned: set[str] = set()

    @staticmethod
    def wrap(
        model: nn.Module,
        *,
        tasks: TaskPartition | Sequence[int],
        settings: ARCSettings | None = None,
        head: str | None = None,
    ) -> WrappedModel:
        """A module that takes images and returns a `Decision`; `model` itself is left as it is.

        The head is found in timm and torchvision models; for others, `head` names the linear layer.
        """
        from arc_cl.core.wrap import WrappedModel

        return WrappedModel(model, tasks=tasks, settings=settings, head=head)

    @property
    def weight(self) -> Tensor:
        """The adapted weight, a copy."""
        return self._state.weight.clone()

    @property
    def bias(self) -> Tensor | None:
        """The adapted bias, a copy; None where the head has none."""
        return None if self._state.bias is None else self._state.bias.clone()

    @property
    def steps(self) -> int:
        """Steps taken since the start or the last reset."""
        return self._state.steps

    @property
    def undone_steps(self) -> int:
        """Steps undone because they went beyond `max_drift`."""
        return self._state.undone_steps

    @property
    def nonfinite_rows(self) -> int:
        """Rows answered without being trusted, because they held NaN or infinite entries."""
        return self._state.nonfinite_rows

    @property
    def drift(self) -> float:
        """How far the weight has moved: ‖W-W₀‖/‖W₀‖."""
        return self._state.drift()

    @torch.no_grad()
    def __call__(self, features: Tensor) -> Decision:
        """Answer a batch of features [B,D], and learn from it."""
        features_BD = self._checked_features(features)
        with torch.autocast(features_BD.device.type, enabled=False):
            seen = advance(self._state, features_BD, self.partition, self.settings)
            return self._answered(seen, features)

    @torch.no_grad()
    def replay(self, features: Tensor, batch_size: int = 1) -> Decision:
        """Answer a whole stream [N,D]: the same as calling batch by batch, but fast."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigurationError(
                f"replay(batch_size={batch_size!r}): expected a whole number of at least 1."
            )
        features_ND = self._checked_features(features)
        with torch.autocast(features_ND.device.type, enabled=False):
            seen = replay(self._state, features_ND, self.partition, self.settings, batch_size)
            return self._answered(seen, features)

    def reset(self) -> None:
        """Back to the head as given."""
        self._state = self._state.restarted()
        self._warned.clear()

    def to(self, device: torch.device | str) -> ARC:
        """Move the adapted head and all state to a device; returns itself."""
        self.load_state_dict({key: value.to(device) for key, value in self.state_dict().items()})
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """All that a restart needs, as plain tensors (safe for torch.save and safetensors)."""
        state = self._state
        tensors = {"weight": state.weight, "first_weight": state.first_weight}
        if state.bias is not None and state.first_bias is not None:
            tensors |= {"bias": state.bias, "first_bias": state.first_bias}
        tensors |= {f"memory.{key}": value for key, value in state.memory.items()}
        tensors = {key: value.clone() for key, value in tensors.items()}
        for name in _COUNTERS:
            tensors[name] = torch.tensor(getattr(state, name), dtype=torch.float64)
        tensors["task_of_class"] = torch.tensor(self.partition.task_of_class)
        return tensors

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state_dict` was taken, bit by bit."""
        self._check_state(state)
        loaded = HeadState(
            weight=state["weight"].clone(),
            bias=state["bias"].clone() if "bias" in state else None,
            first_weight=state["first_weight"].clone(),
            first_bias=state["first_bias"].clone() if "first_bias" in state else None,
            memory={
                key.removeprefix("memory."): value.clone()
                for key, value in state.items()
                if key.startswith("memory.")
            },
        )
        for name in _COUNTERS:
            kind = type(getattr(loaded, name))
            setattr(loaded, name, kind(state[name].item()))
        self._state = loaded

    def _check_state(self, state: Mapping[str, Tensor]) -> None:
        own = self.state_dict()
        needed = {key for key in own if not key.startswith("memory.")}
        missing = sorted(needed - state.keys())
        unknown = sorted(k for k in state.keys() - needed if not k.startswith("memory."))
        if missing or unknown:
            raise CompatibilityError(
                f"This is not the state of such an ARC: missing {missing}, unknown {unknown}. "
                "Pass what state_dict() returned for a head of the same kind."
            )
        for key in ("weight", "first_weight", "bias", "first_bias", "task_of_class"):
            if key in own and state[key].shape != own[key].shape:
                raise CompatibilityError(
                    f"{key} in the state is {list(state[key].shape)}, here it is "
                    f"{list(own[key].shape)}: make the ARC with the head and tasks that were saved."
                )
        if tuple(state["task_of_class"].tolist()) != self.partition.task_of_class:
            raise CompatibilityError(
                "The state belongs to other tasks: make the ARC with the tasks it was saved from."
            )

    def _checked_features(self, features: Tensor) -> Tensor:
        """Features as the head wants them: [B,D], its dtype and device."""
        weight = self._state.weight
        if not isinstance(features, Tensor):
            raise CompatibilityError(
                f"features are a {type(features).__name__}: expected a torch.Tensor [B, D]; "
                "torch.as_tensor makes one of a numpy array."
            )
        if not features.is_floating_point():
            raise CompatibilityError(
                f"features have dtype {features.dtype}: expected floating-point features, the "
                "input of the head (call .float() if whole numbers are meant)."
            )
        if features.ndim != 2 or features.shape[1] != weight.shape[1]:
            raise CompatibilityError(
                f"features have shape {list(features.shape)}: the head takes [B, "
                f"{weight.shape[1]}], one row an image."
            )
        return features.detach().to(device=weight.device, dtype=weight.dtype)

    def _answered(self, seen: Observation, features: Tensor) -> Decision:
        self._warn_where_due(features.shape[1])
        decision = decide(seen, self.partition, self.settings)
        return _moved(decision, features.device)

    def _warn_where_due(self, width: int) -> None:
        state = self._state
        if state.nonfinite_rows:
            self._warn_once(
                "nonfinite",
                f"{state.nonfinite_rows} row(s) of features hold NaN or infinite entries. They "
                "are answered with those entries read as 0 and never learnt from: look at the "
                "backbone's precision or at the images (ARC.nonfinite_rows counts on).",
            )
        if state.undone_steps:
            self._warn_once(
                "drift",
                f"A step went beyond max_drift={self.settings.max_drift} and was undone: the step "
                "size is too large for this stream, or the stream too far from the training data "
                "(ARC.undone_steps counts on).",
            )
        if self.settings.step_warning and "step" not in self._warned and state.steps:
            self._warn_of_step(width)

    def _warn_of_step(self, width: int) -> None:
        settings, squared_norm = self.settings, self._state.mean_squared_norm()
        rate = self._state.step_size(settings)
        if settings.optimizer == "adam":  # each coordinate moves by about the rate
            reach = rate * (squared_norm * width) ** 0.5 / 0.1
        else:
            reach = rate * squared_norm / (1 - settings.momentum)
        if reach >= _TOO_FAR:
            self._warn_once(
                "step",
                f"lr={settings.lr:g} ({settings.step}, {settings.optimizer}) is far too large for "
                f"features of mean squared norm {squared_norm:.3g}: a few steps can ruin the head. "
                f"Try lr={settings.lr * 0.02 / reach:.1g}, or step='relative' with lr=1e-3, and "
                "the guard max_drift=0.1.",
            )

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, ARCWarning, stacklevel=5)


def _checked_head(head: Head, partition: TaskPartition) -> tuple[Tensor, Tensor | None]:
    """Weight and bias as detached copies in float32, or float64 if the head is."""
    weight, bias = _weight_and_bias(head)
    rows, classes = len(weight), partition.num_classes
    if rows < classes:
        raise CompatibilityError(
            f"tasks add up to {classes} classes (sizes {list(partition.sizes)}), but the head has "
            f"{rows} rows: give the sizes of the tasks seen so far, or the grown head."
        )
    if bias is not None and bias.shape != (rows,):
        raise CompatibilityError(
            f"The head's bias has shape {list(bias.shape)}, its weight {list(weight.shape)}: "
            f"expected a bias of shape [{rows}], or None."
        )
    if not weight.isfinite().all() or (
        bias is not None and (bias.isnan() | (bias == torch.inf)).any()
    ):
        raise CompatibilityError(
            "The head holds NaN or infinite weights: it cannot classify. Pass the head of a "
            "training that did not diverge (a bias of -inf, which masks a class, is allowed)."
        )
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    weight = weight.detach().to(dtype=dtype, copy=True).contiguous()
    if bias is not None:
        bias = bias.detach().to(device=weight.device, dtype=dtype, copy=True)
    return weight, bias


def _weight_and_bias(head: Head) -> tuple[Tensor, Tensor | None]:
    if isinstance(head, nn.Linear):
        return head.weight, head.bias
    if isinstance(head, tuple) and len(head) == 2:
        weight, bias = head
        is_matrix = isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point()
        if is_matrix and (bias is None or isinstance(bias, Tensor)):
            return weight, bias
    raise CompatibilityError(
        f"head is {_described(head)}: expected a torch.nn.Linear, or a tuple (weight [K, D], "
        "bias [K] or None) of floating-point tensors. For a whole model use ARC.wrap."
    )


def _described(head: object) -> str:
    if isinstance(head, tuple):
        parts = (
            f"{p.dtype} {list(p.shape)}" if isinstance(p, Tensor) else type(p).__name__
            for p in head
        )
        return f"a tuple ({', '.join(parts)})"
    return f"a {type(head).__name__}"


def _moved(decision: Decision, device: torch.device) -> Decision:
    if decision.classes.device == device:
        return decision
    return Decision(**{name: value.to(device) for name, value in vars(decision).items()})
