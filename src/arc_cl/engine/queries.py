"""Queries of images that always look the same, each asked once.

A prompt learner asks its frozen backbone about every image before it chooses prompts, and the
answer never changes: under the test transform, and in training where no augmentation is random.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arc_cl.contracts import AsksFirst
from arc_cl.engine.images import DeviceImages
from arc_cl.engine.runtime import Runtime

_BATCH = 256


class Queries:
    """The queries of the images of one split, as they look at test time."""

    def __init__(self, runtime: Runtime, learner: AsksFirst, images: DeviceImages) -> None:
        self._runtime, self._learner, self._images = runtime, learner, images
        self._known_N = torch.zeros(len(images), dtype=torch.bool)
        self._queries_ND = torch.zeros(len(images), 0)

    def prepare(self, numbers_N: Tensor) -> None:
        """Ask about those of the images (numbers on the CPU) that nobody asked about before."""
        unknown_N = numbers_N[~self._known_N[numbers_N]].unique()
        for numbers_B in torch.split(unknown_N, _BATCH) if len(unknown_N) else ():
            queries_BD = self._ask(numbers_B)
            if not self._known_N.any():
                self._queries_ND = queries_BD.new_zeros(len(self._images), queries_BD.shape[1])
            self._queries_ND[numbers_B.to(queries_BD.device)] = queries_BD
            self._known_N[numbers_B] = True

    def of(self, numbers_B: Tensor) -> Tensor:
        """Queries [B,D] of images that were prepared; numbers on the device."""
        return self._queries_ND[numbers_B]

    @torch.no_grad()
    def _ask(self, numbers_B: Tensor) -> Tensor:
        with self._runtime.fabric.autocast():
            return self._learner.query(self._images.at_test(numbers_B)).float()
