"""Pools of prompts: chosen by key, or weighted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from arc_cl.backbones import pools

Arrays = dict[str, np.ndarray]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def load(path: Path) -> Arrays:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def float64(array: np.ndarray) -> Tensor:
    return torch.tensor(array, dtype=torch.float64)


def near(given: Tensor, expected: np.ndarray) -> bool:
    return bool((given - float64(expected)).abs().max() < 1e-9)


SIMILARITY = torch.tensor([[0.9, 0.1, 0.8, 0.0], [0.9, 0.7, 0.0, 0.1], [0.0, 0.1, 0.2, 0.3]])


def test_each_image_chooses_for_itself() -> None:
    assert pools.select(SIMILARITY, 2, "sample").tolist() == [[0, 2], [0, 1], [3, 2]]


def test_the_batch_votes_and_mean_similarity_breaks_ties() -> None:
    assert pools.votes(SIMILARITY, 2).tolist() == [2, 1, 2, 1]
    # 0 and 2 have two votes each; of mean similarity 0 has more.
    assert pools.select(SIMILARITY, 2, "batch").tolist() == [[0, 2]]
    # 1 has three votes; 0, 2 and 3 have two each, and mean similarities in this order.
    assert pools.select(SIMILARITY, 3, "batch").tolist() == [[1, 0, 2]]
    assert pools.select(SIMILARITY, 1, "batch").tolist() == [[0]]


def test_votes_are_counted_exactly_in_reduced_precision() -> None:
    similarity = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat_interleave(
        torch.tensor([301, 302]), dim=0
    )
    assert pools.votes(similarity.bfloat16(), 1).tolist() == [301, 302]
    assert pools.select(similarity.bfloat16(), 1, "batch").tolist() == [[1]]


def test_the_pull_is_the_mean_over_images_of_the_sum_over_choices() -> None:
    by_sample = pools.select(SIMILARITY, 2, "sample")
    assert pools.pull(SIMILARITY, by_sample).item() == pytest.approx((1.7 + 1.6 + 0.5) / 3)
    by_batch = pools.select(SIMILARITY, 2, "batch")
    assert pools.pull(SIMILARITY, by_batch).item() == pytest.approx((1.7 + 0.9 + 0.2) / 3)


def test_chosen_prompts_stand_one_after_the_other() -> None:
    prompts = torch.arange(12.0).view(3, 2, 2)
    inserted = pools.inserted(prompts, torch.tensor([[2, 0]]))
    assert inserted.tolist() == [[[8, 9], [10, 11], [0, 1], [2, 3]]]


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_keys_and_values_go_to_their_own_rows(batch: int) -> None:
    chosen = normal(2, 2, batch, 3, 4)
    keys, values = pools.prefix_pairs(chosen, batch, "permuted")
    for row in range(batch):
        assert torch.equal(keys[:, row], chosen[:, 0, row])
        assert torch.equal(values[:, row], chosen[:, 1, row])


def test_the_released_order_mixes_rows_but_for_a_batch_of_one() -> None:
    chosen = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1, 1)
    slots = {
        batch: torch.cat(pools.prefix_pairs(chosen, batch, "scrambled"), dim=2).flatten(2)[0]
        for batch in (1, 4, 5)
    }
    assert slots[1].tolist() == [[0, 1]]
    assert slots[4].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert slots[5].tolist() == [[0, 0], [0, 0], [0, 1], [1, 1], [1, 1]]


def test_weights_are_cosines_of_the_attended_query() -> None:
    queries, attention, keys = normal(3, 8), normal(2, 4, 8, seed=1), normal(2, 4, 8, seed=2)
    components = normal(2, 4, 6, 8, seed=3)
    prompts = pools.weighted(queries, attention, keys, components)
    for layer in range(2):
        for row in range(3):
            weights = cosine_similarity(queries[row] * attention[layer], keys[layer], dim=1)
            expected = torch.einsum("m,mld->ld", weights, components[layer])
            torch.testing.assert_close(prompts[layer, row], expected)


def test_golden_selection(golden: Path) -> None:
    paths = sorted(golden.glob("l2p_prompt_module_seed*.npz"))
    assert paths
    for path in paths:
        arrays = load(path)
        for number, case in enumerate(json.loads(str(arrays["cases"]))):
            of = {
                name: arrays[f"{name}_{number}"]
                for name in ("key", "prompt", "x", "query", "similarity", "counts", "idx")
            }
            recorded = torch.tensor(of["idx"])
            similarity = pools.similarity(float64(of["query"]), float64(of["key"]))
            assert near(similarity, of["similarity"])
            assert near(pools.votes(similarity, case["top_k"]).double(), of["counts"])
            assert near(pools.pull(similarity, recorded), arrays[f"reduce_sim_{number}"])
            prompted = pools.inserted(float64(of["prompt"]), recorded)
            expected = arrays[f"prompted_{number}"][:, : case["total_prompt_len"]]
            assert near(prompted, expected)
            if case["batchwise"] and case["tie_at_cut"]:
                continue
            selection: pools.Selection = "batch" if case["batchwise"] else "sample"
            chosen = pools.select(similarity, case["top_k"], selection)
            if case["tie_in_order"]:
                chosen, recorded = chosen.sort().values, recorded.sort().values
            assert torch.equal(chosen.expand_as(recorded), recorded)


def test_golden_experts(golden: Path) -> None:
    paths = sorted(golden.glob("dualprompt_eprompt_attention_seed*.npz"))
    assert paths
    for path in paths:
        arrays = load(path)
        for number, case in enumerate(json.loads(str(arrays["cases"]))):
            recorded = torch.tensor(arrays[f"idx_{number}"])
            keys, queries = float64(arrays[f"key_{number}"]), float64(arrays[f"query_{number}"])
            similarity = pools.similarity(queries, keys)
            assert near(similarity, arrays[f"similarity_{number}"])
            assert near(pools.pull(similarity, recorded), arrays[f"reduce_sim_{number}"])
            chosen = pools.select(similarity, 1, "batch")
            if case["mask"] is None and not case["tie_at_cut"]:
                assert torch.equal(chosen.expand_as(recorded), recorded)
            experts = float64(arrays[f"prompt_{number}"]).flatten(4)
            pairs = pools.prefix_pairs(experts[:, :, recorded[:, 0]], case["B"], "scrambled")
            released = arrays[f"batched_prompt_{number}"]
            assert near(torch.stack(pairs, dim=2), released.reshape(*released.shape[:4], -1))
            # The same from one row for all, as a batch's choice comes.
            shared = pools.prefix_pairs(experts[:, :, recorded[:1, 0]], case["B"], "scrambled")
            assert all(torch.equal(*both) for both in zip(pairs, shared, strict=True))
            slots = torch.arange(2.0).view(1, 2, 1, 1, 1)
            received = torch.stack(pools.prefix_pairs(slots, case["B"], "scrambled"), dim=2)
            assert received.flatten(1).tolist() == [arrays[f"slots_{number}"][0].ravel().tolist()]


def test_golden_components(golden: Path) -> None:
    paths = sorted(golden.glob("coda_prompt_module_seed*.npz"))
    assert paths
    for path in paths:
        arrays = load(path)
        meta = json.loads(str(arrays["meta"]))
        share, half = meta["pool"] // meta["n_tasks"], meta["plen"] // 2
        places = sorted(name.removeprefix("e_p_") for name in arrays if name.startswith("e_p_"))
        for place in places:
            end = share * (1 + int(place[1]))
            parts = (float64(arrays[f"e_{part}_{place}"])[None, :end] for part in "akp")
            prompts = pools.weighted(float64(arrays["query"]), *parts)[0]
            for mode in ("train0", "train1"):
                assert near(prompts[:, :half], arrays[f"K_{place}_{mode}"])
                assert near(prompts[:, half:], arrays[f"V_{place}_{mode}"])
