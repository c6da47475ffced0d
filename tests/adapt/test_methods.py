"""Every test-time method that the catalogue finds, under the same few conditions."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arc_cl import Decision, TaskPartition, catalogue, contracts
from arc_cl.contracts import Replays

EVERY = pytest.mark.parametrize("name", catalogue.names("adapt"))
CLASSES, FEATURES = 12, 6


@dataclass
class Model:
    """A head and nothing else: its images are features."""

    linear: nn.Linear

    def features(self, images_BCHW: Tensor) -> Tensor:
        return images_BCHW

    def classify(self, features_BD: Tensor) -> Tensor:
        return self.linear(features_BD)  # type: ignore[no-any-return]

    def head(self) -> nn.Linear:
        return self.linear

    def parameters(self, scope: contracts.Scope) -> Any:
        return self.linear.named_parameters()


def model(classes: int = CLASSES) -> Model:
    generator = torch.Generator().manual_seed(1)
    linear = nn.Linear(FEATURES, classes, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        linear.weight.normal_(0, 2, generator=generator)
        linear.bias.zero_()
    return Model(linear)


def stream(images: int = 60) -> Tensor:
    return torch.randn(images, FEATURES, generator=torch.Generator().manual_seed(2))


def method_of(name: str) -> contracts.TestTimeMethod:
    module = catalogue.load("adapt", name)
    method: contracts.TestTimeMethod = module.create(module.Settings())
    return method


def answers(name: str, tasks: list[int], batch_size: int = 8) -> list[Decision]:
    method = method_of(name)
    method.start(model(sum(tasks)), TaskPartition.of_sizes(tasks))
    found = [method.predict(batch) for batch in torch.split(stream(), batch_size)]
    method.finish()
    return found


def classes_of(found: list[Decision]) -> Tensor:
    return torch.cat([each.classes for each in found])


@EVERY
def test_it_has_no_way_to_see_a_label(name: str) -> None:
    assert list(inspect.signature(method_of(name).predict).parameters) == ["batch"]
    assert list(inspect.signature(method_of(name).start).parameters) == ["adaptable", "partition"]


@EVERY
def test_it_is_deterministic_and_leaves_the_global_rng_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, again = answers(name, [4, 4, 4]), answers(name, [4, 4, 4])
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.logits, other.logits)
        assert torch.equal(one.classes, other.classes)


@EVERY
@pytest.mark.parametrize("tasks", [[4, 4, 4], [12], [1, 9, 2]], ids=str)
@pytest.mark.parametrize("batch_size", [1, 7])
def test_any_tasks_and_any_batch(name: str, tasks: list[int], batch_size: int) -> None:
    found = answers(name, tasks, batch_size)
    task_of_class = torch.tensor(TaskPartition.of_sizes(tasks).task_of_class)
    for each in found:
        assert each.classes.dtype == torch.int64
        assert each.logits.shape[1] == sum(tasks)
        assert torch.equal(each.tasks, task_of_class[each.classes])
        if len(tasks) == 1:
            assert not each.corrected.any()
            assert not each.retained.any()


@EVERY
def test_each_start_is_a_fresh_one_and_the_model_stays(name: str) -> None:
    method, lent = method_of(name), model()
    before = [value.clone() for value in lent.linear.state_dict().values()]
    runs = []
    for _ in range(2):
        method.start(lent, TaskPartition.of_sizes([4, 4, 4]))
        runs.append(torch.cat([method.predict(b).logits for b in torch.split(stream(), 5)]))
        method.finish()
    assert torch.equal(*runs)
    assert all(
        torch.equal(a, b) for a, b in zip(before, lent.linear.state_dict().values(), strict=True)
    )


@EVERY
@pytest.mark.parametrize("batch_size", [1, 7])
def test_replay_is_the_same_as_batch_by_batch(name: str, batch_size: int) -> None:
    method = method_of(name)
    if not isinstance(method, Replays):
        pytest.skip(f"{name} has no replay")
    method.start(model(), TaskPartition.of_sizes([4, 4, 4]))
    whole = method.replay(stream(), batch_size)
    found = answers(name, [4, 4, 4], batch_size)
    assert torch.equal(whole.classes, classes_of(found))
    torch.testing.assert_close(whole.logits, torch.cat([each.logits for each in found]))


def test_none_is_the_argmax() -> None:
    found = answers("none", [4, 4, 4])
    assert torch.equal(classes_of(found), model().classify(stream()).argmax(dim=1))
    assert not any(each.corrected.any() or each.retained.any() for each in found)
