"""The training loop: which images in which batches, at which rates, in which precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import _dynamo as dynamo
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

from arc_cl.contracts import (
    Adaptable,
    Learner,
    ParameterGroup,
    TaskInfo,
    TrainingImages,
    TrainingPlan,
)
from arc_cl.engine.fit import Losses, Progressed, TaskData, fit
from arc_cl.engine.images import Appearance, DeviceImages, Normalisation
from arc_cl.engine.progress import Silent
from arc_cl.engine.queries import Queries
from arc_cl.engine.resolve import Resolved, complete, resolve
from arc_cl.engine.runtime import Precision, Runtime
from arc_cl.errors import ConfigurationError
from arc_cl.experiments.fast import fast
from arc_cl.experiments.recipes import recipe

TASK = TaskInfo(index=1, seen_classes=6, new_classes=2, tasks=3, classes=9)
FEATURES, CLASSES = 12, 6
APPEARANCE = Appearance("as_stored", 2, Normalisation((0.5,) * 3, (0.25,) * 3))


class Toy:
    """A linear classifier of pixels that notes what it is given."""

    def __init__(self, **plan: object) -> None:
        self.network = nn.ModuleDict({"first": nn.Linear(12, 12), "head": nn.Linear(12, CLASSES)})
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        self.how = plan
        self.batches: list[list[int]] = []
        self.seen: list[tuple[torch.dtype, bool, str]] = []

    def plan(self, task: TaskInfo) -> TrainingPlan:
        first, head = (tuple(self.network[name].parameters()) for name in ("first", "head"))
        found = TrainingPlan(
            groups=(
                ParameterGroup(parameters=first, lr=0.1, weight_decay=0.01),
                ParameterGroup(parameters=head, lr=0.2),
            ),
            optimizer="sgd",
            momentum=0.9,
            batch_size=3,
            schedule=(1.0, 0.5),
        )
        return replace(found, **self.how)  # type: ignore[arg-type]

    def loss(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits_BK = self.network["head"](self.network["first"](images_BCHW.flatten(1)).tanh())
        self.batches.append(labels_B.tolist())
        self.seen.append((logits_BK.dtype, self.network.training, images_BCHW.device.type))
        loss = cross_entropy(logits_BK, labels_B % CLASSES)
        return loss, {"loss": loss.detach(), "label": labels_B.float().mean()}

    def modules(self) -> nn.Module:
        return self.network

    def begin_task(self, task: TaskInfo, generator: torch.Generator) -> None:
        raise NotImplementedError

    def end_task(self, task: TaskInfo, images: TrainingImages, generator: torch.Generator) -> None:
        raise NotImplementedError

    def rehearsal(self) -> Tensor:
        raise NotImplementedError

    def adaptable(self) -> Adaptable:
        raise NotImplementedError


@dataclass
class Kept:
    """Notes what the loop reports, and may say where a task was left."""

    at: Progressed = field(default_factory=Progressed)
    rates: list[list[float]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    epochs: list[tuple[int, dict[str, float], int]] = field(default_factory=list)

    def left_at(self, module: nn.Module, optimizer: Optimizer) -> Progressed:
        return self.at

    def step_done(self, module: nn.Module, optimizer: Optimizer, at: Progressed) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])
        self.steps.append((at.epoch, at.step))

    def epoch_done(self, epoch: int, means: Mapping[str, float], images: int) -> None:
        self.epochs.append((epoch, dict(means), images))


class Shares(Silent):
    """The share of the stage that is done, and the images that it took."""

    def __init__(self) -> None:
        self.share, self.images = 0.0, 0

    def advance(self, share: float, images: int) -> None:
        self.share, self.images = self.share + share, self.images + images


def data_of(count: int) -> TaskData:
    """Every image has a label of its own."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (2 * count + 1, 2, 2, 3), dtype=np.uint8)
    images = DeviceImages(pixels, APPEARANCE, torch.device("cpu"))
    return TaskData(images, torch.arange(count) * 2, torch.arange(count))


def trained(
    learner: Toy, count: int = 7, at: Progressed | None = None, precision: Precision = "fp32"
) -> Kept:
    runtime = Runtime.open(0, "cpu", precision)
    keeper = Kept(at or Progressed())
    fit(runtime, learner, TASK, data_of(count), Losses(runtime), keeper, Silent())
    return keeper


def sizes(learner: Toy) -> list[int]:
    return [len(batch) for batch in learner.batches]


# --- batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "drop_last", "expected"),
    [
        (7, False, [3, 3, 1]),
        (7, True, [3, 3]),
        (6, False, [3, 3]),
        (6, True, [3, 3]),
        (2, False, [2]),
        (2, True, [2]),
    ],
)
def test_an_incomplete_batch_is_dropped_unless_it_is_the_only_one(
    count: int, drop_last: bool, expected: list[int]
) -> None:
    learner = Toy(drop_last=drop_last, schedule=(1.0,))
    keeper = trained(learner, count)
    assert sizes(learner) == expected
    assert keeper.epochs[0][2] == sum(expected)


def test_an_epoch_shows_each_image_once_and_each_in_another_order() -> None:
    learner = Toy()
    trained(learner)
    first, second = learner.batches[:3], learner.batches[3:]
    orders = [[number for batch in epoch for number in batch] for epoch in (first, second)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(7))
    assert orders[0] != orders[1]


def test_the_order_follows_from_the_seed_alone() -> None:
    one, other = Toy(), Toy()
    before = torch.get_rng_state()
    trained(one)
    trained(other)
    assert one.batches == other.batches
    assert torch.equal(torch.get_rng_state(), before)


def test_means_count_every_image_alike() -> None:
    """The last batch is smaller: a mean of means would be another number."""
    keeper = trained(Toy())
    assert [(epoch, images) for epoch, _, images in keeper.epochs] == [(0, 7), (1, 7)]
    for _, means, _ in keeper.epochs:
        assert means.keys() == {"loss", "label"}
        assert means["label"] == pytest.approx(3.0)


def test_progress_adds_up_to_a_stage() -> None:
    for at, share, images in ((Progressed(), 1.0, 14), (Progressed(1, 1, {}), 1.0, 4)):
        runtime, shares = Runtime.open(0, "cpu"), Shares()
        fit(runtime, Toy(), TASK, data_of(7), Losses(runtime), Kept(at), shares)
        assert shares.share == pytest.approx(share)
        assert shares.images == images


def test_it_goes_on_where_it_was_left() -> None:
    whole, rest = Toy(), Toy()
    kept = trained(whole)
    sums = {"loss": torch.tensor(1.0), "label": torch.tensor(float(sum(whole.batches[3])))}
    resumed = trained(rest, at=Progressed(1, 1, sums))
    assert rest.batches == whole.batches[4:]
    assert resumed.steps == kept.steps[4:] == [(1, 2), (1, 3)]
    ((epoch, means, images),) = resumed.epochs
    assert (epoch, images) == (1, 7)
    assert means["label"] == pytest.approx(3.0)


def test_a_task_left_at_its_end_has_nothing_to_do() -> None:
    learner = Toy()
    ((epoch, means, _),) = trained(learner, at=Progressed(1, 3, {"loss": torch.tensor(7.0)})).epochs
    assert (epoch, means, learner.batches) == (1, {"loss": 1.0}, [])
    assert not trained(learner, at=Progressed(2)).epochs


# --- steps -----------------------------------------------------------------------------------


def test_the_schedule_sets_the_rates_of_all_groups() -> None:
    keeper = trained(Toy(schedule=(1.0, 0.5, 0.0)))
    assert keeper.rates == [[0.1, 0.2]] * 3 + [[0.05, 0.1]] * 3 + [[0.0, 0.0]] * 3


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_its_steps_are_those_of_torch(kind: str) -> None:
    fitted, alone = Toy(optimizer=kind), Toy(optimizer=kind)
    trained(fitted)
    first, head = alone.network["first"].parameters(), alone.network["head"].parameters()
    groups = [{"params": first, "weight_decay": 0.01}, {"params": head, "lr": 0.2}]
    optimizer = SGD(groups, lr=0.1, momentum=0.9) if kind == "sgd" else Adam(groups, lr=0.1)
    data = data_of(7)
    for step, batch in enumerate(fitted.batches):
        if step == 3:
            for group in optimizer.param_groups:
                group["lr"] /= 2
        labels = torch.tensor(batch)
        loss, _ = alone.loss(data.images.at_test(data.numbers_N[labels]), labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    for one, other in zip(fitted.network.parameters(), alone.network.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_network_is_in_training_mode_while_it_trains() -> None:
    learner = Toy()
    learner.network.eval()
    trained(learner)
    assert {training for _, training, _ in learner.seen} == {True}
    assert not learner.network.training


def test_bf16_computes_in_bf16_and_keeps_float32() -> None:
    exact, rough = Toy(), Toy()
    trained(exact)
    start = {name: value.clone() for name, value in rough.network.state_dict().items()}
    ((_, first, _), (_, last, _)) = trained(rough, precision="bf16").epochs
    assert {kind for kind, _, _ in rough.seen} == {torch.bfloat16}
    assert {kind for kind, _, _ in exact.seen} == {torch.float32}
    for name, value in rough.network.state_dict().items():
        assert value.dtype == torch.float32
        assert not torch.equal(value, start[name])
        torch.testing.assert_close(value, exact.network.state_dict()[name], rtol=0, atol=0.05)
    assert last["loss"] < first["loss"]


# --- errors ----------------------------------------------------------------------------------


def test_a_task_without_images_names_its_classes() -> None:
    learner = Toy()
    with pytest.raises(ConfigurationError, match=r"task 2 has no training image.* 4 … 5"):
        trained(learner, 0)
    assert not learner.batches


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_loss_out_of_bounds_names_place_and_rates(bad: float) -> None:
    class Diverges(Toy):
        def loss(self, images_BCHW: Tensor, labels_B: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss, numbers = super().loss(images_BCHW, labels_B)
            far = loss * (bad if len(self.batches) == 6 else 1.0)
            return far, {**numbers, "loss": far.detach()}

    with pytest.raises(
        ConfigurationError,
        match=rf"loss {bad}, label 3.0\) in task 2, epoch 2; lower .* \(now 0.1, 0.2\)",
    ):
        trained(Diverges())


# --- losses ----------------------------------------------------------------------------------


@cache
def miniature(learner: str) -> Resolved:
    return resolve(complete(fast(recipe(learner, "glyphs"))))


def compiled_over_tasks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[nn.Module], list[str | None]]:
    """The loss modules of three tasks, and the modes of all compilations that were asked for."""
    modes: list[str | None] = []

    def compile(module: nn.Module, *, mode: str | None) -> None:
        modes.append(mode)

    monkeypatch.setattr(nn.Module, "compile", compile)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    runtime, made = Runtime.open(0, "cpu", compile=True), miniature(name)
    learner, losses, modules = made.learner(), Losses(runtime), []
    for stage in range(3):
        learner.begin_task(made.scenario.info(stage), runtime.generator("init", stage))
        modules.append(losses.of(learner, with_queries=False))
        assert losses.of(learner, with_queries=False) is modules[-1]
    return modules, modes


@pytest.mark.parametrize("name", ["l2p", "dualprompt", "coda_prompt"])
def test_a_prompt_learner_is_compiled_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules, modes = compiled_over_tasks(name, monkeypatch)
    assert modules[0] is modules[1] is modules[2]
    assert modes == [None]


@pytest.mark.parametrize("name", ["finetune", "der", "slca"])
def test_a_network_that_grows_is_compiled_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules, modes = compiled_over_tasks(name, monkeypatch)
    assert len({id(module) for module in modules}) == len(modes) == 3


def test_nothing_is_compiled_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nn.Module, "compile")
    losses = Losses(Runtime.open(0, "cpu"))
    assert isinstance(losses.of(Toy(), with_queries=False), nn.Module)


def test_a_frozen_parameter_or_another_learner_asks_for_a_new_module() -> None:
    losses, learner = Losses(Runtime.open(0, "cpu")), Toy()
    first = losses.of(learner, with_queries=False)
    assert losses.of(learner, with_queries=False) is first
    assert losses.of(Toy(), with_queries=False) is not first
    again = losses.of(learner, with_queries=False)
    learner.network["first"].requires_grad_(False)
    assert losses.of(learner, with_queries=False) is not again


@pytest.mark.parametrize("name", ["l2p", "dualprompt", "coda_prompt"])
def test_one_graph_of_a_prompt_learner_serves_all_tasks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced as a whole, and never again; without generating code, which would take minutes."""
    compile = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, mode: compile(self, backend="eager", fullgraph=True)
    )
    counters.clear()
    runtime, made = Runtime.open(0, "cpu", compile=True), miniature(name)
    learner, losses = made.learner(), Losses(runtime)
    with dynamo.config.patch(error_on_recompile=True):
        for stage in range(3):
            task = made.scenario.info(stage)
            learner.begin_task(task, runtime.generator("init", stage))
            data = glyph_like(runtime, learner, known=False)
            data = replace(data, labels_N=data.labels_N + task.old_classes)
            fit(runtime, learner, task, data, losses, Kept(), Silent())
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["l2p", "dualprompt", "coda_prompt"])
def test_known_queries_change_nothing_but_the_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, weights = list[int](), []
    for known in (False, True):
        runtime, learner = Runtime.open(0, "cpu"), miniature(name).learner()
        task = miniature(name).scenario.info(0)
        learner.begin_task(task, runtime.generator("init", 0))
        query = counted(learner, monkeypatch)
        data = glyph_like(runtime, learner, known=known)
        fit(runtime, learner, task, data, Losses(runtime), Kept(), Silent())
        asked.append(query())
        weights.append({n: p for n, p in learner.modules().state_dict().items() if "prompts" in n})
    assert asked == [12, 12]
    assert weights[0].keys() == weights[1].keys()
    for one, other in zip(weights[0].values(), weights[1].values(), strict=True):
        torch.testing.assert_close(one, other)


def counted(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many images the learner was asked about from now on."""
    asked = []
    query: Callable[[Tensor], Tensor] = learner.query  # type: ignore[attr-defined]

    def counting(images_BCHW: Tensor) -> Tensor:
        asked.append(len(images_BCHW))
        return query(images_BCHW)

    monkeypatch.setattr(learner, "query", counting, raising=False)
    return lambda: sum(asked)


def glyph_like(runtime: Runtime, learner: Learner, *, known: bool) -> TaskData:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    images = DeviceImages(pixels, APPEARANCE, runtime.device)
    queries = Queries(runtime, learner, images) if known else None  # type: ignore[arg-type]
    if queries is not None:
        queries.prepare(torch.arange(12))
    return TaskData(images, torch.arange(12), torch.arange(12) % 3, queries)
