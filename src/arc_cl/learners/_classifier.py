"""A backbone with one linear head, as a test-time method sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from arc_cl.contracts import Scope

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


@dataclass(frozen=True)
class Classifier:
    """Images to features by the backbone, features to logits by the head."""

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
            yield from self.network.named_parameters()
        elif scope == "norms":
            for name, module in self.network.named_modules():
                if isinstance(module, _NORMS):
                    yield from module.named_parameters(prefix=name)
        else:
            yield from self.network["head"].named_parameters(prefix="head")
