"""The tiny backbone: its size, its weights' pedigree, and what its features are worth."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arc_cl.backbones import tiny
from arc_cl.backbones.tiny import glyph_vit, normalise, provenance
from arc_cl.contracts import Split
from arc_cl.data.sources.glyphs import Glyphs
from arc_cl.errors import DataError


def test_a_small_transformer() -> None:
    model = glyph_vit(pretrained=False)
    assert 0.9e6 < sum(weight.numel() for weight in model.parameters()) < 1.2e6
    images = normalise(torch.zeros(2, 32, 32, 3, dtype=torch.uint8))
    assert model.forward_features(images).shape == (2, 17, 144)
    assert model(images).shape == (2, model.num_features) == (2, 144)


def test_random_weights_obey_the_seed_and_leave_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (glyph_vit(pretrained=False, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    name = "blocks.0.attn.qkv.weight"
    drawn = first.state_dict()[name]
    assert torch.equal(drawn, again.state_dict()[name])
    assert not torch.equal(drawn, other.state_dict()[name])


def test_the_weights_are_small_and_say_where_they_come_from() -> None:
    assert tiny.WEIGHTS.stat().st_size <= 5_000_000
    origin = provenance()
    assert origin["command"].startswith("python -m arc_cl.engine.pretrain_glyphs")
    assert {"seed", "torch", "train_accuracy", "test_accuracy"} <= set(origin)


def test_damaged_weights_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    damaged = Path(shutil.copy(tiny.WEIGHTS, tmp_path))
    with damaged.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    monkeypatch.setattr(tiny, "WEIGHTS", damaged)
    with pytest.raises(DataError, match=f"expected {tiny.SHA256}: reinstall"):
        glyph_vit()


def test_missing_weights_are_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiny, "WEIGHTS", tmp_path / "none.safetensors")
    with pytest.raises(DataError, match=r"none.safetensors is missing.*pretrained=False"):
        glyph_vit()


def test_images_are_normalised_by_channel() -> None:
    image = torch.tensor([0, 128, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    assert normalise(image).flatten().tolist() == pytest.approx([-2, 0.0078, 2], abs=1e-3)


def test_a_linear_probe_neither_fails_nor_saturates() -> None:
    """All 100 benchmark classes at once, on frozen features: what no learner should fall below."""
    features, labels = _features("train")
    mean, scale = features.mean(0), features.std(0)
    probe = nn.Linear(features.shape[1], 100)
    _descend(probe, (features - mean) / scale, labels)
    features, labels = _features("test")
    right = probe((features - mean) / scale).argmax(1) == labels
    assert 0.75 <= right.float().mean().item() <= 0.92


@torch.no_grad()
def _features(split: Split) -> tuple[Tensor, Tensor]:
    data = Glyphs().arrays(split)
    model = glyph_vit().eval()
    images = normalise(torch.from_numpy(data.images_NHWC))
    features = torch.cat([model(part) for part in images.tensor_split(10)])
    return features, torch.from_numpy(data.labels_N)


def _descend(probe: nn.Linear, features: Tensor, labels: Tensor) -> None:
    """Multinomial regression with a little weight decay, from zero: deterministic."""
    nn.init.zeros_(probe.weight)
    nn.init.zeros_(probe.bias)
    optimizer = torch.optim.LBFGS(probe.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        decay = 1e-3 * probe.weight.square().sum() / 2
        total = cross_entropy(probe(features), labels) + decay
        total.backward()
        return total.item()

    optimizer.step(loss)
