"""Named generators: one seed, every purpose and place for itself, the global one untouched."""

from __future__ import annotations

import pytest
import torch

from arc_cl.engine.runtime import Runtime
from arc_cl.errors import ConfigurationError


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


@pytest.mark.parametrize("devices", ["auto", "cpu"])
def test_a_device_by_its_name(devices: str) -> None:
    opened = Runtime.open(3, devices)
    assert (opened.seed, opened.precision, opened.compile) == (3, "fp32", False)
    assert opened.device.type == ("cpu" if devices == "cpu" else best())
    assert opened.fabric.world_size == 1


def best() -> str:
    return "cuda" if torch.cuda.device_count() else "cpu"


@pytest.mark.parametrize("devices", ["", "gpu", "cuda:x", "cuda:-1", "cuda:99", "cpu:1", "2"])
def test_an_unknown_device_says_what_is_here(devices: str) -> None:
    there = torch.cuda.device_count()
    with pytest.raises(
        ConfigurationError, match=rf"{devices} was asked for, {there} CUDA .* choose auto, cpu or"
    ):
        Runtime.open(0, devices)


def test_precisions_by_name() -> None:
    features = torch.ones(2, 3)
    for name, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        opened = Runtime.open(0, "cpu", name)  # type: ignore[arg-type]
        with opened.fabric.autocast():
            assert (features @ features.T).dtype == kind
        assert torch.get_default_dtype() == torch.float32


def test_an_unknown_precision_lists_those_known() -> None:
    with pytest.raises(ConfigurationError, match="precision is 'fp16'; choose one of fp32, bf16"):
        Runtime.open(0, "cpu", "fp16")  # type: ignore[arg-type]


def test_generators_do_not_depend_on_device_or_precision() -> None:
    rough = Runtime.open(0, "auto", "bf16").generator("augment", 1, 2, 3)
    assert draw(rough) == draw(Runtime.open(0, "cpu").generator("augment", 1, 2, 3))
