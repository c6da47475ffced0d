"""Pools of prompts: which of them an image gets, by the cosine of its query to their keys.

    by selection (L2P, DualPrompt)   the k prompts with the highest cos(query, key)
    by weights (CODA-Prompt)         Σ_m cos(query ⊙ attention_m, key_m) · component_m

*Deviations* from the released code: an image's prompts are chosen by its own query (`sample`);
the released vote of the whole batch is `batch`, with ties broken by mean similarity instead of at
random. Selected keys and values go to the rows that they belong to (`permuted`); the released
reshape, which mixes them, is `scrambled`. CODA's weights come from two matrix products.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

Selection = Literal["sample", "batch"]
PrefixOrder = Literal["permuted", "scrambled"]

_TINY = 1e-24
"""Below this, a squared norm is taken for zero."""


def similarity(queries_BD: Tensor, keys_PD: Tensor) -> Tensor:
    """Cosines [B,P]."""
    return normalize(queries_BD, dim=1) @ normalize(keys_PD, dim=1).T


def select(similarity_BP: Tensor, count: int, selection: Selection) -> Tensor:
    """Indices of `count` prompts: [B,count] by `sample`, [1,count] for all rows by `batch`."""
    if selection == "sample":
        return similarity_BP.topk(count, dim=1).indices
    # A mean cosine of weight 1/4 can only decide between equal numbers of votes.
    popularity_P = votes(similarity_BP, count) + similarity_BP.mean(dim=0).float() / 4
    return popularity_P.topk(count).indices[None]


def votes(similarity_BP: Tensor, count: int) -> Tensor:
    """How many rows have each prompt among their `count` most similar ones: whole floats [P]."""
    chosen_BK = similarity_BP.topk(count, dim=1).indices
    # float32, since reduced precision cannot count to the size of a batch.
    return (
        torch.zeros_like(similarity_BP, dtype=torch.float32).scatter(1, chosen_BK, 1.0).sum(dim=0)
    )


def pull(similarity_BP: Tensor, indices_RK: Tensor) -> Tensor:
    """Σ_k mean_b cos(query_b, key of the k-th choice): what training raises. R is B or 1."""
    chosen_BK = similarity_BP.gather(1, indices_RK.expand(len(similarity_BP), -1))
    return chosen_BK.sum() / len(similarity_BP)


def inserted(prompts_PLD: Tensor, indices_RK: Tensor) -> Tensor:
    """The chosen prompts one after the other: [R, K·L, D]."""
    return prompts_PLD[indices_RK].flatten(1, 2)


def prefix_pairs(chosen_S2RLD: Tensor, batch: int, order: PrefixOrder) -> tuple[Tensor, Tensor]:
    """Keys and values [S,B or 1,L,D] of S layers, from prompts with keys at 0 and values at 1.

    `scrambled` reads [2,B] as if it were [B,2]: the first half of a batch gets the key for both,
    the second half the value for both, whatever rows they were chosen for; a batch of 1 is right.
    """
    if order == "permuted":
        return chosen_S2RLD[:, 0], chosen_S2RLD[:, 1]
    layers, _, _, length, width = chosen_S2RLD.shape
    chosen_S2BLD = chosen_S2RLD.expand(-1, -1, batch, -1, -1)
    scrambled_SB2LD = chosen_S2BLD.reshape(layers, batch, 2, length, width)
    return scrambled_SB2LD[:, :, 0], scrambled_SB2LD[:, :, 1]


def weighted(
    queries_BD: Tensor, attention_SMD: Tensor, keys_SMD: Tensor, components_SMLD: Tensor
) -> Tensor:
    """Prompts [S,B,L,D] of S layers: the components, weighted by cos(query ⊙ attention, key).

    (q ⊙ a)·k = q·(a ⊙ k) and ‖q ⊙ a‖² = q²·a², so no tensor of size B·M·D is needed.
    """
    directed_SMD = attention_SMD * normalize(keys_SMD, dim=2)
    products_SBM = torch.einsum("bd,smd->sbm", queries_BD, directed_SMD)
    squares_SBM = torch.einsum("bd,smd->sbm", queries_BD.square(), attention_SMD.square())
    weights_SBM = products_SBM * squares_SBM.clamp_min(_TINY).rsqrt()
    return torch.einsum("sbm,smld->sbld", weights_SBM, components_SMLD)
