"""From outlines to images, the same bytes on every machine.

Only +, -, *, / and comparisons of float64 arrays, sums of integers, and the raw stream of PCG64
(which numpy promises never to change) decide a pixel: no sine, no exponential, no matrix product
or float reduction, whose last bit may depend on the processor. Angles are drawn as t = tan(θ/2),
normal noise as a sum of bytes. Every image has its own seed, so it can be drawn alone.

S segments of an outline, N images, H = W = SIDE pixels, R random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SIDE = 32
_LINES = 4  # scan lines in a pixel's height
_GRAIN = 64  # steps in a pixel's width
_SHAPE, _COLOUR = 6, 15  # random numbers for an image's geometry, and for its colours
_NOISE = SIDE * SIDE * 3 // 2  # ... and for its noise: four bytes a value
_STRENGTH = 0.25  # most noise: grey values per unit of the byte sum, whose deviation is 148


def draw(
    outlines: Sequence[NDArray[np.float64]], seeds: Sequence[tuple[int, ...]], variety: float = 1.0
) -> NDArray[np.uint8]:
    """One image [N,H,W,3] for each centred outline and its seed.

    `variety` below 1 draws all that is random nearer to its middle: easier images.
    """
    raw = np.stack([_raw(seed) for seed in seeds])
    uniform = (raw[:, : _SHAPE + _COLOUR] >> np.uint64(11)) / 2.0**53
    uniform = 0.5 + variety * (uniform - 0.5)
    ink = [coverage(_placed(*pair)) for pair in zip(outlines, uniform[:, :_SHAPE], strict=True)]
    flat = _paint(np.stack(ink), uniform[:, _SHAPE:])
    octets = np.ascontiguousarray(raw[:, _SHAPE + _COLOUR :], "<u8").view(np.uint8)
    bell = octets.reshape(*flat.shape, 4).astype(np.int64).sum(axis=-1) - 510
    noise = _STRENGTH * uniform[:, -1, None, None, None] * bell
    images: NDArray[np.uint8] = np.rint(np.clip(flat + noise, 0, 255)).astype(np.uint8)
    return images


def centred(outline_S4: NDArray[np.float64]) -> NDArray[np.float64]:
    """The outline with its bounding box centred on the origin, longer side 1, y downwards."""
    low = np.minimum(outline_S4[:, :2].min(0), outline_S4[:, 2:].min(0))
    high = np.maximum(outline_S4[:, :2].max(0), outline_S4[:, 2:].max(0))
    moved = (outline_S4 - np.tile((low + high) / 2, 2)) / (high - low).max()
    flipped: NDArray[np.float64] = moved * np.array([1.0, -1.0, 1.0, -1.0])
    return flipped


def coverage(outline_S4: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of each pixel [H,W] inside an outline given in pixels, y downwards.

    Each scan line adds, right of every crossing, the direction of the segment that it crosses:
    the winding number, spread exactly over the pixel that holds the crossing.
    """
    _, y0, _, y1 = outline_S4.T
    heights = (np.arange(SIDE * _LINES) + 0.5) / _LINES
    segment, line = np.nonzero((y0[:, None] <= heights) != (y1[:, None] <= heights))
    x0, y0, x1, y1 = outline_S4[segment].T
    x = x0 + (heights[line] - y0) * (x1 - x0) / (y1 - y0)
    grain = (np.clip(x, 0, SIDE) * _GRAIN).astype(np.int64)
    place = line * (SIDE + 2) + grain // _GRAIN
    direction, rest = np.where(y0 < y1, 1, -1), grain % _GRAIN
    cells = SIDE * _LINES * (SIDE + 2)
    step = np.bincount(place, direction * (_GRAIN - rest), cells)
    step += np.bincount(place + 1, direction * rest, cells)
    winding = np.cumsum(step.astype(np.int64).reshape(SIDE, _LINES, -1), axis=2)[..., :SIDE]
    inside: NDArray[np.int64] = np.minimum(np.abs(winding), _GRAIN).sum(axis=1)
    return inside / (_LINES * _GRAIN)


def _raw(seed: tuple[int, ...]) -> NDArray[np.uint64]:
    stream = np.random.PCG64(np.random.SeedSequence(seed))
    return stream.random_raw(_SHAPE + _COLOUR + _NOISE)


def _placed(outline_S4: NDArray[np.float64], uniform_R: NDArray[np.float64]) -> NDArray[np.float64]:
    """Stretch, shear, turn (by 15° at most), scale and shift a centred outline into the picture."""
    size, stretch, shear, turn, right, down = uniform_R
    x, y = outline_S4[:, 0::2], outline_S4[:, 1::2]
    x = x * (0.8 + 0.4 * stretch) + y * (0.5 * shear - 0.25)
    tangent = 0.26 * turn - 0.13  # of half the angle
    norm = 1 + tangent * tangent
    cosine, sine = (1 - tangent * tangent) / norm, 2 * tangent / norm
    scale = SIDE * (0.5 + 0.3 * size)
    placed = np.empty_like(outline_S4)
    placed[:, 0::2] = (cosine * x - sine * y) * scale + SIDE / 2 + 6 * right - 3
    placed[:, 1::2] = (sine * x + cosine * y) * scale + SIDE / 2 + 6 * down - 3
    return placed


def _paint(ink_NHW: NDArray[np.float64], uniform_NR: NDArray[np.float64]) -> NDArray[np.float64]:
    """Darker, tinted ink on a tinted ground that changes across the picture; 0 to 255."""
    grey = 0.4 + 0.6 * uniform_NR[:, 0]
    dark = grey * (0.7 * uniform_NR[:, 1])
    tint = (uniform_NR[:, 2:14] - 0.5).reshape(-1, 4, 1, 1, 3)
    ramp = (np.arange(SIDE) + 0.5) / SIDE - 0.5
    ground = grey[:, None, None, None] + 0.3 * tint[:, 0]
    ground = ground + 0.5 * (tint[:, 1] * ramp[:, None, None] + tint[:, 2] * ramp[:, None])
    stroke = dark[:, None, None, None] + 0.3 * tint[:, 3]
    painted: NDArray[np.float64] = 255 * (ground + (stroke - ground) * ink_NHW[..., None])
    return painted
