"""Vision transformers from timm, as feature extractors."""

from __future__ import annotations

import timm
from torch import nn


def vit(name: str) -> nn.Module:
    """The timm model of that name with random weights, in eval mode: images in, features out."""
    model: nn.Module = timm.create_model(name, num_classes=0)
    return model.eval()
