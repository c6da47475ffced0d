"""Prompts for timm's own VisionTransformer: tokens put in at its input, prefixes in its attention.

Inserted tokens stand between CLS and the patches and carry CLS's position embedding. A prefix
(K', V') of a layer widens its attention, head by head: softmax(Q [K'; K]ᵀ / √d) [V'; V].
timm's modules are called in timm's order; nothing in them is copied or changed.

*Deviations* from the released code: one transformer answers with and without prompts (released: a
class of its own for each method, twice in memory), and the last block may compute no more tokens
than are asked for. Prefix keys, like those of the release, pass no norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import torch
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from arc_cl.errors import CompatibilityError

Prefix: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values to stand before a layer's own, each [B or 1, L, D]; heads are parts of D."""


def promptable(backbone: nn.Module, layers: tuple[int, ...] = ()) -> VisionTransformer:
    """`backbone`, if prompts can be put into it and it has all of `layers` (counted from 0)."""
    if not isinstance(backbone, VisionTransformer):
        raise CompatibilityError(
            f"prompts were to be put into a {type(backbone).__name__}; they need timm's "
            f"VisionTransformer (such as vit_base_patch16_224) with num_classes=0"
        )
    depth = len(backbone.blocks)
    if misfits := [layer for layer in layers if layer >= depth]:
        raise CompatibilityError(
            f"prompts were to be put into layers {misfits} of a transformer of {depth} layers; "
            f"choose layers from 0 to {depth - 1}, or a deeper backbone"
        )
    if lacks := _lacks(backbone):
        raise CompatibilityError(
            f"prompts cannot be put into this VisionTransformer: it has not {lacks}; choose a "
            f"plain one, such as vit_base_patch16_224 with num_classes=0"
        )
    return backbone


def encode(
    vit: VisionTransformer,
    images_BCHW: Tensor,
    *,
    inserted_BPD: Tensor | None = None,
    prefixes: Mapping[int, Prefix] | None = None,
    leading: int | None = None,
) -> Tensor:
    """Tokens [B,N,D] after the final norm, in the order CLS, inserted, patches.

    `inserted_BPD` may have one row for all images. `prefixes` are by layer. With `leading`, only
    that many tokens leave the last block, which saves most of its work and changes no value.
    """
    prefixes = prefixes or {}
    tokens_BND = vit.patch_drop(vit._pos_embed(vit.patch_embed(images_BCHW)))
    if inserted_BPD is not None:
        tokens_BND = _insert(vit, tokens_BND, inserted_BPD)
    tokens_BND = vit.norm_pre(tokens_BND)
    blocks = cast(Sequence[Block], vit.blocks)
    last = len(blocks) - 1
    for layer, block in enumerate(blocks):
        wanted = leading if layer == last else None
        if layer in prefixes or wanted is not None:
            tokens_BND = _run(block, tokens_BND, prefixes.get(layer), wanted)
        else:
            tokens_BND = block(tokens_BND)
    normed_BND: Tensor = vit.norm(tokens_BND)
    return normed_BND


@torch.no_grad()
def query(vit: VisionTransformer, images_BCHW: Tensor) -> Tensor:
    """What the transformer makes of the plain images: CLS [B,D] after the final norm."""
    return encode(vit, images_BCHW, leading=1)[:, 0]


def attend(
    attention: Attention, tokens_BND: Tensor, prefix: Prefix | None, leading: int | None = None
) -> Tensor:
    """timm's attention with a prefix, for the first `leading` tokens (None: for all)."""
    qkv = attention.qkv(tokens_BND).unflatten(2, (3, attention.num_heads, -1))
    queries_BHNd, keys_BHNd, values_BHNd = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    queries_BHNd = attention.q_norm(queries_BHNd[:, :, :leading])
    keys_BHNd = attention.k_norm(keys_BHNd)
    if prefix is not None:
        keys_BHNd = _prepend(prefix[0], keys_BHNd)
        values_BHNd = _prepend(prefix[1], values_BHNd)
    dropout = attention.attn_drop.p if attention.training else 0.0
    mixed_BHNd = scaled_dot_product_attention(
        queries_BHNd, keys_BHNd, values_BHNd, dropout_p=dropout
    )
    mixed_BND = mixed_BHNd.transpose(1, 2).flatten(2)
    attended_BND: Tensor = attention.proj_drop(attention.proj(mixed_BND))
    return attended_BND


def _run(block: Block, tokens_BND: Tensor, prefix: Prefix | None, leading: int | None) -> Tensor:
    """timm's block, around an attention with a prefix."""
    attention = cast(Attention, block.attn)
    change_BND = attend(attention, block.norm1(tokens_BND), prefix, leading)
    tokens_BND = tokens_BND[:, :leading] + block.drop_path1(block.ls1(change_BND))
    change_BND = block.mlp(block.norm2(tokens_BND))
    answer_BND: Tensor = tokens_BND + block.drop_path2(block.ls2(change_BND))
    return answer_BND


def _prepend(prefix_BLD: Tensor, own_BHNd: Tensor) -> Tensor:
    batch, heads, _, _ = own_BHNd.shape
    prefix_BHLd = prefix_BLD.to(own_BHNd.dtype).unflatten(2, (heads, -1)).transpose(1, 2)
    return torch.cat((prefix_BHLd.expand(batch, -1, -1, -1), own_BHNd), dim=2)


def _insert(vit: VisionTransformer, tokens_BND: Tensor, inserted_BPD: Tensor) -> Tensor:
    if vit.pos_embed is not None and not vit.no_embed_class:
        inserted_BPD = inserted_BPD + vit.pos_embed[:, :1]
    inserted_BPD = inserted_BPD.to(tokens_BND.dtype).expand(len(tokens_BND), -1, -1)
    return torch.cat((tokens_BND[:, :1], inserted_BPD, tokens_BND[:, 1:]), dim=1)


def _lacks(vit: VisionTransformer) -> str:
    """What is missing for prompts, in words; empty if nothing is."""
    needs = {
        "a class token, and no register or distillation token beside it": (
            vit.cls_token is not None and vit.num_prefix_tokens == 1
        ),
        "its class token as its answer (global_pool='token')": vit.global_pool == "token",
        "the answer of its final norm (num_classes=0)": isinstance(vit.head, nn.Identity),
        "timm's plain blocks and attention alone": all(map(_is_plain, vit.blocks)),
    }
    return "; ".join(need for need, is_met in needs.items() if not is_met)


def _is_plain(block: nn.Module) -> bool:
    """No other class, no gate, no norm after the attention, and as wide as the tokens."""
    if type(block) is not Block or type(block.attn) is not Attention:
        return False
    attention = block.attn
    return (
        getattr(attention, "gate", None) is None
        and isinstance(getattr(attention, "norm", nn.Identity()), nn.Identity)
        and attention.qkv.out_features == 3 * attention.qkv.in_features
    )
