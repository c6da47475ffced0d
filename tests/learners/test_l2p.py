"""L2P: prompts chosen from a pool, put in as tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from arc_cl.backbones.prompting import encode
from arc_cl.contracts import AsksFirst, TaskInfo
from arc_cl.errors import CompatibilityError, ConfigurationError
from arc_cl.learners.l2p import L2P, Settings, create
from small_vit import images, task, transformer

Arrays = dict[str, np.ndarray]


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {"lr": 0.01, "epochs_first": 3, "epochs": 2, "batch_size": 4}
    return Settings(**(values | {"pool": 6, "prompt_length": 2, "top_k": 3} | changes))


def learner_after(tasks: int, **changes: Any) -> L2P:
    learner = create(transformer(depth=2), settings(**changes))
    for index in range(tasks):
        learner.begin_task(task(index), torch.Generator().manual_seed(index))
    return learner


def prompts_of(learner: L2P) -> dict[str, nn.Parameter]:
    return dict(learner.modules().named_parameters(prefix=""))


def test_the_loss_is_cross_entropy_of_the_new_classes_less_the_pull() -> None:
    learner, batch, labels = learner_after(2), images(3), torch.tensor([5, 9, 7])
    parameters, queries = prompts_of(learner), learner.query(images(3))
    similarity = cosine_similarity(queries[:, None], parameters["prompts.keys"][None], dim=2)
    nearest = similarity.topk(3)
    inserted = parameters["prompts.pool"][nearest.indices].flatten(1, 2)
    vit = learner.modules().get_submodule("backbone")
    assert isinstance(vit, VisionTransformer)
    tokens = encode(vit, batch, inserted_BPD=inserted)
    features = tokens[:, 1:7].mean(dim=1)
    logits = features @ parameters["head.weight"].T + parameters["head.bias"]
    pull = nearest.values.sum() / 3
    expected = cross_entropy(logits[:, 5:10], labels - 5)
    loss, numbers = learner.loss(batch, labels)
    torch.testing.assert_close(loss, expected - 0.1 * pull)
    torch.testing.assert_close(numbers["cross_entropy"], expected.detach())
    torch.testing.assert_close(numbers["similarity"], pull.detach())
    assert not any(number.requires_grad for number in numbers.values())
    adaptable = learner.adaptable()
    torch.testing.assert_close(adaptable.classify(adaptable.features(batch)), logits[:, :10])


def test_an_answer_does_not_depend_on_the_rest_of_the_batch_unless_released() -> None:
    batch = images(7)
    for selection, alone in (("sample", True), ("batch", False)):
        adaptable = learner_after(1, selection=selection).adaptable()
        one_by_one = torch.cat([adaptable.features(image[None]) for image in batch])
        assert torch.allclose(adaptable.features(batch), one_by_one) is alone


def test_what_learns_is_head_and_prompts_and_the_backbone_gets_no_gradient() -> None:
    backbone = transformer(depth=2)
    learner = create(backbone, settings())
    learner.begin_task(task(0), torch.Generator())
    loss, _ = learner.loss(images(4), torch.tensor([0, 1, 2, 3]))
    torch.autograd.backward(loss)
    named = dict(learner.modules().named_parameters())
    learning = {name for name, parameter in named.items() if parameter.requires_grad}
    assert learning == {"head.weight", "head.bias", "prompts.pool", "prompts.keys"}
    assert all((named[name].grad is not None) == (name in learning) for name in named)
    (group,) = learner.plan(task(0)).groups
    assert {id(each) for each in group.parameters} == {id(named[name]) for name in learning}
    assert dict(learner.adaptable().parameters("head+prompts")).keys() == learning
    # One transformer, and it stays in eval mode, so that queries never change.
    assert len(named) == len(list(backbone.parameters())) + len(learning)
    assert not learner.modules().train().get_submodule("backbone.blocks.0").training


def test_the_plan_is_adam_at_a_constant_rate() -> None:
    learner = learner_after(2)
    first, later = learner.plan(task(0)), learner.plan(task(1))
    assert (first.optimizer, first.schedule, later.schedule) == ("adam", (1.0,) * 3, (1.0,) * 2)
    assert [group.weight_decay for group in later.groups] == [0.0]
    assert not later.drop_last
    assert learner.rehearsal().tolist() == []


def test_known_queries_give_the_same() -> None:
    learner, batch, labels = learner_after(1), images(4), torch.tensor([0, 1, 2, 3])
    assert isinstance(learner, AsksFirst)
    queries = learner.query(batch)
    assert torch.equal(
        learner.loss_given(batch, queries, labels)[0], learner.loss(batch, labels)[0]
    )
    features = learner.features_given(batch, queries)
    assert torch.equal(features, learner.adaptable().features(batch))
    (gradient,) = torch.autograd.grad(features.sum(), prompts_of(learner)["prompts.pool"])
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("selection", ["sample", "batch"])
def test_one_compiled_loss_serves_all_tasks(selection: str) -> None:
    learner, batch = learner_after(1, selection=selection), images(4)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(learner.loss, fullgraph=True, backend=keep)
    for index in range(3):
        learner.begin_task(task(index), torch.Generator().manual_seed(index))
        labels = torch.arange(4) + 5 * index
        torch.testing.assert_close(compiled(batch, labels)[0], learner.loss(batch, labels)[0])
    assert len(graphs) == 1


def test_the_head_is_drawn_narrowly_and_prompts_uniformly() -> None:
    before = torch.get_rng_state()
    parameters = prompts_of(learner_after(1, pool=40))
    assert torch.equal(torch.get_rng_state(), before)
    assert parameters["head.weight"].std().item() == pytest.approx(0.02, rel=0.15)
    assert parameters["head.bias"].abs().max() == 0
    for name in ("prompts.pool", "prompts.keys"):
        assert 0.95 < parameters[name].abs().max() <= 1
        assert parameters[name].std().item() == pytest.approx(3**-0.5, rel=0.1)
        assert parameters[name].dtype == torch.float64


@pytest.mark.parametrize("wrong", [{"top_k": 7}, {"top_k": 0}, {"pool": 0}, {"prompt_length": 0}])
def test_wrong_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        settings(**wrong)


def test_other_backbones_are_refused() -> None:
    with pytest.raises(CompatibilityError, match="VisionTransformer"):
        create(nn.Linear(2, 2), settings())


def load(path: Path) -> Arrays:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def float64(array: np.ndarray) -> Tensor:
    return torch.tensor(array, dtype=torch.float64)


def near(given: Tensor, expected: np.ndarray, tolerance: float = 1e-7) -> bool:
    return bool((given - float64(expected)).abs().max() < tolerance)


class Shift(nn.Module):
    """Positions as recorded: random for prompted tokens, unlike those of the released weights."""

    def __init__(self, recorded: Tensor, plain: Tensor) -> None:
        super().__init__()
        prompts = recorded.shape[1] - plain.shape[1]
        ours = torch.cat((plain[:, :1].expand(-1, 1 + prompts, -1), plain[:, 1:]), dim=1)
        self.shift = recorded - ours

    def forward(self, tokens_BND: Tensor) -> Tensor:
        is_prompted = tokens_BND.shape[1] == self.shift.shape[1]
        return tokens_BND + self.shift if is_prompted else tokens_BND


def released(arrays: Arrays) -> L2P:
    """The learner as recorded, before its first step."""
    args = json.loads(str(arrays["args"]))
    vit = transformer(size=args["img_size"], depth=args["depth"])
    start = {
        name.removeprefix("param/"): float64(array)
        for name, array in arrays.items()
        if name.startswith("param/")
    }
    recorded, plain = start["pos_embed"], float64(arrays["orig_pos_embed"])
    start["pos_embed"] = plain
    vit.load_state_dict({name: start[name] for name in vit.state_dict()})
    vit.norm_pre = Shift(recorded, plain)
    how = settings(
        lr=args["init_lr"],
        epochs=args["tuned_epoch"],
        epochs_first=args["tuned_epoch"],
        pool=args["size"],
        prompt_length=args["prompt_length"],
        top_k=args["top_k"],
        pull=args["pull_constraint_coeff"],
        selection="batch",
    )
    learner = create(vit, how)
    learner.begin_task(task(0), torch.Generator())
    with torch.no_grad():
        named = dict(learner.modules().named_parameters())
        for ours, theirs in (
            ("prompts.pool", "prompt.prompt"),
            ("prompts.keys", "prompt.prompt_key"),
            ("head.weight", "head.weight"),
            ("head.bias", "head.bias"),
        ):
            named[ours].copy_(start[theirs])
    return learner


@pytest.fixture(scope="module")
def recordings(golden: Path) -> list[Arrays]:
    paths = sorted(golden.glob("l2p_vit_tiny_seed*.npz"))
    assert paths
    return [load(path) for path in paths]


def test_golden_answers(recordings: list[Arrays]) -> None:
    for arrays in recordings:
        learner = released(arrays)
        for case in range(sum(name.startswith("eval_idx_") for name in arrays)):
            batch = float64(arrays[f"x_{case}"])
            chosen = torch.tensor(arrays[f"eval_idx_{case}"])
            assert near(learner.query(batch), arrays[f"eval_query_{case}"], 1e-9)
            features = learner.features_from(batch, chosen)
            assert near(features, arrays[f"eval_features_{case}"], 1e-9)
            logits = learner.adaptable().head()(features)
            assert near(logits, arrays[f"eval_logits_{case}"], 1e-9)
            seen = learner.adaptable().classify(features)
            assert near(seen, arrays[f"eval_logits_{case}"][:, :5], 1e-9)


def test_golden_training(recordings: list[Arrays]) -> None:
    for arrays in recordings:
        learner = released(arrays)
        for index in range(2):
            if index:
                learner.begin_task(task(index), torch.Generator())
            train_as_recorded(learner, task(index), arrays)
            named = dict(learner.modules().named_parameters())
            for ours, theirs in (
                ("prompts.pool", "prompt"),
                ("prompts.keys", "key"),
                ("head.weight", "head_w"),
                ("head.bias", "head_b"),
            ):
                assert near(named[ours], arrays[f"task{index}_end_{theirs}"]), theirs


def train_as_recorded(learner: L2P, info: TaskInfo, arrays: Arrays) -> None:
    def of(name: str) -> np.ndarray:
        return arrays[f"task{info.index}_{name}"]

    plan = learner.plan(info)
    (group,) = plan.groups
    optimizer = torch.optim.Adam(group.parameters, lr=group.lr)
    batches = float64(of("x"))
    for step in range(plan.epochs * len(batches)):
        place = step % len(batches)
        batch, labels = batches[place], torch.tensor(of("y")[place]).long()
        chosen = torch.tensor(of("prompt_idx")[step])[None]
        loss, numbers = learner.loss_from(batch, learner.query(batch), labels, chosen)
        assert near(numbers["cross_entropy"], of("ce_values")[step])
        assert near(numbers["similarity"], of("reduce_sim_values")[step])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
