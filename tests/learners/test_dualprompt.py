"""DualPrompt: general prefixes, and one expert by task."""

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

from arc_cl.backbones.prompting import encode
from arc_cl.contracts import AsksFirst, TaskInfo
from arc_cl.errors import CompatibilityError, ConfigurationError
from arc_cl.learners.dualprompt import DualPrompt, Settings, create
from small_vit import images, task, transformer

Arrays = dict[str, np.ndarray]


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {"lr": 0.01, "epochs_first": 3, "epochs": 2, "batch_size": 4}
    layers: dict[str, Any] = {"general_layers": (0,), "expert_layers": (1, 2)}
    return Settings(**(values | layers | changes))


def learner_after(count: int, tasks: int = 3, **changes: Any) -> DualPrompt:
    learner = create(transformer(), settings(**changes))
    for index in range(count):
        learner.begin_task(task(index, tasks), torch.Generator().manual_seed(index))
    return learner


def parameter(learner: DualPrompt, name: str) -> nn.Parameter:
    return learner.modules().get_parameter(name)


def scatter_experts(learner: DualPrompt, keys: Tensor) -> None:
    """Experts that differ, with these first keys."""
    with torch.no_grad():
        experts = parameter(learner, "prompts.experts")
        experts.copy_(torch.randn(experts.shape, generator=torch.Generator().manual_seed(9)))
        parameter(learner, "prompts.keys")[: len(keys)] = keys


def test_prefixes_of_both_kinds_reach_their_layers() -> None:
    learner, batch = learner_after(2), images(3)
    general = parameter(learner, "prompts.general")
    experts = parameter(learner, "prompts.experts")
    vit = learner.modules().get_submodule("backbone")
    assert isinstance(vit, VisionTransformer)
    prefixes = {
        0: (general[0, 0][None], general[0, 1][None]),
        1: (experts[0, 0, 1][None], experts[0, 1, 1][None]),
        2: (experts[1, 0, 1][None], experts[1, 1, 1][None]),
    }
    expected = encode(vit, batch, prefixes=prefixes)[:, 0]
    torch.testing.assert_close(learner.features_from(batch, torch.tensor([[1]])), expected)


def test_training_uses_the_expert_of_the_task_and_pulls_its_key() -> None:
    learner = learner_after(2)
    scatter_experts(learner, learner.query(images(2)))
    loss, numbers = learner.loss(images(4), torch.tensor([5, 6, 7, 9]))
    torch.autograd.backward(loss)
    for name, dimension in (("prompts.experts", 2), ("prompts.keys", 0)):
        gradient = parameter(learner, name).grad
        assert gradient is not None
        sizes = gradient.abs().transpose(0, dimension).flatten(1).amax(dim=1)
        assert (sizes > 0).tolist() == [False, True, False]
    torch.testing.assert_close(
        loss.detach(), numbers["cross_entropy"] - 0.1 * numbers["similarity"]
    )


def test_an_expert_starts_as_a_copy_of_the_one_before() -> None:
    for transfer in (True, False):
        learner = learner_after(1, transfer=transfer)
        scatter_experts(learner, torch.empty(0, 24))
        keys = parameter(learner, "prompts.keys").clone()
        learner.begin_task(task(1), torch.Generator())
        first, second = parameter(learner, "prompts.experts").unbind(2)[:2]
        assert torch.equal(first, second) is transfer
        assert torch.equal(parameter(learner, "prompts.keys"), keys)


def test_twenty_tasks_have_twenty_experts() -> None:
    learner = learner_after(20, tasks=20)
    assert parameter(learner, "prompts.experts").shape[2] == 20
    torch.autograd.backward(learner.loss(images(2), torch.tensor([95, 99]))[0])
    gradient = parameter(learner, "prompts.experts").grad
    assert gradient is not None
    assert gradient[:, :, 19].abs().max() > 0
    assert gradient[:, :, :19].abs().max() == 0


def test_tasks_beyond_a_released_pool_choose_by_key_in_training_too() -> None:
    learner = learner_after(3, pool=2, selection="batch")
    keys = learner.query(images(1))
    scatter_experts(learner, torch.cat((keys, -keys)))
    loss, numbers = learner.loss(images(1), torch.tensor([10]))
    torch.autograd.backward(loss)
    gradient = parameter(learner, "prompts.experts").grad
    assert gradient is not None
    assert gradient[:, :, 0].abs().max() > 0
    assert gradient[:, :, 1].abs().max() == 0
    assert numbers["similarity"].item() == pytest.approx(1)


def test_experts_of_later_tasks_are_chosen_by_the_released_pool_only() -> None:
    for pool, expected in ((0, 1), (3, 2)):
        learner = learner_after(2, pool=pool)
        query = learner.query(images(1))
        scatter_experts(learner, torch.cat((-query, query + 1, query)))
        assert learner.choose(query).tolist() == [[expected]]


@pytest.mark.parametrize("count", [1, 3, 4])
def test_rows_answer_alone_as_in_a_batch(count: int) -> None:
    learner, batch = learner_after(3), images(count)
    scatter_experts(learner, learner.query(images(3)))
    adaptable = learner.adaptable()
    one_by_one = torch.cat([adaptable.features(image[None]) for image in batch])
    torch.testing.assert_close(adaptable.features(batch), one_by_one)


def test_released_forms_depend_on_the_batch() -> None:
    batch = images(5)
    released: list[dict[str, Any]] = [{"prefix_order": "scrambled"}, {"selection": "batch"}]
    for changes in released:
        learner = learner_after(3, **changes)
        scatter_experts(learner, learner.query(images(3)))
        adaptable = learner.adaptable()
        one_by_one = torch.cat([adaptable.features(image[None]) for image in batch])
        assert not torch.allclose(adaptable.features(batch), one_by_one)


def test_what_learns_is_head_and_prompts_and_the_backbone_gets_no_gradient() -> None:
    backbone = transformer()
    learner = create(backbone, settings())
    learner.begin_task(task(0), torch.Generator())
    torch.autograd.backward(learner.loss(images(4), torch.tensor([0, 1, 2, 3]))[0])
    named = dict(learner.modules().named_parameters())
    prompts = {"prompts.general", "prompts.experts", "prompts.keys"}
    learning = {"head.weight", "head.bias", *prompts}
    assert {name for name, each in named.items() if each.requires_grad} == learning
    assert {name for name, each in named.items() if each.grad is not None} == learning
    plan = learner.plan(task(0))
    assert {id(each) for each in plan.groups[0].parameters} == {id(named[n]) for n in learning}
    assert dict(learner.adaptable().parameters("head+prompts")).keys() == learning
    assert len(named) == len(list(backbone.parameters())) + len(learning)
    assert (plan.optimizer, plan.schedule, plan.drop_last) == ("adam", (1.0,) * 3, False)


def test_known_queries_give_the_same() -> None:
    learner, batch, labels = learner_after(1), images(4), torch.tensor([0, 1, 2, 3])
    assert isinstance(learner, AsksFirst)
    queries = learner.query(batch)
    assert torch.equal(
        learner.loss_given(batch, queries, labels)[0], learner.loss(batch, labels)[0]
    )
    features = learner.features_given(batch, queries)
    assert torch.equal(features, learner.adaptable().features(batch))
    (gradient,) = torch.autograd.grad(features.sum(), parameter(learner, "prompts.experts"))
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("changes", [{}, {"prefix_order": "scrambled", "selection": "batch"}])
def test_one_compiled_loss_serves_all_tasks(changes: dict[str, Any]) -> None:
    learner, batch = learner_after(1, **changes), images(4)
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"expert_layers": (0, 1)},
        {"expert_layers": ()},
        {"expert_layers": (-1,)},
        {"general_layers": (0, 0)},
        {"general_length": 0},
        {"pool": -1},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        settings(**wrong)


def test_layers_must_be_there() -> None:
    with pytest.raises(CompatibilityError, match="3 layers"):
        create(transformer(), settings(expert_layers=(3,)))


def load(path: Path) -> Arrays:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def float64(array: np.ndarray) -> Tensor:
    return torch.tensor(array, dtype=torch.float64)


def near(given: Tensor, expected: np.ndarray, tolerance: float = 1e-7) -> bool:
    return bool((given - float64(expected)).abs().max() < tolerance)


OURS = {
    "prompts.general": ("g_prompt", "g_prompt"),
    "prompts.experts": ("e_prompt.prompt", "prompt"),
    "prompts.keys": ("e_prompt.prompt_key", "key"),
    "head.weight": ("head.weight", "head_w"),
    "head.bias": ("head.bias", "head_b"),
}


def released(arrays: Arrays) -> DualPrompt:
    """The learner as recorded, before its first step."""
    args = json.loads(str(arrays["args"]))
    vit = transformer(size=args["img_size"], depth=args["depth"])
    start = {
        name.removeprefix("param/"): float64(array)
        for name, array in arrays.items()
        if name.startswith("param/")
    }
    vit.load_state_dict({name: start[name] for name in vit.state_dict()})
    how = settings(
        lr=args["init_lr"],
        epochs=args["tuned_epoch"],
        epochs_first=args["tuned_epoch"],
        general_layers=tuple(args["g_prompt_layer_idx"]),
        general_length=args["g_prompt_length"],
        expert_layers=tuple(args["e_prompt_layer_idx"]),
        expert_length=args["prompt_length"],
        pool=args["size"],
        pull=args["pull_constraint_coeff"],
        selection="batch",
        prefix_order="scrambled",
        transfer=args["shared_prompt_pool"],
    )
    learner = create(vit, how)
    learner.begin_task(task(0), torch.Generator())
    with torch.no_grad():
        for ours, (theirs, _) in OURS.items():
            parameter(learner, ours).copy_(start[theirs].reshape(parameter(learner, ours).shape))
    return learner


@pytest.fixture(scope="module")
def recordings(golden: Path) -> list[Arrays]:
    paths = sorted(golden.glob("dualprompt_vit_tiny_seed*.npz"))
    assert paths
    return [load(path) for path in paths]


def test_golden_answers(recordings: list[Arrays]) -> None:
    for arrays in recordings:
        learner = released(arrays)
        head = learner.adaptable().head()
        for case in range(sum(name.startswith("eval_idx_") for name in arrays)):
            batch = float64(arrays[f"x_{case}"])
            assert near(learner.query(batch), arrays[f"eval_query_{case}"], 1e-9)
            features = learner.features_from(batch, torch.tensor(arrays[f"eval_idx_{case}"]))
            assert near(features, arrays[f"eval_features_{case}"], 1e-9)
            assert near(head(features), arrays[f"eval_logits_{case}"], 1e-9)
            forced = learner.features_from(batch, torch.tensor([[1]]))
            assert near(head(forced), arrays[f"train_task1_logits_{case}"], 1e-9)


def test_golden_training(recordings: list[Arrays]) -> None:
    for arrays in recordings:
        learner = released(arrays)
        for index in range(2):
            if index:
                learner.begin_task(task(index), torch.Generator())
            train_as_recorded(learner, task(index), arrays)
            for ours, (_, theirs) in OURS.items():
                expected = arrays[f"task{index}_end_{theirs}"]
                given = parameter(learner, ours)
                assert near(given, expected.reshape(given.shape)), theirs


def train_as_recorded(learner: DualPrompt, info: TaskInfo, arrays: Arrays) -> None:
    def of(name: str) -> np.ndarray:
        return arrays[f"task{info.index}_{name}"]

    plan = learner.plan(info)
    (group,) = plan.groups
    optimizer = torch.optim.Adam(group.parameters, lr=group.lr)
    batches = float64(of("x"))
    for step in range(plan.epochs * len(batches)):
        place = step % len(batches)
        loss, numbers = learner.loss(batches[place], torch.tensor(of("y")[place]).long())
        assert near(numbers["cross_entropy"], of("ce_values")[step])
        assert near(numbers["similarity"], of("reduce_sim_values")[step])
        assert (of("prompt_idx")[step] == info.index).all()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
