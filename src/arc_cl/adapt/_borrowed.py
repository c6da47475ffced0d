"""Parameters of a lent model, to be changed in place and given back as they were.

Whatever mode the caller is in (`no_grad`, `inference_mode`, `autocast`), learning works and every
forward pass sees the weights of that moment: autocast's copies of them are dropped at each change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from arc_cl.contracts import Adaptable, Scope
from arc_cl.errors import CompatibilityError

OptimizerName = Literal["sgd", "adam"]
Result = TypeVar("Result")


class Borrowed:
    """The parameters of these scopes may learn, all others may not, until they are given back."""

    def __init__(self, adaptable: Adaptable, *scopes: Scope) -> None:
        self.parameters = _distinct(adaptable, *scopes)
        if not self.parameters:
            raise CompatibilityError(
                f"the model has no parameters of scope {', '.join(scopes)}; choose a method that "
                f"adapts something else, or a backbone that has them"
            )
        everything = _distinct(adaptable, *scopes, "all", "head+prompts")
        self._before = [(each, each.requires_grad, each.grad) for each in everything]
        self.source = self.copies()
        for parameter in everything:
            parameter.requires_grad_(False)
            parameter.grad = None
        for parameter in self.parameters:
            parameter.requires_grad_(True)

    def copies(self) -> list[Tensor]:
        # Copies that a caller's inference mode made could never be changed outside of it.
        with torch.inference_mode(False):
            return [parameter.detach().clone() for parameter in self.parameters]

    def optimizer(self, name: OptimizerName, lr: float, momentum: float) -> torch.optim.Optimizer:
        """torch's own; Adam has no use for the momentum."""
        if name == "adam":
            return torch.optim.Adam(self.parameters, lr=lr)
        return torch.optim.SGD(self.parameters, lr=lr, momentum=momentum)

    def descend(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """One step; a parameter that the loss does not depend on stays."""
        if not loss.requires_grad:
            raise CompatibilityError(
                "the logits depend on no parameter that this method adapts: the model computes "
                "its features without gradients; choose a method that works on features"
            )
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        torch.clear_autocast_cache()

    @contextmanager
    def holding(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Within, the model has these values for its parameters, and nothing learns."""
        own = [parameter.data for parameter in self.parameters]
        try:
            self._point_to(values)
            with torch.no_grad():
                yield
        finally:
            self._point_to(own)

    def give_back(self) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self.source, strict=True):
                parameter.copy_(value)
        for parameter, requires_grad, gradient in self._before:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        torch.clear_autocast_cache()

    def _point_to(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value
        torch.clear_autocast_cache()


def with_gradients(function: Callable[[Tensor], Result], images_BCHW: Tensor) -> Result:
    """`function` of the images where autograd works, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.enable_grad():
        # A tensor made in inference mode cannot take part in a backward pass; a copy can.
        return function(images_BCHW.clone() if images_BCHW.is_inference() else images_BCHW)


def _distinct(adaptable: Adaptable, *scopes: Scope) -> list[nn.Parameter]:
    """Every parameter once, in the order of the scopes."""
    found = (parameter for scope in scopes for _, parameter in adaptable.parameters(scope))
    return list({id(parameter): parameter for parameter in found}.values())
