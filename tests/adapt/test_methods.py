"""Every test-time method that the catalogue finds, under the same few conditions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from arc_cl import Decision, TaskPartition, catalogue, contracts
from arc_cl.contracts import Replays
from arc_cl.engine.guard import lent

EVERY = pytest.mark.parametrize("name", catalogue.names("adapt"))
CLASSES, FEATURES = 12, 6


@dataclass
class Model:
    """Images of 3 x 4 x 4 through a norm and a layer to features, and a head."""

    network: nn.ModuleDict

    def features(self, images_BCHW: Tensor) -> Tensor:
        return self.network["backbone"](images_BCHW)  # type: ignore[no-any-return]

    def classify(self, features_BD: Tensor) -> Tensor:
        return self.network["head"](features_BD)  # type: ignore[no-any-return]

    def head(self) -> nn.Linear:
        head = self.network["head"]
        assert isinstance(head, nn.Linear)
        return head

    def parameters(self, scope: contracts.Scope) -> Iterator[tuple[str, nn.Parameter]]:
        prefix = {"all": "", "norms": "backbone.1."}.get(scope, "head.")
        for name, parameter in self.network.named_parameters():
            if name.startswith(prefix):
                yield name, parameter


def model(classes: int = CLASSES) -> Model:
    generator = torch.Generator().manual_seed(1)
    backbone = nn.Sequential(nn.Flatten(), *_layers(), nn.Tanh())
    head = nn.Linear(FEATURES, classes, device="meta").to_empty(device="cpu")
    network = nn.ModuleDict({"head": head, "backbone": backbone})
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("weight"):
                parameter.normal_(1 if name == "backbone.1.weight" else 0, 2, generator=generator)
            else:
                parameter.zero_()
    return Model(network.eval())


def _layers() -> tuple[nn.Module, nn.Module]:
    norm, linear = nn.LayerNorm(48, device="meta"), nn.Linear(48, FEATURES, device="meta")
    return norm.to_empty(device="cpu"), linear.to_empty(device="cpu")


def stream(method: contracts.TestTimeMethod, images: int = 60) -> Tensor:
    """What the method consumes."""
    shape = (3, 4, 4) if method.consumes == "images" else (FEATURES,)
    return torch.randn(images, *shape, generator=torch.Generator().manual_seed(2))


def method_of(name: str) -> contracts.TestTimeMethod:
    module = catalogue.load("adapt", name)
    method: contracts.TestTimeMethod = module.create(module.Settings())
    return method


def answers(name: str, tasks: list[int], batch_size: int = 8) -> list[Decision]:
    method = method_of(name)
    method.start(model(sum(tasks)), TaskPartition.of_sizes(tasks))
    found = [method.predict(batch) for batch in torch.split(stream(method), batch_size)]
    method.finish()
    return found


def classes_of(found: list[Decision]) -> Tensor:
    return torch.cat([each.classes for each in found])


def tensors(lender: Model) -> list[Tensor]:
    return [value.clone() for value in lender.network.state_dict().values()]


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
def test_answers_do_not_depend_on_the_global_rng(name: str) -> None:
    first = answers(name, [4, 4, 4])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(77)
        again = answers(name, [4, 4, 4])
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.logits, other.logits)


@EVERY
@pytest.mark.parametrize("tasks", [[4, 4, 4], [12], [1, 9, 2]], ids=str)
@pytest.mark.parametrize("batch_size", [1, 7])
def test_any_tasks_and_any_batch(name: str, tasks: list[int], batch_size: int) -> None:
    found = answers(name, tasks, batch_size)
    task_of_class = torch.tensor(TaskPartition.of_sizes(tasks).task_of_class)
    for each in found:
        assert each.classes.dtype == torch.int64
        assert each.logits.shape[1] == sum(tasks)
        assert not each.logits.requires_grad
        assert torch.equal(each.tasks, task_of_class[each.classes])
        if len(tasks) == 1:
            assert not each.corrected.any()
            assert not each.retained.any()


@EVERY
def test_each_start_is_a_fresh_one_and_the_model_stays(name: str) -> None:
    method, lender = method_of(name), model()
    before = tensors(lender)
    flags = [parameter.requires_grad for parameter in lender.network.parameters()]
    runs = []
    for _ in range(2):
        method.start(lender, TaskPartition.of_sizes([4, 4, 4]))
        runs.append(torch.cat([method.predict(b).logits for b in stream(method).split(5)]))
        method.finish()
    assert torch.equal(*runs)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(lender), strict=True))
    assert [parameter.requires_grad for parameter in lender.network.parameters()] == flags
    assert all(parameter.grad is None for parameter in lender.network.parameters())


@EVERY
def test_the_guard_takes_the_model_back_from_a_method_that_broke_off(name: str) -> None:
    method, lender = method_of(name), model()
    before = tensors(lender)
    lender.head().weight.requires_grad_(False)
    with lent(lender.network):
        method.start(lender, TaskPartition.of_sizes([4, 4, 4]))
        for batch in stream(method).split(20):
            method.predict(batch)  # and never a finish
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(lender), strict=True))
    flags = {each: p.requires_grad for each, p in lender.network.named_parameters()}
    assert [each for each, learns in flags.items() if not learns] == ["head.weight"]


@EVERY
@pytest.mark.filterwarnings("ignore::arc_cl.errors.ARCWarning")
def test_a_row_that_is_not_finite_is_answered_and_spoils_no_other(name: str) -> None:
    method = method_of(name)
    batch, later = stream(method, 16).split(8)
    batch[3].view(-1)[2] = torch.nan
    method.start(model(), TaskPartition.of_sizes([4, 4, 4]))
    for found, missing in ((method.predict(batch), [3]), (method.predict(later), [])):
        assert bool(found.logits.isfinite().all())
        assert found.confidence.isnan().nonzero()[:, 0].tolist() == missing
    method.finish()


@EVERY
def test_it_works_in_the_callers_inference_mode(name: str) -> None:
    expected = answers(name, [4, 4, 4])
    method, lender = method_of(name), model()
    with torch.inference_mode():
        method.start(lender, TaskPartition.of_sizes([4, 4, 4]))
        found = [method.predict(batch) for batch in stream(method).split(8)]
        method.finish()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.logits, other.logits)


@EVERY
@pytest.mark.parametrize("batch_size", [1, 7])
def test_replay_is_the_same_as_batch_by_batch(name: str, batch_size: int) -> None:
    method = method_of(name)
    if not isinstance(method, Replays):
        pytest.skip(f"{name} has no replay")
    method.start(model(), TaskPartition.of_sizes([4, 4, 4]))
    whole = method.replay(stream(method), batch_size)
    found = answers(name, [4, 4, 4], batch_size)
    assert torch.equal(whole.classes, classes_of(found))
    torch.testing.assert_close(whole.logits, torch.cat([each.logits for each in found]))


def test_none_is_the_argmax() -> None:
    found = answers("none", [4, 4, 4])
    plain = model().classify(stream(method_of("none")))
    assert torch.equal(classes_of(found), plain.argmax(dim=1))
    assert not any(each.corrected.any() or each.retained.any() for each in found)
