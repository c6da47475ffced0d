"""ARC on a whole model: images in, `Decision` out, and the model left as it was.

The features are what the model's own forward pass hands to its head, caught by a hook that lives
only as long as the pass: the same for timm, torchvision and any other module, with whatever
pooling, normalisation or dropout they put before the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from arc_cl.core.decision import Decision
from arc_cl.core.partition import TaskPartition
from arc_cl.core.plugin import ARC
from arc_cl.core.settings import ARCSettings
from arc_cl.errors import CompatibilityError

# Where torchvision's ResNets, ViTs and most others keep their head.
_USUAL_NAMES = ("fc", "heads.head", "head", "classifier")


class WrappedModel(nn.Module):
    """A model whose answers come from ARC. Made by `ARC.wrap`; the head's state is in `arc`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        tasks: TaskPartition | Sequence[int],
        settings: ARCSettings | None = None,
        head: str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise CompatibilityError(
                f"ARC.wrap takes a torch.nn.Module, not a {type(model).__name__}; for a head alone "
                "use ARC(head, tasks=…)."
            )
        linear = find_head(model, head)
        super().__init__()
        self.model = model
        self._head = (linear,)  # in a tuple: not registered a second time
        self.arc = ARC(linear, tasks=tasks, settings=settings)

    @torch.no_grad()
    def forward(self, *images: Any, **more: Any) -> Decision:
        """Answer a batch, and learn from it. Takes what the model takes."""
        return self.arc(self.features(*images, **more))

    @torch.no_grad()
    def features(self, *images: Any, **more: Any) -> Tensor:
        """What the head gets to see [B,D]. The model runs in eval mode; nothing adapts."""
        caught: list[Tensor] = []
        (linear,) = self._head
        handle = linear.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        try:
            with in_eval_mode(self.model):
                self.model(*images, **more)
        finally:
            handle.remove()
        if len(caught) != 1 or caught[0].ndim != 2:
            shapes = [list(tensor.shape) for tensor in caught]
            raise CompatibilityError(
                f"The head saw inputs of shapes {shapes} in one pass: ARC needs exactly one input "
                "[B, D]. Name the classifying layer with head=…, or use ARC(head, tasks=…) on "
                "features of your own."
            )
        return caught[0]

    def reset(self) -> None:
        """Back to the head as given."""
        self.arc.reset()

    def get_extra_state(self) -> dict[str, Tensor]:
        return self.arc.state_dict()

    def set_extra_state(self, state: Mapping[str, Tensor]) -> None:
        self.arc.load_state_dict(state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`.to(device)` moves ARC's state too; its dtype stays, statistics want float32."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        (linear,) = self._head
        self.arc.to(linear.weight.device)
        return self


def find_head(model: nn.Module, name: str | None) -> nn.Linear:
    """The classifying layer: by name, by timm's `get_classifier`, or where it usually is."""
    modules = dict(model.named_modules())
    if name is not None:
        found = modules.get(name)
        if isinstance(found, nn.Linear):
            return found
        was = f"a {type(found).__name__}" if found is not None else "not there"
        raise CompatibilityError(f"head={name!r} is {was}: {_advice(modules)}")
    get_classifier = getattr(model, "get_classifier", None)
    candidates = [get_classifier()] if callable(get_classifier) else []
    candidates += [modules.get(usual) for usual in _USUAL_NAMES]
    for candidate in candidates:
        if isinstance(candidate, nn.Linear):
            return candidate
    raise CompatibilityError(
        f"No head found in {type(model).__name__} (looked at get_classifier() and "
        f"{', '.join(_USUAL_NAMES)}): {_advice(modules)}"
    )


def _advice(modules: Mapping[str, nn.Module]) -> str:
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear) and name]
    if not linear:
        return "the model has no named nn.Linear; use ARC((weight, bias), tasks=…) on its features."
    return f"name the classifying nn.Linear with head=…; the last ones are {linear[-5:]}."


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, and afterwards each module in its own again."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True
