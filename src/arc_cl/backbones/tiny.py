"""A vision transformer of one million parameters for Split Glyphs, with its own weights.

17 tokens (16 patches and CLS), so ten tasks of fine-tuning take about a minute on two CPU cores.
The weights were learnt on the 355 pre-training classes by `python -m
arc_cl.engine.pretrain_glyphs`; how, and how well, stands in the metadata of the file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from arc_cl.errors import DataError

TAG = "glyph_vit.pretraining355"
SHA256 = "2c432e22ba455dab81c980fdca313b352e6b8bb65f98edd40337067dd988b798"
WEIGHTS = Path(__file__).parent / "weights" / "glyph_vit.safetensors"

MEAN = (0.5, 0.5, 0.5)
STD = (0.25, 0.25, 0.25)
"""Of the channels, on images scaled to 0..1."""


def glyph_vit(pretrained: bool = True, seed: int = 0) -> VisionTransformer:
    """Normalised images [B,3,32,32] to CLS features [B,144]; weights our own, or drawn from a seed.

    timm draws from torch's global generator, which is given back as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = VisionTransformer(
            img_size=32, patch_size=8, embed_dim=144, depth=4, num_heads=3, num_classes=0
        )
    if pretrained:
        model.load_state_dict(_checked_weights(WEIGHTS, SHA256))
    return model


def provenance(path: Path = WEIGHTS) -> dict[str, str]:
    """How a file of weights came to be: command, seed, versions, accuracies."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def normalise(images_BHWC: Tensor) -> Tensor:
    """uint8 images as stored -> float images [B,C,H,W] as the backbone takes them."""
    scaled = images_BHWC.permute(0, 3, 1, 2).float() / 255
    mean, std = (scaled.new_tensor(value).view(1, 3, 1, 1) for value in (MEAN, STD))
    return (scaled - mean) / std


def _checked_weights(path: Path, sha256: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise DataError(f"{path} is missing: reinstall arc-cl, or pass pretrained=False")
    content = path.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise DataError(f"{path} has sha256 {found}, expected {sha256}: reinstall arc-cl")
    return load(content)
