"""docs/released-code.md is complete and true; and what guards it where no other file does."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from arc_cl import ARC, ARCSettings
from arc_cl.contracts import LabelledImages, Split
from arc_cl.core.retention import retention_gradient
from arc_cl.data.sources.glyphs import Glyphs
from arc_cl.engine.images import DeviceImages
from arc_cl.engine.progress import Silent
from arc_cl.engine.resolve import changed, complete, resolve
from arc_cl.engine.runtime import Runtime
from arc_cl.engine.training import Order, train
from arc_cl.experiments.fast import fast
from arc_cl.experiments.hyperparameters import FORMS
from arc_cl.experiments.recipes import recipe

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "released-code.md").read_text(encoding="utf-8")
NUMBER, SETTING, GUARD = 0, 3, 4


def rows() -> list[list[str]]:
    """The cells of all numbered rows."""
    lines = re.findall(r"^\| (\d+ \|.*) \|$", DOCUMENT, re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


@cache
def guards_in(path: Path) -> dict[str, bool]:
    """`test_x` and `TestClass::test_x`, and whether it needs golden vectors."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inner, prefix = [node], ""
        if isinstance(node, ast.ClassDef):
            inner, prefix = node.body, f"{node.name}::"
        for one in inner:
            if isinstance(one, ast.FunctionDef):
                found[prefix + one.name] = "golden" in [each.arg for each in one.args.args]
    return found


def released_values() -> dict[str, list[Any]]:
    """What a setting may be said to bring back: fields to values of the released form."""
    values: dict[str, list[Any]] = {"coupling": ["freeze", "released"], "shuffled": [False]}
    values["normalise"] = [recipe("l2p", "cifar100", "released").setup.normalise]
    for field in dataclasses.fields(ARCSettings):
        values[field.name] = [getattr(ARCSettings.released(), field.name)]
    for forms in FORMS.values():
        for name, one in forms["released"].items():
            values.setdefault(name, []).append(one.value)
    return values


def test_every_row_is_there_and_filled() -> None:
    found = rows()
    assert [int(row[NUMBER]) for row in found] == list(range(1, len(found) + 1))
    assert len(found) >= 28
    assert all(len(row) == 5 and all(row) for row in found)


@pytest.mark.parametrize("row", rows(), ids=lambda row: str(row[NUMBER]))
def test_a_row_has_a_guard_that_exists(row: list[str]) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", row[GUARD])
    assert len(named) == row[GUARD].count("tests/")
    for file, test in named:
        assert test in guards_in(ROOT / file), f"{file}::{test}"
    # Some guard runs where there are no golden vectors, too.
    assert not all(guards_in(ROOT / file)[test] for file, test in named)


def test_settings_that_bring_slips_back_are_those_of_the_code() -> None:
    known = released_values()
    named = [pair for row in rows() for pair in re.findall(r"`(\w+)=(.+?)`", row[SETTING])]
    for name, value in named:
        assert ast.literal_eval(value) in known[name], name
    forms = {name for learner in FORMS.values() for name in learner["released"]}
    assert forms <= {name for name, _ in named}  # no slip of a learner is left out


# ARC


def problem(rows: int = 200, classes: int = 30) -> tuple[Tensor, Tensor]:
    """The weight of a head without bias, and features, in float64."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(classes, 16, generator=generator, dtype=torch.float64)
    return weight, torch.randn(rows, 16, generator=generator, dtype=torch.float64)


def arc_on(weight: Tensor, tasks: list[int], **settings: Any) -> ARC:
    return ARC((weight, None), tasks=tasks, settings=ARCSettings.paper(beta=0.5, **settings))


def test_retention_learns_from_past_predictions_only_unless_released() -> None:
    weight, features = problem()
    newest = (features @ weight.T).argmax(dim=1) >= 20
    for past_only in (True, False):
        retained = arc_on(weight, [10] * 3, past_only=past_only)(features).retained
        assert retained[~newest].any()
        assert bool(retained[newest].any()) is not past_only


def test_answers_follow_the_step_unless_released() -> None:
    weight, features = problem()
    for recompute in (True, False):
        arc = arc_on(weight, [10] * 3, recompute=recompute, lr=0.5)
        logits = arc(features).logits
        assert arc.steps == 1
        torch.testing.assert_close(logits, features @ (arc.weight if recompute else weight).T)


def test_a_short_last_task_learns_from_soft_labels() -> None:
    """By autograd, with ε shared by all other classes, however many each task has."""
    weight, features = problem(classes=7)
    arc = arc_on(weight, [3, 3, 1], label_smoothing=0.1, lr=0.5)
    retained = arc(features).retained
    leaf = weight.clone().requires_grad_()
    log_p = (features[retained] @ leaf.T).log_softmax(dim=1)
    soft = torch.full_like(log_p, 0.1 / 6)
    soft.scatter_(1, log_p.argmax(dim=1, keepdim=True), 0.9)
    losses = -(soft * log_p).sum(dim=1) - (log_p.exp() * log_p).sum(dim=1)
    (gradient,) = torch.autograd.grad(losses.mean(), leaf)
    torch.testing.assert_close(arc.weight, weight - 0.5 * gradient)


def test_soft_labels_are_made_where_their_logits_are() -> None:
    logits, labels = (
        torch.empty(4, 6, device="meta"),
        torch.zeros(4, dtype=torch.int64, device="meta"),
    )
    settings = ARCSettings.released(label_smoothing=0.1)
    assert retention_gradient(logits, labels, settings).device.type == "meta"


def test_a_relative_step_means_the_same_on_any_scale_of_features() -> None:
    weight, features = problem()
    for step, is_same in (("relative", True), ("absolute", False)):
        one, other = (arc_on(each, [10] * 3, step=step, lr=0.1) for each in (weight, weight / 50))
        logits = one.replay(features, batch_size=4).logits
        assert torch.allclose(other.replay(50 * features, batch_size=4).logits, logits) is is_same


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_batch_without_a_confident_row_moves_nothing(optimizer: str) -> None:
    weight, features = problem()
    arc = arc_on(weight, [10] * 3, optimizer=optimizer, weight_decay=0.1)
    arc(features)
    before = arc.state_dict()
    assert not arc(torch.zeros(3, 16)).retained.any()
    after = arc.state_dict()
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {"norm_rows"}  # the rows are counted


def test_both_losses_off_mean_cross_entropy() -> None:
    weight, features = problem()
    one, other = (
        arc_on(weight, [10] * 3, cross_entropy=given, entropy=False, lr=0.5)
        for given in (False, True)
    )
    for arc in (one, other):
        arc.replay(features, batch_size=8)
    assert torch.equal(one.weight, other.weight)
    assert one.steps > 0


# Training


class FewGlyphs(Glyphs):
    """What a miniature uses, drawn once."""

    @cache  # noqa: B019
    def arrays(self, split: Split) -> LabelledImages:
        return super().arrays(split)


GLYPHS = FewGlyphs(train=6, test=4)


class OtherTestImages(Glyphs):
    """The same training images, and the negatives of the test images."""

    def arrays(self, split: Split) -> LabelledImages:
        data = GLYPHS.arrays(split)
        if split == "train":
            return data
        return dataclasses.replace(data, images_NHWC=255 - data.images_NHWC)


def trained(learner: str, source: Glyphs, folder: Path, *pairs: str) -> dict[str, bytes]:
    """The checkpoints of a miniature."""
    made = resolve(complete(changed(fast(recipe(learner, "glyphs")), pairs)))
    order = Order(folder, Runtime.open(0, "cpu"), "x")
    train(order, dataclasses.replace(made, source=source), Silent())
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.glob("stages/*/*")}


@pytest.mark.parametrize("learner", ["icarl", "l2p"])
def test_training_never_sees_a_test_image(learner: str, tmp_path: Path) -> None:
    one = trained(learner, GLYPHS, tmp_path / "one")
    assert trained(learner, OtherTestImages(), tmp_path / "other") == one
    features = [(tmp_path / run / "features/00.safetensors") for run in ("one", "other")]
    assert features[0].read_bytes() != features[1].read_bytes()


def test_slca_sees_an_image_once_an_epoch_and_once_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[tuple[str, int]] = Counter()

    def counting(name: str) -> Any:
        view = getattr(DeviceImages, name)

        def counted(self: DeviceImages, numbers: Tensor, *rest: Any) -> Tensor:
            if len(self) == len(GLYPHS.arrays("train")):
                seen.update((name, int(number)) for number in numbers)
            found: Tensor = view(self, numbers, *rest)
            return found

        return counted

    for name in ("in_training", "at_test"):
        monkeypatch.setattr(DeviceImages, name, counting(name))
    trained("slca", GLYPHS, tmp_path, "epochs_first=2", "epochs=2")
    assert len(seen) == 2 * 9 * 6  # nine classes, in training and at the end
    assert {(name, count) for (name, _), count in seen.items()} == {
        ("in_training", 2),
        ("at_test", 1),
    }
