"""Stored images to a network's input, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation a channel, of images in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class DeviceImages:
    """uint8 images [N,H,W,C] on the device, handed out as the network wants them."""

    def __init__(
        self, images_NHWC: NDArray[np.uint8], normalisation: Normalisation, device: torch.device
    ) -> None:
        self._images_NHWC = torch.from_numpy(images_NHWC).to(device)
        self._mean_C = torch.tensor(normalisation.mean, device=device)
        self._std_C = torch.tensor(normalisation.std, device=device)

    def __len__(self) -> int:
        return len(self._images_NHWC)

    def batch(self, indices_B: Tensor) -> Tensor:
        """Float32 [B,C,H,W], scaled to [0, 1], then normalised."""
        images_BHWC = self._images_NHWC[indices_B.to(self._images_NHWC.device)].float() / 255
        return ((images_BHWC - self._mean_C) / self._std_C).permute(0, 3, 1, 2).contiguous()
