"""Named generators: one seed, every purpose and place for itself, the global one untouched."""

from __future__ import annotations

import torch

from arc_cl.engine.runtime import Runtime


def draw(generator: torch.Generator) -> list[int]:
    return torch.randint(2**60, (4,), generator=generator).tolist()


def test_a_generator_depends_on_seed_purpose_and_place() -> None:
    before = torch.get_rng_state()
    one, other = Runtime.open(0, "cpu"), Runtime.open(1, "cpu")
    assert draw(one.generator("order", 1, 2)) == draw(one.generator("order", 1, 2))
    streams = [
        draw(one.generator("order", 1, 2)),
        draw(one.generator("order", 12)),
        draw(one.generator("order", 2, 1)),
        draw(one.generator("init", 1, 2)),
        draw(other.generator("order", 1, 2)),
    ]
    assert len({tuple(stream) for stream in streams}) == len(streams)
    assert torch.equal(torch.get_rng_state(), before)
