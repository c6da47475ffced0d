"""A small vision transformer in float64, its tasks and images; shared by tests of prompts."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from arc_cl.contracts import TaskInfo


def transformer(size: int = 16, depth: int = 3) -> VisionTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return VisionTransformer(
            img_size=size, patch_size=8, embed_dim=24, depth=depth, num_heads=3, num_classes=0
        ).double()


def task(index: int, tasks: int = 3) -> TaskInfo:
    return TaskInfo(
        index=index, seen_classes=5 * index + 5, new_classes=5, tasks=tasks, classes=5 * tasks
    )


def images(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 16, 16, generator=generator, dtype=torch.float64)
