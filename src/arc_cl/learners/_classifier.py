"""A backbone with one linear head, as a test-time method sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arc_cl.backbones.heads import feature_count, grow_linear
from arc_cl.contracts import Scope

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
_PARTS = ("backbone", "head")


@dataclass(frozen=True)
class Classifier:
    """Images to features by the backbone, features to logits by the head.

    Whatever else the network holds (exemplars, an auxiliary head) takes no part.
    """

    network: nn.ModuleDict

    def features(self, images_BCHW: Tensor) -> Tensor:
        features_BD: Tensor = self.network["backbone"](images_BCHW)
        return features_BD

    def classify(self, features_BD: Tensor) -> Tensor:
        logits_BK: Tensor = self.network["head"](features_BD)
        return logits_BK

    def head(self) -> nn.Linear:
        head = self.network["head"]
        assert isinstance(head, nn.Linear)
        return head

    def parameters(self, scope: Scope) -> Iterator[tuple[str, nn.Parameter]]:
        if scope == "all":
            for part in _PARTS:
                yield from self.network[part].named_parameters(prefix=part)
        elif scope == "norms":
            for name, module in self.network["backbone"].named_modules(prefix="backbone"):
                if isinstance(module, _NORMS):
                    yield from module.named_parameters(prefix=name)
        else:
            yield from self.network["head"].named_parameters(prefix="head")


def grow_head(network: nn.ModuleDict, classes: int, generator: torch.Generator) -> None:
    """Give the network a head for so many classes, and for the features it has now."""
    old = Classifier(network).head() if "head" in network else None
    backbone = network["backbone"]
    network["head"] = grow_linear(old, feature_count(backbone), classes, generator, backbone)
