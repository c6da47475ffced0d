"""Where a run computes, and its randomness: one seed, one named generator for each purpose.

A generator is derived from (seed, purpose, place), say the order of the images in task 3, epoch 2.
So nothing has to be carried along: a run resumed there draws what it would have drawn. All
generators live on the CPU, hence draw the same on every device; the global ones are never used.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, get_args

import torch
from lightning_fabric import Fabric

from arc_cl.errors import ConfigurationError

Purpose = Literal["order", "augment", "stream", "init", "end", "adapt"]
Precision = Literal["fp32", "bf16"]
_FABRIC: dict[Precision, Literal["32-true", "bf16-mixed"]] = {
    "fp32": "32-true",
    "bf16": "bf16-mixed",
}


@dataclass(frozen=True)
class Runtime:
    """The device and precision (through Fabric), the seed, and whether to compile."""

    fabric: Fabric
    seed: int
    precision: Precision = "fp32"
    compile: bool = False

    @classmethod
    def open(
        cls,
        seed: int,
        devices: str = "auto",
        precision: Precision = "fp32",
        *,
        compile: bool = False,
    ) -> Runtime:
        """`devices`: "auto", "cpu" or "cuda:1"."""
        if precision not in _FABRIC:
            raise ConfigurationError(
                f"precision is {precision!r}; choose one of {', '.join(get_args(Precision))}"
            )
        accelerator, which = _devices(devices)
        fabric = Fabric(accelerator=accelerator, devices=which, precision=_FABRIC[precision])
        return cls(fabric, seed, precision, compile)

    @property
    def device(self) -> torch.device:
        return self.fabric.device

    def generator(self, purpose: Purpose, *place: int) -> torch.Generator:
        """The generator of one purpose at one place of the run."""
        name = "/".join(str(part) for part in (self.seed, purpose, *place))
        number = int.from_bytes(sha256(name.encode()).digest()[:8], "big") >> 1
        return torch.Generator().manual_seed(number)


def _devices(text: str) -> tuple[str, int | list[int]]:
    """What Fabric calls accelerator and devices."""
    kind, _, number = text.partition(":")
    there = torch.cuda.device_count()
    if text in ("auto", "1"):
        return "auto", 1
    if text == "cpu":
        return "cpu", 1
    if kind == "cuda" and (number or "0").isdecimal() and int(number or "0") < there:
        return "cuda", [int(number or "0")]
    asked = f"{text} was asked for, {there} CUDA device{'s are' if there != 1 else ' is'} here"
    raise ConfigurationError(f"{asked}; choose auto, cpu or cuda:N")
