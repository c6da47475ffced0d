"""Lend a model, and take it back unchanged, whatever the borrower did or raised."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def lent(module: nn.Module) -> Iterator[None]:
    """Within, `module` may be changed at will; afterwards all is as it was.

    Given back: weights and buffers, gradients, `requires_grad` and training flags, and the global
    random states of Python and torch (CPU, and CUDA where it is in use).
    """
    state = {name: value.clone() for name, value in module.state_dict().items()}
    flags = [(part, part.training) for part in module.modules()]
    learnable = [(p, p.requires_grad, p.grad) for p in module.parameters()]
    randomness = _random_states()
    try:
        yield
    finally:
        module.load_state_dict(state)
        for part, training in flags:
            part.training = training
        for parameter, requires_grad, gradient in learnable:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
        _restore(*randomness)


def _random_states() -> tuple[object, Tensor, list[Tensor]]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), torch.get_rng_state(), cuda


def _restore(python: object, cpu: Tensor, cuda: list[Tensor]) -> None:
    random.setstate(python)  # type: ignore[arg-type]
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
