"""Backbones by name: their weights from anywhere, checked, and what is kept about them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from arc_cl.backbones import tiny
from arc_cl.backbones.timm_models import load
from arc_cl.errors import ConfigurationError, DataError

NAME = "test_vit.r160_in1k"
"""timm's smallest transformer: 0.4 million parameters, 160 px."""


@pytest.fixture
def state() -> dict[str, Tensor]:
    """Weights of the small transformer that a seed does not give."""
    return {name: value + 1 for name, value in load(NAME, "random").module.state_dict().items()}


def saved(state: dict[str, Any], folder: Path, suffix: str = ".safetensors") -> str:
    path = folder / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file({name: value.contiguous() for name, value in state.items()}, path)
    else:
        torch.save(state, path)
    return str(path)


def assert_holds(module: nn.Module, state: dict[str, Tensor]) -> None:
    own = module.state_dict()
    assert own.keys() == state.keys()
    assert all(torch.equal(own[name], value) for name, value in state.items())


def test_random_weights_obey_the_seed_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (load(NAME, "random", seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert_holds(first.module, dict(again.module.state_dict()))
    assert first.sha256 == again.sha256 != other.sha256
    assert len(first.sha256) == 64


def test_what_is_known_of_a_backbone() -> None:
    loaded = load("vit_base_patch16_224.augreg_in21k_ft_in1k", "random")
    assert loaded.name == "vit_base_patch16_224.augreg_in21k_ft_in1k"
    assert loaded.weights == "random"
    assert loaded.mean == loaded.std == (0.5, 0.5, 0.5)
    assert loaded.image_size == 224
    assert not loaded.module.training
    assert loaded.module.num_features == 768


def test_a_bare_name_tells_the_tag_it_means() -> None:
    loaded = load("test_vit", "random")
    assert loaded.name == NAME
    assert loaded.image_size == 160
    features = loaded.module(torch.zeros(2, 3, 160, 160))
    assert features.shape == (2, loaded.module.num_features)


def test_a_convolutional_network_is_a_backbone_too() -> None:
    loaded = load("resnet10t.c3_in1k", "random")
    assert loaded.module(torch.zeros(2, 3, 64, 64)).shape == (2, loaded.module.num_features)
    assert loaded.mean != loaded.std


def test_the_glyph_transformer_has_weights_of_its_own(tmp_path: Path) -> None:
    own, random = load("glyph_vit"), load("glyph_vit", "random", seed=3)
    assert (own.name, own.sha256, own.image_size) == (tiny.TAG, tiny.SHA256, 32)
    assert (own.mean, own.std) == (tiny.MEAN, tiny.STD)
    assert (random.name, random.weights) == ("glyph_vit", "random")
    assert_holds(random.module, tiny.glyph_vit(pretrained=False, seed=3).state_dict())
    path = saved(dict(own.module.state_dict()), tmp_path)
    from_file = load("glyph_vit", path)
    assert_holds(from_file.module, dict(own.module.state_dict()))
    assert (from_file.name, from_file.weights) == ("glyph_vit", path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin"])
def test_weights_from_a_file(state: dict[str, Tensor], tmp_path: Path, suffix: str) -> None:
    path = saved(state, tmp_path, suffix)
    loaded = load(NAME, path)
    assert_holds(loaded.module, state)
    assert loaded.sha256 == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    assert loaded.weights == path


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
def test_wrapped_prefixed_weights_with_a_classifier(
    state: dict[str, Tensor], tmp_path: Path, wrapper: str
) -> None:
    classifier = {"head.weight": torch.zeros(10, 64), "head.bias": torch.zeros(10)}
    prefixed = {f"module.{name}": value for name, value in (state | classifier).items()}
    path = saved({"epoch": 3, wrapper: prefixed}, tmp_path, ".pth")
    assert_holds(load(NAME, path).module, state)


def test_half_precision_becomes_single(state: dict[str, Tensor], tmp_path: Path) -> None:
    path = saved({name: value.half() for name, value in state.items()}, tmp_path)
    module = load(NAME, path).module
    assert {value.dtype for value in module.state_dict().values()} == {torch.float32}
    assert_holds(module, {name: value.half().float() for name, value in state.items()})


def test_a_file_of_another_model_is_refused(state: dict[str, Tensor], tmp_path: Path) -> None:
    del state["norm.weight"]
    state["cls_token"] = torch.zeros(1, 1, 7)
    state |= {f"extra.{number}": torch.zeros(1) for number in range(5)}
    message = (
        r"weights.safetensors does not fit test_vit.*it lacks norm.weight; "
        r"unknown are extra.0, extra.1, extra.2 and 2 more; "
        r"of another shape are cls_token \[1, 1, 7\] instead of \[1, 1, 64\]; give a file of"
    )
    with pytest.raises(DataError, match=message):
        load(NAME, saved(state, tmp_path))


def test_nothing_but_tensors_is_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read \(UnpicklingError.*plain tensors"):
        load(NAME, saved({"model": nn.Linear(2, 2)}, tmp_path, ".pth"))
    with pytest.raises(DataError, match="more than tensors by name"):
        load(NAME, saved({"weight": torch.zeros(1), "note": "hello"}, tmp_path, ".pth"))
    with pytest.raises(DataError, match="more than tensors by name"):
        load(NAME, saved([1, 2], tmp_path, ".pt"))  # type: ignore[arg-type]


def test_damaged_missing_and_strange_files_are_explained(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"\x00" * 100)
    with pytest.raises(DataError, match=r"damaged.safetensors cannot be read.*fetch the file"):
        load(NAME, str(damaged))
    with pytest.raises(DataError, match=r"no file .*pretraned; weights are 'pretrained', 'random'"):
        load(NAME, "pretraned")
    strange = tmp_path / "weights.npz"
    strange.write_bytes(b"")
    with pytest.raises(DataError, match=r"ends in '.npz'; weights are read from .safetensors"):
        load(NAME, str(strange))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("vit_bas_patch16_224", "did you mean 'vit_base_patch16_224'"),
        ("glyph_vitt", "did you mean 'glyph_vit'"),
        (
            "vit_base_patch16_224.augreg_in21_ft_in1k",
            "did you mean 'vit_base_patch16_224.augreg_in21k_ft_in1k'",
        ),
        ("§", r"timm.list_pretrained\(\) lists the names"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"backbone is '{name}'.*{hint}"):
        load(name, "random")


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> nn.Module:
        raise ConnectionError("no route to host\nand much more")

    monkeypatch.setattr(timm, "create_model", offline)
    message = (
        r"weights of test_vit.r160_in1k cannot be downloaded \(ConnectionError: no route to host\)"
        r"; give them as a file"
    )
    with pytest.raises(DataError, match=message):
        load(NAME)


def test_downloaded_weights_are_known_by_their_tensors(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, Tensor]
) -> None:
    made = timm.create_model

    def downloading(name: str, **options: Any) -> nn.Module:
        pretrained = options.pop("pretrained", False)
        module: nn.Module = made(name, **options)
        if pretrained:
            module.load_state_dict(state)
        return module

    monkeypatch.setattr(timm, "create_model", downloading)
    first, again = load(NAME), load(NAME)
    assert_holds(first.module, state)
    assert first.weights == "pretrained"
    assert first.sha256 == again.sha256 != load(NAME, "random").sha256


def test_real_weights_in_half_precision(golden: Path) -> None:
    path = golden.parent / "data" / "vit_tiny_patch16_224.fp16.safetensors"
    if not path.is_file():
        pytest.skip(f"{path} does not exist: no real weights here")
    loaded = load("vit_tiny_patch16_224", str(path))
    assert loaded.name == "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert loaded.mean == (0.5, 0.5, 0.5)
    assert {value.dtype for value in loaded.module.state_dict().values()} == {torch.float32}
    features = loaded.module(torch.zeros(1, 3, 224, 224))
    assert features.shape == (1, 192)
    assert features.isfinite().all()
