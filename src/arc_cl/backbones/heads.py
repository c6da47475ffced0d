"""Linear heads that grow with classes and features. The global random state is never touched.

Weights that grow are kaiming-uniform with gain 1 (bound sqrt(3 / features)), biases 0, as in PILOT.
All are drawn on the CPU, where the generator lives, so that a head is the same on every device.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from arc_cl.errors import CompatibilityError

Module = TypeVar("Module", bound=nn.Module)


def grow_linear(
    old: nn.Linear | None,
    features: int,
    classes: int,
    generator: torch.Generator,
    like: nn.Module | None = None,
) -> nn.Linear:
    """A head of `classes` rows on `features` columns: what `old` holds first, the rest fresh.

    The whole weight is drawn, then the old block is copied over its corner. The new head has the
    device and type of the old one; without one, those of the parameters of `like`.
    """
    if old is not None and (old.in_features > features or old.out_features > classes):
        raise CompatibilityError(
            f"a head of {old.out_features} classes on {old.in_features} features cannot grow to "
            f"{classes} classes on {features} features; keep or add features and classes"
        )
    head = nn.Linear(features, classes, device="meta").to_empty(device="cpu")
    nn.init.kaiming_uniform_(head.weight, nonlinearity="linear", generator=generator)
    nn.init.zeros_(head.bias)
    if old is None:
        return head if like is None else placed_like(head, like)
    head = placed_like(head, old)
    with torch.no_grad():
        head.weight[: old.out_features, : old.in_features] = old.weight
        head.bias[: old.out_features] = old.bias
    return head


def narrow_linear(features: int, classes: int, generator: torch.Generator) -> nn.Linear:
    """Weights of a normal distribution of width 0.02, cut off far outside; biases 0."""
    head = nn.Linear(features, classes, device="meta").to_empty(device="cpu")
    nn.init.trunc_normal_(head.weight, std=0.02, generator=generator)
    nn.init.zeros_(head.bias)
    return head


def placed_like(module: Module, like: nn.Module) -> Module:
    """`module` on the device and in the type of the parameters of `like` (if it has any)."""
    reference = next((each for each in like.parameters() if each.is_floating_point()), None)
    return module if reference is None else module.to(reference.device, reference.dtype)


def feature_count(backbone: nn.Module) -> int:
    """The width of a backbone's features, where timm keeps it."""
    count = getattr(backbone, "num_features", None)
    if not isinstance(count, int):
        raise CompatibilityError(
            f"{type(backbone).__name__} does not say how many features it has; give it timm's "
            f"attribute `num_features`"
        )
    return count
