"""Where a run computes, and its randomness: one seed, one named generator for each purpose.

A generator is derived from (seed, purpose, place), say the order of the images in task 3, epoch 2.
So nothing has to be carried along: a run resumed at task 3 draws what it would have drawn. All
generators live on the CPU, hence draw the same on every device; the global ones are never used.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

import torch
from lightning_fabric import Fabric

Purpose = Literal["order", "augment", "stream", "init", "adapt"]


@dataclass(frozen=True)
class Runtime:
    """The device (through Fabric) and the seed of a run."""

    fabric: Fabric
    seed: int

    @classmethod
    def open(cls, seed: int, accelerator: str = "auto") -> Runtime:
        return cls(Fabric(accelerator=accelerator, devices=1), seed)

    @property
    def device(self) -> torch.device:
        return self.fabric.device

    def generator(self, purpose: Purpose, *place: int) -> torch.Generator:
        """The generator of one purpose at one place of the run."""
        name = "/".join(str(part) for part in (self.seed, purpose, *place))
        number = int.from_bytes(sha256(name.encode()).digest()[:8], "big") >> 1
        return torch.Generator().manual_seed(number)
