"""Extractors that grow by a branch a task, and a vision transformer split for such growth.

    features = [branch_1(trunk(images)), …, branch_t(trunk(images))]

DER's branches are whole backbones without a trunk; MEMO's are last blocks on a shared trunk.
"""

from __future__ import annotations

import copy

import torch
from timm.layers.pool1d import global_pool_nlc
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from arc_cl.backbones.heads import feature_count
from arc_cl.errors import CompatibilityError

_POOLS = ("token", "avg", "avgmax", "max")


class Branches(nn.Module):
    """Branches side by side: the newest learns, trunk and older ones no longer do.

    What is frozen stays in eval mode and needs no gradient, so autograd records nothing of it
    (unless a test-time method asks for gradients there).
    """

    def __init__(self, first: nn.Module, trunk: nn.Module | None = None) -> None:
        super().__init__()
        self.trunk = nn.Identity() if trunk is None else trunk
        self.branches = nn.ModuleList([first])
        self._width = feature_count(first)
        self._learns = [parameter.requires_grad for parameter in first.parameters()]

    @property
    def num_features(self) -> int:
        return self._width * len(self.branches)

    @property
    def newest(self) -> nn.Module:
        return self.branches[-1]

    def grow(self) -> None:
        """Freeze all that is there, and add a copy of the newest branch that learns.

        The parameters of the copy are new: they learn where those of the first branch did when it
        was given, whoever froze what since.
        """
        branch = copy.deepcopy(self.newest)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None
        for parameter, learns in zip(branch.parameters(), self._learns, strict=True):
            parameter.requires_grad_(learns)
        self.branches.append(branch)
        self.train(self.training)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        shared = self.trunk(images_BCHW)
        return torch.cat([branch(shared) for branch in self.branches], dim=1)

    def newest_features(self, features_BD: Tensor) -> Tensor:
        """The columns of the newest branch."""
        return features_BD[:, -self._width :]

    def train(self, mode: bool = True) -> Branches:
        super().train(mode)
        if len(self.branches) > 1:
            self.trunk.eval()
            for branch in self.branches[:-1]:
                branch.eval()
        return self


class Trunk(nn.Module):
    """A vision transformer without its last block: images to tokens [B,T,D], not normalised."""

    def __init__(self, body: VisionTransformer) -> None:
        super().__init__()
        self.body = body

    def forward(self, images_BCHW: Tensor) -> Tensor:
        tokens_BTD: Tensor = self.body.forward_features(images_BCHW)
        return tokens_BTD


class Branch(nn.Module):
    """The last block of a vision transformer with its final norm: tokens to features [B,D]."""

    def __init__(self, backbone: VisionTransformer) -> None:
        super().__init__()
        self.num_features = feature_count(backbone)
        self.block = backbone.blocks[-1]
        self.norm = backbone.norm
        self.fc_norm = backbone.fc_norm
        self.head_drop = backbone.head_drop
        self._pool = backbone.global_pool
        self._prefix_tokens = backbone.num_prefix_tokens
        self._pool_prefix = backbone.pool_include_prefix

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        tokens_BTD = self.norm(self.block(tokens_BTD))
        features_BD = global_pool_nlc(
            tokens_BTD,
            pool_type=self._pool,
            num_prefix_tokens=self._prefix_tokens,
            reduce_include_prefix=self._pool_prefix,
        )
        features_BD = self.fc_norm(features_BD)
        return self.head_drop(features_BD)  # type: ignore[no-any-return]

    def redraw(self, generator: torch.Generator) -> None:
        """The block as torch makes a new one, drawn on the CPU; the final norm stays."""
        for module in self.block.modules():
            if isinstance(module, nn.Linear):
                _redraw_linear(module, generator)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()


def split(backbone: nn.Module) -> tuple[Trunk, Branch]:
    """Take a timm vision transformer apart: its parts are moved, not copied."""
    problem = _unsplittable(backbone)
    if problem:
        raise CompatibilityError(
            f"{type(backbone).__name__} cannot be split before its last block: {problem}; give "
            f"timm's VisionTransformer with two blocks or more, made with num_classes=0"
        )
    assert isinstance(backbone, VisionTransformer)
    branch = Branch(backbone)
    backbone.blocks = backbone.blocks[:-1]
    backbone.norm, backbone.fc_norm = nn.Identity(), nn.Identity()
    return Trunk(backbone), branch


def _unsplittable(backbone: nn.Module) -> str:
    plain = VisionTransformer.forward_features
    if not isinstance(backbone, VisionTransformer) or type(backbone).forward_features is not plain:
        return "it is not timm's VisionTransformer"
    if len(backbone.blocks) < 2:
        return "it has a single block"
    if not isinstance(backbone.head, nn.Identity):
        return f"it has a head of {backbone.num_classes} classes"
    if backbone.global_pool not in _POOLS:
        return f"global_pool is {backbone.global_pool!r}, none of {', '.join(_POOLS)}"
    return ""


def _redraw_linear(layer: nn.Linear, generator: torch.Generator) -> None:
    """Uniform within 1 / sqrt(inputs), weight and bias: torch's default."""
    bound = layer.in_features**-0.5
    for parameter in layer.parameters():
        drawn = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            parameter.copy_(drawn)
