"""Random views of a batch of images, made where the images lie, each image with draws of its own.

Images come normalised, by what is not known here. So colours move in units of the image itself:

    x ← x + b·std(x)              brightness
    x ← mean(x) + (1+c)(x - mean) contrast
    x ← grey + (1+s)(x - grey)    saturation, grey = mean of the channels
    x ← x + noise

after an affine warp (mirror, turn, zoom, shift; bilinear, the border repeated).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample


@dataclass(frozen=True, kw_only=True)
class Strengths:
    """How far each draw may go; it is uniform in ± that, but for `flip` and `noise`."""

    flip: bool
    """Mirror half of the images."""
    turn: float
    """Degrees."""
    zoom: float
    """Of the size."""
    shift: float
    """Of the width and of the height."""
    brightness: float
    contrast: float
    saturation: float
    noise: float
    """Standard deviation of what is added to each value."""

    @property
    def warps(self) -> bool:
        return self.flip or max(self.turn, self.zoom, self.shift) > 0


def augmented(images_BCHW: Tensor, strengths: Strengths, generator: torch.Generator) -> Tensor:
    """A random view of each image. The generator must be of the images' device."""
    if strengths.warps:
        images_BCHW = _warped(images_BCHW, strengths, generator)
    images_BCHW = _coloured(images_BCHW, strengths, generator)
    if not strengths.noise:
        return images_BCHW
    noise_BCHW = torch.empty_like(images_BCHW).normal_(generator=generator)
    return images_BCHW.add(noise_BCHW, alpha=strengths.noise)


def _warped(images_BCHW: Tensor, strengths: Strengths, generator: torch.Generator) -> Tensor:
    height, width = images_BCHW.shape[2:]
    draws = _draws(images_BCHW, 5, generator)
    angle_B = draws[0] * (strengths.turn * pi / 180)
    size_B = 1 + draws[1] * strengths.zoom
    mirror_B = torch.where(draws[2] < 0, -1.0, 1.0) if strengths.flip else torch.ones_like(size_B)
    cosine_B, sine_B = size_B * angle_B.cos(), size_B * angle_B.sin()
    # Places are counted from -1 to 1 along both axes: a turn must know their true ratio.
    rows = [
        mirror_B * cosine_B,
        -sine_B * (height / width),
        draws[3] * (2 * strengths.shift),
        mirror_B * sine_B * (width / height),
        cosine_B,
        draws[4] * (2 * strengths.shift),
    ]
    matrices_B23 = torch.stack(rows, dim=1).view(-1, 2, 3)
    grid = affine_grid(matrices_B23, list(images_BCHW.shape), align_corners=False)
    return grid_sample(images_BCHW, grid, padding_mode="border", align_corners=False)


def _coloured(images_BCHW: Tensor, strengths: Strengths, generator: torch.Generator) -> Tensor:
    draws = _draws(images_BCHW, 3, generator).view(3, -1, 1, 1, 1)
    if strengths.brightness:
        spread_B111 = images_BCHW.std(dim=(1, 2, 3), keepdim=True, correction=0)
        images_BCHW = images_BCHW + draws[0] * strengths.brightness * spread_B111
    if strengths.contrast:
        mean_B111 = images_BCHW.mean(dim=(1, 2, 3), keepdim=True)
        images_BCHW = mean_B111.lerp(images_BCHW, 1 + draws[1] * strengths.contrast)
    if strengths.saturation:
        grey_B1HW = images_BCHW.mean(dim=1, keepdim=True)
        images_BCHW = grey_B1HW.lerp(images_BCHW, 1 + draws[2] * strengths.saturation)
    return images_BCHW


def _draws(images_BCHW: Tensor, kinds: int, generator: torch.Generator) -> Tensor:
    """Numbers [kinds,B] from -1 to 1."""
    return images_BCHW.new_empty(kinds, len(images_BCHW)).uniform_(-1, 1, generator=generator)
