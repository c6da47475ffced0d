"""CODA-Prompt: prefixes that are weighted sums of components."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arc_cl.contracts import AsksFirst, TaskInfo
from arc_cl.errors import CompatibilityError, ConfigurationError
from arc_cl.learners.coda_prompt import CODAPrompt, Settings, cosine, create
from small_vit import images, task, transformer

Arrays = dict[str, np.ndarray]
PARTS = ("prompts.attention", "prompts.keys", "prompts.components")


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {"lr": 0.01, "epochs_first": 3, "epochs": 2, "batch_size": 4}
    prompts: dict[str, Any] = {"layers": (0, 1), "components": 11, "prompt_length": 4}
    return Settings(**(values | prompts | changes))


def learner_after(count: int, tasks: int = 3, **changes: Any) -> CODAPrompt:
    learner = create(transformer(), settings(**changes))
    for index in range(count):
        learner.begin_task(task(index, tasks), torch.Generator().manual_seed(index))
    return learner


def parameter(learner: CODAPrompt, name: str) -> nn.Parameter:
    return learner.modules().get_parameter(name)


def rows_in_use(learner: CODAPrompt) -> list[int]:
    """Components that are not zero, the same in all layers and parts."""
    used = [parameter(learner, part).flatten(2).abs().amax(dim=2) > 0 for part in PARTS]
    assert all(torch.equal(each, used[0][:1].expand_as(each)) for each in used)
    return used[0][0].nonzero().flatten().tolist()


def rows_with_gradient(learner: CODAPrompt, scalar: Tensor) -> list[int]:
    parameters = [parameter(learner, part) for part in PARTS]
    gradients = torch.autograd.grad(scalar, parameters)
    used = [each.flatten(2).abs().amax(dim=2) > 0 for each in gradients]
    assert all(torch.equal(each, used[0][:1].expand_as(each)) for each in used)
    return used[0][0].nonzero().flatten().tolist()


def test_tasks_share_all_components_or_drop_the_remainder() -> None:
    used = {
        remainder: [
            len(rows_in_use(learner_after(count, remainder=remainder))) for count in (1, 2, 3)
        ]
        for remainder in ("spread", "dropped")
    }
    assert used == {"spread": [4, 8, 11], "dropped": [3, 6, 9]}
    assert rows_in_use(learner_after(20, tasks=20, components=30)) == list(range(30))
    with pytest.raises(ConfigurationError, match="components is 11, expected at least"):
        learner_after(1, tasks=12)


def test_training_moves_the_new_components_and_adaptation_all_of_them() -> None:
    learner = learner_after(2)
    loss, _ = learner.loss(images(4), torch.arange(5, 9))
    assert rows_with_gradient(learner, loss) == [4, 5, 6, 7]
    features = learner.adaptable().features(images(4))
    assert rows_with_gradient(learner, features.square().sum()) == list(range(8))
    # Both see all components.
    torch.testing.assert_close(
        nn.functional.cross_entropy(learner.adaptable().classify(features)[:, 5:], torch.arange(4)),
        loss,
    )


def test_new_components_are_orthogonal_to_trained_ones_unless_released() -> None:
    for rule, is_exact in (("exact", True), ("independent", False)):
        learner = learner_after(1, gram_schmidt=rule)
        with torch.no_grad():
            for part in PARTS:
                old = parameter(learner, part)[:, :4]
                noise = torch.randn(old.shape, generator=torch.Generator().manual_seed(3))
                old += 0.3 * noise
        learner.begin_task(task(1), torch.Generator().manual_seed(1))
        for part in PARTS:
            rows = parameter(learner, part).detach().flatten(2)[:, :8]
            overlap = (rows @ rows.mT)[:, 4:]
            identity = torch.eye(4, dtype=torch.float64)
            torch.testing.assert_close(overlap[:, :, 4:].diagonal(dim1=1, dim2=2).min().item(), 1.0)
            expected = torch.cat((torch.zeros(4, 4, dtype=torch.float64), identity), dim=1)
            assert torch.allclose(overlap, expected.expand_as(overlap), atol=1e-9) is is_exact


def test_the_penalty_counts_when_asked_for_and_spares_old_components() -> None:
    plain, penalised = learner_after(2), learner_after(2, orthogonality=0.5)
    with torch.no_grad():
        for learner in (plain, penalised):
            for part in PARTS:
                parameter(learner, part).mul_(1.5)
    batch, labels = images(4), torch.arange(5, 9)
    loss, numbers = penalised.loss(batch, labels)
    # Rows of length 1.5: the diagonal of 8 x 8 is off by 1.25, in 3 parts of 2 layers.
    expected = 6 * 1.25**2 / 8
    assert numbers["orthogonality"].item() == pytest.approx(expected)
    assert (loss - plain.loss(batch, labels)[0]).item() == pytest.approx(0.5 * expected)
    assert rows_with_gradient(penalised, loss) == [4, 5, 6, 7]


def test_the_schedule_is_a_cosine_that_one_epoch_does_not_break() -> None:
    assert cosine(1) == cosine(1, delayed=True) == (1.0,)
    assert cosine(3) == pytest.approx((1.0, cos(99 * pi / 400), cos(99 * pi / 200)))
    assert cosine(3, delayed=True) == pytest.approx((1.0, 1.0, cos(99 * pi / 400)))
    learner = learner_after(1)
    plan = learner.plan(task(0))
    assert (plan.optimizer, plan.schedule, plan.drop_last) == ("adam", cosine(3), True)
    assert learner.plan(task(1)).schedule == cosine(2)


def test_golden_schedule(golden: Path) -> None:
    for row in json.loads((golden / "coda_cosine_lr.json").read_text()):
        factors = cosine(row["epochs"], delayed=True)
        assert [row["lr0"] * each for each in factors] == pytest.approx(row["lr_used_in_epoch"])


def test_what_learns_is_head_and_prompts_and_the_backbone_gets_no_gradient() -> None:
    backbone = transformer()
    learner = create(backbone, settings())
    learner.begin_task(task(0), torch.Generator())
    torch.autograd.backward(learner.loss(images(4), torch.tensor([0, 1, 2, 3]))[0])
    named = dict(learner.modules().named_parameters())
    learning = {"head.weight", "head.bias", *PARTS}
    assert {name for name, each in named.items() if each.requires_grad} == learning
    assert {name for name, each in named.items() if each.grad is not None} == learning
    (group,) = learner.plan(task(0)).groups
    assert {id(each) for each in group.parameters} == {id(named[n]) for n in learning}
    adaptable = learner.adaptable()
    assert dict(adaptable.parameters("head+prompts")).keys() == learning
    assert dict(adaptable.parameters("head")).keys() == {"head.weight", "head.bias"}
    assert len(named) == len(list(backbone.parameters())) + len(learning)


def test_it_learns_on_a_cpu() -> None:
    learner, batch, labels = learner_after(1, lr=0.05), images(5), torch.arange(5)
    (group,) = learner.plan(task(0)).groups
    optimizer = torch.optim.Adam(group.parameters, lr=group.lr)
    losses = []
    for _ in range(20):
        loss, _ = learner.loss(batch, labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_known_queries_give_the_same() -> None:
    learner, batch, labels = learner_after(2), images(4), torch.arange(5, 9)
    assert isinstance(learner, AsksFirst)
    queries = learner.query(batch)
    assert torch.equal(
        learner.loss_given(batch, queries, labels)[0], learner.loss(batch, labels)[0]
    )
    features = learner.features_given(batch, queries)
    assert torch.equal(features, learner.adaptable().features(batch))


def test_an_answer_does_not_depend_on_the_rest_of_the_batch() -> None:
    adaptable, batch = learner_after(2).adaptable(), images(5)
    one_by_one = torch.cat([adaptable.features(image[None]) for image in batch])
    torch.testing.assert_close(adaptable.features(batch), one_by_one)


@pytest.mark.parametrize("orthogonality", [0.0, 0.1])
def test_one_compiled_loss_serves_all_tasks(orthogonality: float) -> None:
    learner, batch = learner_after(1, orthogonality=orthogonality), images(4)
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


def test_components_and_head_come_from_the_generator_alone() -> None:
    before = torch.get_rng_state()
    one, other = learner_after(2), learner_after(2)
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in one.modules().state_dict().items():
        assert torch.equal(value, other.modules().state_dict()[name])
    weight, bias = parameter(one, "head.weight"), parameter(one, "head.bias")
    assert 0.9 * 24**-0.5 < weight.abs().max() <= 24**-0.5
    assert 0 < bias.abs().max() <= 24**-0.5


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": ()},
        {"layers": (0, 0)},
        {"components": 0},
        {"prompt_length": 5},
        {"orthogonality": -1.0},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        settings(**wrong)


def test_layers_must_be_there() -> None:
    with pytest.raises(CompatibilityError, match="3 layers"):
        create(transformer(), settings(layers=(0, 3)))


def load(path: Path) -> Arrays:
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def float64(array: np.ndarray) -> Tensor:
    return torch.tensor(array, dtype=torch.float64)


def near(given: Tensor, expected: np.ndarray, tolerance: float = 1e-7) -> bool:
    return bool((given - float64(expected)).abs().max() < tolerance)


OURS = dict(zip(PARTS, "akp", strict=True))


def start_as_recorded(learner: CODAPrompt, info: TaskInfo, arrays: Arrays) -> None:
    learner.begin_task(info, torch.Generator())
    with torch.no_grad():
        for part, letter in OURS.items():
            for place, layer in enumerate(learner.settings.layers):
                recorded = arrays[f"task{info.index}_start_prompt/e_{letter}_{layer}"]
                parameter(learner, part)[place] = float64(recorded)
        parameter(learner, "head.weight").copy_(float64(arrays[f"task{info.index}_start_fc_w"]))
        parameter(learner, "head.bias").copy_(float64(arrays[f"task{info.index}_start_fc_b"]))


def released(arrays: Arrays) -> CODAPrompt:
    args = json.loads(str(arrays["args"]))
    vit = transformer(size=args["img_size"], depth=args["depth"])
    vit.load_state_dict({name: float64(arrays[f"param/{name}"]) for name in vit.state_dict()})
    how = settings(
        lr=args["lr"],
        epochs=args["epochs"],
        epochs_first=args["epochs"],
        layers=(0, 1, 2, 3, 4),
        components=args["pool"],
        prompt_length=args["plen"],
        delayed=True,
        remainder="dropped",
        gram_schmidt="independent",
    )
    return create(vit, how)


def test_golden_training(golden: Path) -> None:
    paths = sorted(golden.glob("coda_vit_tiny_seed*.npz"))
    assert paths
    for path in paths:
        arrays = load(path)
        learner = released(arrays)
        for index in range(2):
            start_as_recorded(learner, task(index), arrays)
            adaptable = learner.adaptable()
            features = adaptable.features(float64(arrays[f"task{index}_x_eval"]))
            assert near(features, arrays[f"task{index}_eval_feature"])
            assert near(adaptable.head()(features), arrays[f"task{index}_eval_logits"])
            train_as_recorded(learner, task(index), arrays)
            check_end(learner, index, arrays)


def train_as_recorded(learner: CODAPrompt, info: TaskInfo, arrays: Arrays) -> None:
    plan = learner.plan(info)
    (group,) = plan.groups
    optimizer = torch.optim.Adam(group.parameters, lr=group.lr)
    batches, labels = (arrays[f"task{info.index}_{name}"] for name in "xy")
    for factor in plan.schedule:
        optimizer.param_groups[0]["lr"] = group.lr * factor
        for batch, wanted in zip(float64(batches), torch.tensor(labels).long(), strict=True):
            loss, _ = learner.loss(batch, wanted)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()


def check_end(learner: CODAPrompt, index: int, arrays: Arrays) -> None:
    for part, letter in OURS.items():
        for place, layer in enumerate(learner.settings.layers):
            recorded = arrays.get(f"task{index}_end_prompt/e_{letter}_{layer}")
            if recorded is not None:
                assert near(parameter(learner, part)[place], recorded), (part, layer)
    assert near(parameter(learner, "head.weight"), arrays[f"task{index}_end_fc_w"])
    assert near(parameter(learner, "head.bias"), arrays[f"task{index}_end_fc_b"])
