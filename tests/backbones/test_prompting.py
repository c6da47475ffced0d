"""Prompts in timm's VisionTransformer: tokens at its input, prefixes in its attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.layers.attention import Attention
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import Tensor, nn

from arc_cl.backbones.prompting import attend, encode, promptable, query
from arc_cl.errors import CompatibilityError

Arrays = dict[str, np.ndarray]


def transformer(seed: int = 0, **changes: Any) -> VisionTransformer:
    shape: dict[str, Any] = {
        "img_size": 16,
        "patch_size": 8,
        "embed_dim": 24,
        "depth": 3,
        "num_heads": 3,
        "num_classes": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        vit = VisionTransformer(**(shape | changes))
        nn.init.normal_(vit.cls_token) if vit.cls_token is not None else None
    return vit.double().eval()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def load(path: Path) -> Arrays:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def float64(array: np.ndarray) -> Tensor:
    return torch.tensor(array, dtype=torch.float64)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"init_values": 0.1, "qk_norm": True},
    {"no_embed_class": True},
    {"pos_embed": "none"},
    {"pre_norm": True},
    {"dynamic_img_size": True},
]
each_variant = pytest.mark.parametrize("changes", VARIANTS, ids=str)


@each_variant
def test_without_prompts_it_is_timms_own_forward(changes: dict[str, Any]) -> None:
    vit, images = transformer(**changes), normal(2, 3, 16, 16)
    torch.testing.assert_close(encode(vit, images), vit.forward_features(images))
    torch.testing.assert_close(query(vit, images), vit(images))


@each_variant
def test_fewer_leading_tokens_have_the_same_values(changes: dict[str, Any]) -> None:
    vit, images = transformer(**changes), normal(2, 3, 16, 16)
    prompts: dict[str, Any] = {
        "inserted_BPD": normal(2, 4, 24),
        "prefixes": {2: (normal(2, 5, 24), normal(2, 5, 24, seed=1))},
    }
    full = encode(vit, images, **prompts)
    assert full.shape == (2, 1 + 4 + 4, 24)
    torch.testing.assert_close(encode(vit, images, leading=5, **prompts), full[:, :5])


def test_inserted_tokens_stand_after_cls_and_have_its_position() -> None:
    vit = transformer(depth=0, final_norm=False)
    assert vit.pos_embed is not None
    images, inserted = normal(2, 3, 16, 16), normal(2, 3, 24)
    tokens = encode(vit, images, inserted_BPD=inserted)
    plain = vit.forward_features(images)
    assert torch.equal(tokens[:, :1], plain[:, :1])
    assert torch.equal(tokens[:, 1:4], inserted + vit.pos_embed[:, :1])
    assert torch.equal(tokens[:, 4:], plain[:, 1:])


def test_one_row_of_prompts_serves_all_images() -> None:
    vit, images = transformer(), normal(3, 3, 16, 16)
    inserted, keys, values = (normal(1, 2, 24, seed=seed) for seed in range(3))
    one = encode(vit, images, inserted_BPD=inserted, prefixes={1: (keys, values)})
    rows = [
        encode(vit, image[None], inserted_BPD=inserted, prefixes={1: (keys, values)})
        for image in images
    ]
    torch.testing.assert_close(one, torch.cat(rows))


def test_a_prefix_widens_the_softmax_of_every_head() -> None:
    attention = Attention(8, num_heads=2, qkv_bias=True).double().eval()
    tokens, keys, values = normal(1, 3, 8), normal(1, 2, 8, seed=1), normal(1, 2, 8, seed=2)
    q, k, v = attention.qkv(tokens).split(8, dim=2)
    k, v = torch.cat((keys, k), dim=1), torch.cat((values, v), dim=1)
    heads = [
        torch.softmax(q[0, :, head] @ k[0, :, head].T / 2.0, dim=1) @ v[0, :, head]
        for head in (slice(0, 4), slice(4, 8))
    ]
    expected = attention.proj(torch.cat(heads, dim=1))
    torch.testing.assert_close(attend(attention, tokens, (keys, values))[0], expected)


def test_gradients_reach_the_prompts_and_none_leaves_a_query() -> None:
    vit, images = transformer().requires_grad_(False), normal(2, 3, 16, 16)
    inserted, keys, values = (normal(1, 2, 24, seed=seed).requires_grad_() for seed in range(3))
    tokens = encode(vit, images, inserted_BPD=inserted, prefixes={2: (keys, values)}, leading=1)
    gradients = torch.autograd.grad(tokens.square().sum(), (inserted, keys, values))
    assert all(each.abs().max() > 0 for each in gradients)
    assert not query(vit.requires_grad_(True), images).requires_grad


def odd_attention(name: str, part: nn.Module) -> VisionTransformer:
    vit = transformer()
    setattr(vit.blocks[1].attn, name, part)
    return vit


MISFITS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: nn.Linear(2, 2), "Linear"),
    (lambda: transformer(reg_tokens=2), "class token"),
    (lambda: transformer(class_token=False, global_pool="avg"), "class token"),
    (lambda: transformer(global_pool="avg"), "global_pool='token'"),
    (lambda: transformer(num_classes=5), "num_classes=0"),
    (lambda: transformer(block_fn=ParallelScalingBlock), "plain blocks"),
    (lambda: odd_attention("gate", nn.Linear(24, 24)), "plain blocks"),
    (lambda: odd_attention("norm", nn.LayerNorm(24)), "plain blocks"),
]


@pytest.mark.parametrize(("make", "lacks"), MISFITS)
def test_other_backbones_are_refused(make: Callable[[], nn.Module], lacks: str) -> None:
    with pytest.raises(CompatibilityError, match=lacks):
        promptable(make())


def test_layers_that_are_not_there_are_named() -> None:
    vit = transformer()
    assert promptable(vit, (0, 2)) is vit
    with pytest.raises(CompatibilityError, match=r"layers \[3, 5\] of a transformer of 3 layers"):
        promptable(vit, (0, 3, 5))


def test_golden_transformer(golden: Path) -> None:
    paths = sorted(golden.glob("vit_tiny_seed*.npz"))
    assert paths
    for path in paths:
        arrays = load(path)
        state = {
            name.removeprefix("param/"): float64(array)
            for name, array in arrays.items()
            if name.startswith("param/")
        }
        depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks"))
        vit = transformer(img_size=32, depth=depth)
        vit.load_state_dict(state)
        images = float64(arrays["x"])
        tokens = encode(vit, images)
        assert (tokens - float64(arrays["tokens"])).abs().max() < 1e-9
        assert (query(vit, images) - float64(arrays["features"])).abs().max() < 1e-9


def test_golden_positions_of_inserted_tokens(golden: Path) -> None:
    paths = sorted(golden.glob("l2p_pos_embed_seed*.npz"))
    assert paths
    for path in paths:
        arrays = load(path)
        for case in range(sum(name.startswith("in_") for name in arrays)):
            positions, extra = float64(arrays[f"in_{case}"]), int(arrays[f"extra_{case}"])
            side = round((positions.shape[1] - 1) ** 0.5)
            vit = transformer(
                img_size=side, patch_size=1, embed_dim=5, num_heads=1, depth=0, final_norm=False
            )
            with torch.no_grad():
                for parameter in vit.parameters():
                    parameter.zero_()
                assert vit.pos_embed is not None
                vit.pos_embed.copy_(positions)
            images = torch.zeros(1, 3, side, side, dtype=torch.float64)
            inserted = torch.zeros(1, extra, 5, dtype=torch.float64)
            tokens = encode(vit, images, inserted_BPD=inserted)
            assert torch.equal(tokens, float64(arrays[f"out_{case}"]))


def test_golden_attention_with_prefixes(golden: Path) -> None:
    paths = sorted(golden.glob("dualprompt_eprompt_attention_seed*.npz"))
    assert paths
    for path in paths:
        arrays = load(path)
        for number, case in enumerate(json.loads(str(arrays["cases"]))):
            attention = Attention(case["E"], num_heads=case["H"], qkv_bias=True).double().eval()
            attention.load_state_dict(
                {
                    name.removeprefix(f"attn_{number}/"): float64(array)
                    for name, array in arrays.items()
                    if name.startswith(f"attn_{number}/")
                }
            )
            tokens = float64(arrays[f"x_{number}"])
            # [B,2,L,H,d] of the first layer; heads are parts of the width.
            released = float64(arrays[f"batched_prompt_{number}"])[0].flatten(3)
            chosen = float64(arrays[f"prompt_{number}"]).flatten(4)[0]
            right = chosen[:, arrays[f"idx_{number}"][:, 0]]
            for name, prefix in (
                ("noprompt", None),
                ("released", (released[:, 0], released[:, 1])),
                ("permuted", (right[0], right[1])),
            ):
                expected = float64(arrays[f"attn_out_{name}_{number}"])
                assert (attend(attention, tokens, prefix) - expected).abs().max() < 1e-9, name
