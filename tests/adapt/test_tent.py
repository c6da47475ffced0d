"""TENT against a numpy model whose gradients are differences of its loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from arc_cl import TaskPartition, contracts
from arc_cl.adapt import tent
from arc_cl.contracts import Scope
from arc_cl.errors import CompatibilityError, ConfigurationError

Array = NDArray[np.float64]
Weights = dict[str, Array]
TASKS = TaskPartition.of_sizes([2, 2])
NORMS = ("body.1.weight", "body.1.bias", "body.4.weight", "body.4.bias")


@dataclass
class Model:
    """Four pixels, two layer norms, four classes."""

    network: nn.ModuleDict

    def features(self, images_BCHW: Tensor) -> Tensor:
        return self.network["body"](images_BCHW)  # type: ignore[no-any-return]

    def classify(self, features_BD: Tensor) -> Tensor:
        return self.network["head"](features_BD)  # type: ignore[no-any-return]

    def head(self) -> nn.Linear:
        head = self.network["head"]
        assert isinstance(head, nn.Linear)
        return head

    def parameters(self, scope: Scope) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.network.named_parameters():
            if scope == "all" or (name in NORMS if scope == "norms" else name.startswith("head")):
                yield name, parameter


def model(dtype: torch.dtype = torch.float64) -> Model:
    body = nn.Sequential(nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, 3), nn.Tanh(), nn.LayerNorm(3))
    network = nn.ModuleDict({"body": body, "head": nn.Linear(3, 4)}).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.normal_(1.0 if name in NORMS else 0.0, 0.8, generator=generator)
    return Model(network.eval())


def images(count: int = 12, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(count, 1, 2, 2, generator=generator, dtype=torch.float64).to(dtype)


def values(network: nn.Module) -> Weights:
    return {name: p.detach().numpy().copy() for name, p in network.named_parameters()}


def norm(x: Array, w: Weights, name: str) -> Array:
    centred = x - x.mean(axis=1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    return np.asarray(scaled * w[f"{name}.weight"] + w[f"{name}.bias"])


def logits(w: Weights, x: Array) -> Array:
    hidden = norm(x.reshape(len(x), -1), w, "body.1") @ w["body.2.weight"].T + w["body.2.bias"]
    features = norm(np.tanh(hidden), w, "body.4")
    return np.asarray(features @ w["head.weight"].T + w["head.bias"])


def softmax(z: Array) -> Array:
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return np.asarray(p / p.sum(axis=1, keepdims=True))


def mean_entropy(w: Weights, x: Array) -> float:
    p = softmax(logits(w, x))
    return float(-(p * np.log(p)).sum(axis=1).mean())


def slope(w: Weights, name: str, x: Array, reach: float = 1e-5) -> Array:
    """The gradient of the mean entropy in one parameter, by central differences."""
    found = np.zeros_like(w[name])
    for place in np.ndindex(found.shape):
        ends = []
        for side in (reach, -reach):
            moved = {**w, name: w[name].copy()}
            moved[name][place] += side
            ends.append(mean_entropy(moved, x))
        found[place] = (ends[0] - ends[1]) / (2 * reach)
    return found


def reference(w: Weights, batches: list[Array], how: tent.Settings) -> tuple[Weights, list[Array]]:
    """The weights after all batches, and the logits that each was answered with."""
    w, answers, steps = dict(w), [], 0
    first = {name: np.zeros_like(w[name]) for name in NORMS}
    second = {name: np.zeros_like(w[name]) for name in NORMS}
    for x in batches:
        for _ in range(how.steps):
            seen = logits(w, x)
            slopes = {name: slope(w, name, x) for name in NORMS}
            steps += 1
            for name, g in slopes.items():
                if how.optimizer == "sgd":
                    first[name] = how.momentum * first[name] + g
                    w[name] = w[name] - how.lr * first[name]
                    continue
                first[name] = 0.9 * first[name] + 0.1 * g
                second[name] = 0.999 * second[name] + 0.001 * g**2
                scale = np.sqrt(second[name] / (1 - 0.999**steps)) + 1e-8
                w[name] = w[name] - how.lr * first[name] / (1 - 0.9**steps) / scale
        answers.append(seen)
    return w, answers


@pytest.mark.parametrize(
    "how",
    [
        tent.Settings(lr=0.3, momentum=0.9),
        tent.Settings(lr=0.3, momentum=0.0, steps=2),
        tent.Settings(lr=0.05, optimizer="adam"),
    ],
    ids=["sgd", "two steps a batch", "adam"],
)
def test_weights_and_answers_are_those_of_the_reference(how: tent.Settings) -> None:
    lent = model()
    batches = list(images().split(5))  # the last one is short
    expected, answers = reference(values(lent.network), [b.numpy() for b in batches], how)
    method = tent.create(how)
    method.start(lent, TASKS)
    for batch, logits_BK in zip(batches, answers, strict=True):
        found = method.predict(batch)
        np.testing.assert_allclose(found.logits.numpy(), logits_BK, rtol=0, atol=1e-6)
        assert found.classes.tolist() == logits_BK.argmax(axis=1).tolist()
    for name, value in values(lent.network).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-6, err_msg=name)
    moved = {n for n, v in values(lent.network).items() if (v != values(model().network)[n]).any()}
    assert moved == set(NORMS)
    method.finish()


def test_the_answer_comes_from_before_the_step_and_the_next_from_after() -> None:
    method, lent, batch = tent.create(tent.Settings(lr=0.5)), model(), images()
    plain = lent.classify(lent.features(batch)).detach()
    method.start(lent, TASKS)
    assert torch.equal(method.predict(batch).logits, plain)
    assert not torch.equal(method.predict(batch).logits, plain)
    method.finish()


def test_entropy_falls_on_a_stream_that_repeats() -> None:
    method, lent, batch = tent.create(tent.Settings(lr=0.05, optimizer="adam")), model(), images()
    method.start(lent, TASKS)
    p = [method.predict(batch).logits.softmax(dim=1) for _ in range(20)]
    entropies = [float(torch.special.entr(each).sum(dim=1).mean()) for each in p]
    assert entropies[-1] < 0.5 * entropies[0]
    method.finish()


def test_only_the_norms_learn_and_all_is_given_back() -> None:
    lent = model()
    lent.head().weight.requires_grad_(False)
    kept = torch.ones_like(lent.head().bias)
    lent.head().bias.grad = kept
    before = values(lent.network)
    flags = [p.requires_grad for p in lent.network.parameters()]
    method = tent.create(tent.Settings(lr=0.5))
    method.start(lent, TASKS)
    method.predict(images())
    learning = {n for n, p in lent.network.named_parameters() if p.requires_grad}
    assert learning == set(NORMS)
    method.finish()
    assert [p.requires_grad for p in lent.network.parameters()] == flags
    assert lent.head().bias.grad is kept
    assert all(p.grad is None for name, p in lent.network.named_parameters() if name in NORMS)
    for name, value in values(lent.network).items():
        np.testing.assert_array_equal(value, before[name])


def test_it_learns_whatever_mode_the_caller_is_in() -> None:
    found = []
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        method, lent = tent.create(tent.Settings(lr=0.5)), model()
        with mode:
            method.start(lent, TASKS)
            made_here = images() + 0
            found.append([method.predict(made_here).logits.clone() for _ in range(3)])
            method.finish()
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_a_row_that_is_not_finite_teaches_nothing() -> None:
    spoilt = torch.cat([images(4), torch.full((1, 1, 2, 2), torch.nan, dtype=torch.float64)])
    weights = []
    for batches in ([spoilt], [images(4)], [images(4), spoilt[4:]]):
        method, lent = tent.create(tent.Settings(lr=0.5)), model()
        method.start(lent, TASKS)
        found = [method.predict(batch) for batch in batches][-1]
        weights.append(values(lent.network))
        method.finish()
    assert bool(found.confidence.isnan().all())
    assert bool(found.logits.isfinite().all())
    for others in weights[1:]:
        for name in NORMS:
            np.testing.assert_allclose(weights[0][name], others[name], rtol=0, atol=1e-12)


def test_a_masked_class_stays_masked_and_harms_nothing() -> None:
    method, lent = tent.create(tent.Settings(lr=0.5)), model()
    with torch.no_grad():
        lent.head().bias[3] = -torch.inf
    method.start(lent, TASKS)
    for _ in range(3):
        found = method.predict(images())
    assert bool(found.logits[:, :3].isfinite().all())
    assert 3 not in found.classes.tolist()
    method.finish()


def test_a_model_without_norms_is_refused() -> None:
    class Bare(Model):
        def parameters(self, scope: Scope) -> Iterator[tuple[str, nn.Parameter]]:
            return iter(()) if scope == "norms" else super().parameters(scope)

    with pytest.raises(CompatibilityError, match="norms"):
        tent.create(tent.Settings()).start(Bare(model().network), TASKS)


def test_a_model_that_hides_its_gradients_is_refused() -> None:
    class Hidden(Model):
        def features(self, images_BCHW: Tensor) -> Tensor:
            return super().features(images_BCHW).detach()

    method: contracts.TestTimeMethod = tent.create(tent.Settings())
    method.start(Hidden(model().network), TASKS)
    with pytest.raises(CompatibilityError, match="without gradients"):
        method.predict(images())
    method.finish()


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -1.0), ("lr", float("nan")), ("steps", 0), ("momentum", 1.0), ("optimizer", "lion")],
)
def test_wrong_settings_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=name):
        tent.Settings(**{name: value})  # type: ignore[arg-type]
