"""A model that is its head alone, and what to feed it; shared by tests of test-time methods."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from arc_cl.contracts import Scope


class Head:
    """A linear layer, and nothing before it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.linear = nn.Linear(weight.shape[1], len(weight), bias is not None, "meta")
        self.linear = self.linear.to_empty(device="cpu").to(weight.dtype)
        with torch.no_grad():
            self.linear.weight.copy_(weight)
            if bias is not None:
                self.linear.bias.copy_(bias)

    def features(self, images_BCHW: Tensor) -> Tensor:
        return images_BCHW

    def classify(self, features_BD: Tensor) -> Tensor:
        return self.linear(features_BD)  # type: ignore[no-any-return]

    def head(self) -> nn.Linear:
        return self.linear

    def parameters(self, scope: Scope) -> Any:
        return self.linear.named_parameters()


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
