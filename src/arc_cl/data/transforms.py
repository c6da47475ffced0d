"""Crop, resize and flip whole batches of stored images on their device, as Pillow would one by one.

Along an axis, output o weighs pixel i with filter((i + 1/2 - (o + 1/2)·scale) / max(scale, 1)),
scale = box / outputs, in the box, normalised: a matrix. "Bilinear" is a triangle, "bicubic" Keys'
cubic with a = -1/2. As in Pillow, weights are whole multiples of 2⁻²², columns come before rows,
each rounded to grey levels. Such sums are exact in float64: Pillow's result bit for bit, on every
device. (Pillow 13 begins with the rows where the height shrinks by over twice what the width
does; older ones, those behind all published numbers, do not.)
*Deviations* from torchvision: the random boxes have its law, but come from a generator of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args

import torch
from torch import Tensor

from arc_cl.errors import CompatibilityError, ConfigurationError

TransformName = Literal["as_stored", "pilot", "coda_cifar", "coda_imagenet_r"]

_TRIES = 10
_NARROWEST, _WIDEST = 3 / 4, 4 / 3
_UNITS = 2.0**22
"""Of a weight of 1."""

_Filter = Callable[[Tensor], Tensor]


def _triangle(distance: Tensor) -> Tensor:
    return (1 - distance.abs()).clamp_(min=0)


def _cubic(distance: Tensor) -> Tensor:
    far = distance.abs()
    near = (1.5 * far - 2.5) * far * far + 1
    tail = (((far - 5) * far + 8) * far - 4) * -0.5
    return torch.where(far < 1, near, tail * (far < 2))


@dataclass(frozen=True, kw_only=True)
class _View:
    """What one transform asks for."""

    least_area: float
    """Of the random box in training, as a share of the image. Its filter is the triangle."""
    filter: _Filter
    """At test time."""
    margin: bool
    """At test time: resize to 256/224 of the size, then take the centre."""


_VIEWS: dict[TransformName, _View] = {
    "pilot": _View(least_area=0.05, filter=_cubic, margin=True),
    "coda_cifar": _View(least_area=0.08, filter=_triangle, margin=False),
    "coda_imagenet_r": _View(least_area=0.08, filter=_triangle, margin=True),
}


@dataclass(frozen=True, kw_only=True)
class Crops:
    """A box for each image, and whether what it holds is mirrored."""

    boxes_B4: Tensor
    """Top, left, height, width, in whole pixels: float64."""
    flipped_B: Tensor
    """Bool."""


def test_view(
    images_BHWC: Tensor,
    transform: TransformName,
    size: int = 224,  # noqa: PT028 - no test: how images look at test time
) -> Tensor:
    """uint8 images to floats [B,C,h,w] in 0..1, as they look at test time.

    `coda_cifar` makes the shorter side `size` and cuts nothing; `as_stored` ignores `size`.
    """
    _check(images_BHWC, transform)
    if transform == "as_stored":
        return _floats(images_BHWC)
    height, width = images_BHWC.shape[1:3]
    view, shorter, device = _VIEWS[transform], min(height, width), images_BHWC.device
    rows = _centre(height, shorter, size, view, device)
    columns = _centre(width, shorter, size, view, device)
    return _resampled(images_BHWC, rows, columns)


def train_view(
    images_BHWC: Tensor, transform: TransformName, size: int, generator: torch.Generator
) -> Tensor:
    """uint8 images to floats [B,C,size,size] in 0..1: a random box of each, mirrored or not.

    `generator` lives on the CPU, so the boxes are the same on every device. `as_stored` draws
    nothing: it neither cuts nor mirrors, since a mirrored glyph is another class.
    """
    _check(images_BHWC, transform)
    if transform == "as_stored":
        return _floats(images_BHWC)
    count, height, width = images_BHWC.shape[:3]
    return cropped(images_BHWC, draw_crops(count, height, width, transform, generator), size)


def cropped(images_BHWC: Tensor, crops: Crops, size: int) -> Tensor:
    """The box of each image as floats [B,C,size,size] in 0..1, by the triangle filter."""
    device = images_BHWC.device
    boxes_B4 = crops.boxes_B4.to(device, non_blocking=True)
    flipped_B1 = crops.flipped_B.to(device, non_blocking=True)[:, None]
    top_B, left_B, height_B, width_B = boxes_B4.unbind(dim=1)
    down_1Y = torch.arange(size, dtype=torch.float64, device=device)[None]
    across_BX = torch.where(flipped_B1, size - 1 - down_1Y, down_1Y)
    rows = _weights(images_BHWC.shape[1], top_B, height_B, size, down_1Y, _triangle)
    columns = _weights(images_BHWC.shape[2], left_B, width_B, size, across_BX, _triangle)
    return _resampled(images_BHWC, rows, columns)


def draw_crops(
    count: int, height: int, width: int, transform: TransformName, generator: torch.Generator
) -> Crops:
    """Boxes of random area, aspect (log-uniform in 3/4..4/3) and place; one in two is mirrored.

    As torchvision: the first of ten tries that fits, else the largest central box whose aspect is
    allowed.
    """
    drawn = torch.rand(count, 2 * _TRIES + 3, dtype=torch.float64, generator=generator)
    least_area = _VIEWS[transform].least_area
    area = height * width * (least_area + (1 - least_area) * drawn[:, :_TRIES])
    narrowest, widest = math.log(_NARROWEST), math.log(_WIDEST)
    aspect = (narrowest + (widest - narrowest) * drawn[:, _TRIES : 2 * _TRIES]).exp()
    widths, heights = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
    first_B1 = fits.int().argmax(dim=1, keepdim=True)
    fallen_B = ~fits.any(dim=1)
    central_height, central_width = _largest(height, width)
    height_B = heights.gather(1, first_B1)[:, 0].masked_fill(fallen_B, central_height)
    width_B = widths.gather(1, first_B1)[:, 0].masked_fill(fallen_B, central_width)
    top_B = (drawn[:, -3] * (height - height_B + 1)).floor()
    left_B = (drawn[:, -2] * (width - width_B + 1)).floor()
    top_B = top_B.masked_fill(fallen_B, (height - central_height) // 2)
    left_B = left_B.masked_fill(fallen_B, (width - central_width) // 2)
    boxes_B4 = torch.stack([top_B, left_B, height_B, width_B], dim=1)
    return Crops(boxes_B4=boxes_B4, flipped_B=drawn[:, -1] < 0.5)


def _largest(height: int, width: int) -> tuple[int, int]:
    """Height and width of the largest box whose aspect is allowed."""
    if width < _NARROWEST * height:
        return round(width / _NARROWEST), width
    if width > _WIDEST * height:
        return height, round(height * _WIDEST)
    return height, width


def _centre(length: int, shorter: int, size: int, view: _View, device: torch.device) -> Tensor:
    """Weights [1,O,length] of one axis at test time, whose image has this shorter side."""
    short = int(256 / 224 * size) if view.margin else size
    outputs = int(short * length / shorter)
    kept = size if view.margin else outputs
    first = round((outputs - kept) / 2)
    places_1O = torch.arange(first, first + kept, dtype=torch.float64, device=device)[None]
    start_1, extent_1 = torch.tensor([[0.0], [length]], dtype=torch.float64, device=device)
    return _weights(length, start_1, extent_1, outputs, places_1O, view.filter)


def _weights(
    length: int,
    start_B: Tensor,
    extent_B: Tensor,
    outputs: int,
    places_BO: Tensor,
    filter: _Filter,
) -> Tensor:
    """Weights [B,O,length] of the pixels of one axis, for the outputs at these places.

    The box starts at a pixel, extends over some, and is resized to `outputs`.
    """
    scale_B11 = (extent_B / outputs)[:, None, None]
    pixels_L = torch.arange(length, dtype=torch.float64, device=start_B.device) + 0.5
    inside_B1L = (pixels_L - start_B[:, None])[:, None]
    distance_BOL = inside_B1L - (places_BO[..., None] + 0.5) * scale_B11
    weights_BOL = filter(distance_BOL * (1 / scale_B11.clamp(min=1)))
    weights_BOL *= (inside_B1L > 0) & (inside_B1L < extent_B[:, None, None])
    units_BOL = weights_BOL / weights_BOL.sum(dim=2, keepdim=True) * _UNITS
    return (units_BOL + units_BOL.sign() / 2).trunc_() / _UNITS  # halves away from 0, as in C


def _resampled(images_BHWC: Tensor, rows_BYH: Tensor, columns_BXW: Tensor) -> Tensor:
    """Floats [B,C,Y,X] in 0..1; the weights of a single image serve all."""
    count, height, width, channels = images_BHWC.shape
    outputs = columns_BXW.shape[1]
    lines = images_BHWC.transpose(2, 3).reshape(count, height * channels, width).double()
    lines = _grey_levels(lines @ columns_BXW.mT).view(count, height, channels * outputs)
    lines = _grey_levels(rows_BYH.expand(count, -1, -1) @ lines)
    return _floats(lines.byte().view(count, -1, channels, outputs).transpose(2, 3))


def _grey_levels(sums: Tensor) -> Tensor:
    """In place."""
    return sums.add_(0.5).clamp_(0, 255).floor_()


def _floats(images_BHWC: Tensor) -> Tensor:
    return images_BHWC.permute(0, 3, 1, 2).float().contiguous().div_(255)


def _check(images_BHWC: Tensor, transform: str) -> None:
    if images_BHWC.dtype != torch.uint8 or images_BHWC.ndim != 4:
        raise CompatibilityError(
            f"images are {images_BHWC.dtype} {tuple(images_BHWC.shape)}; give them as they are "
            "stored, torch.uint8 [B,H,W,C]"
        )
    known = get_args(TransformName)
    if transform not in known:
        close = get_close_matches(transform, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(
            f"transform is {transform!r}{hint} (there are: {', '.join(known)})"
        )
