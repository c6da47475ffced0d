"""Stored images to a network's input, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arc_cl.data.transforms import TransformName, test_view, train_view


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation a channel, of images in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Appearance:
    """How stored images look to the network."""

    transform: TransformName
    size: int
    normalisation: Normalisation

    @property
    def varies(self) -> bool:
        """Whether a training image looks different each time."""
        return self.transform != "as_stored"


class DeviceImages:
    """uint8 images [N,H,W,C] on the device, handed out as the network wants them."""

    def __init__(
        self, images_NHWC: NDArray[np.uint8], appearance: Appearance, device: torch.device
    ) -> None:
        self.appearance = appearance
        self._images_NHWC = torch.from_numpy(images_NHWC).to(device)
        self._mean_C11 = _column(appearance.normalisation.mean, device)
        self._std_C11 = _column(appearance.normalisation.std, device)

    def __len__(self) -> int:
        return len(self._images_NHWC)

    def at_test(self, numbers_B: Tensor) -> Tensor:
        """Normalised float images [B,C,H,W] as they look at test time."""
        how = self.appearance
        return self._normalised(test_view(self._stored(numbers_B), how.transform, how.size))

    def in_training(self, numbers_B: Tensor, generator: torch.Generator) -> Tensor:
        """Normalised float images [B,C,H,W], cropped and flipped at random where they vary."""
        how = self.appearance
        return self._normalised(
            train_view(self._stored(numbers_B), how.transform, how.size, generator)
        )

    def _stored(self, numbers_B: Tensor) -> Tensor:
        return self._images_NHWC[numbers_B.to(self._images_NHWC.device, non_blocking=True)]

    def _normalised(self, images_BCHW: Tensor) -> Tensor:
        return ((images_BCHW - self._mean_C11) / self._std_C11).contiguous()


def _column(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(-1, 1, 1)
