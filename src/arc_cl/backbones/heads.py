"""Linear heads that grow with the classes. The global random state is never touched."""

from __future__ import annotations

import torch
from torch import nn

from arc_cl.errors import CompatibilityError


def grow_linear(
    old: nn.Linear | None, features: int, classes: int, generator: torch.Generator
) -> nn.Linear:
    """A head of `classes` rows: those of `old` first, new ones fresh.

    New rows are kaiming-uniform with gain 1 (bound sqrt(3 / features)), biases 0, as in PILOT.
    The whole weight is drawn, then the old rows are copied over it. The generator lives on the
    CPU, so that a head is the same on every device; the new head lies where the old one lay.
    """
    if old is not None and (old.in_features != features or old.out_features > classes):
        raise CompatibilityError(
            f"a head of {old.out_features} classes on {old.in_features} features cannot grow to "
            f"{classes} classes on {features} features; keep the features and add classes"
        )
    head = nn.Linear(features, classes, device="meta").to_empty(device="cpu")
    nn.init.kaiming_uniform_(head.weight, nonlinearity="linear", generator=generator)
    nn.init.zeros_(head.bias)
    if old is None:
        return head
    head = head.to(old.weight.device, old.weight.dtype)
    with torch.no_grad():
        head.weight[: old.out_features] = old.weight
        head.bias[: old.out_features] = old.bias
    return head


def feature_count(backbone: nn.Module) -> int:
    """The width of a backbone's features, where timm keeps it."""
    count = getattr(backbone, "num_features", None)
    if not isinstance(count, int):
        raise CompatibilityError(
            f"{type(backbone).__name__} does not say how many features it has; give it timm's "
            f"attribute `num_features`"
        )
    return count
