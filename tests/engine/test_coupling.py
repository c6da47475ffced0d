"""What an evaluation does to training when it was asked for by name, against ARC itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from arc_cl import ARC, ARCSettings
from arc_cl.contracts import LabelledImages, Learner
from arc_cl.engine.coupling import AsReleased, FreezeAfterFirst, Uncoupled, between
from arc_cl.engine.images import Appearance, Normalisation
from arc_cl.engine.resolve import Resolved, complete, resolve
from arc_cl.engine.runtime import Runtime
from arc_cl.engine.sequence import Run
from arc_cl.errors import CompatibilityError, ConfigurationError
from arc_cl.experiments.fast import fast
from arc_cl.experiments.recipes import recipe
from arc_cl.experiments.spec import Coupling, ReleasedARC
from arc_cl.learners import finetune
from arc_cl.protocol.stream import Scenario

RELEASED = ReleasedARC(lr=1e-2, beta=0.1, gamma=1.5, temperature=1.1, batch_size=4)
SCENARIO = Scenario(order=(4, 0, 3, 1, 2, 5), tasks=(3, 2))
APPEARANCE = Appearance("as_stored", 2, Normalisation((0.5,) * 3, (0.25,) * 3))


class Backbone(nn.Module):
    num_features = 12

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(12, 12, generator=generator) / 3)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return torch.tanh(images_BCHW.flatten(1) @ self.weight)


def toy(batch_size: int = 7) -> Learner:
    """Finetune in its first task, with a head that is sure of something."""
    settings = finetune.Settings(lr=0.1, epochs_first=1, epochs=1, batch_size=batch_size)
    learner = finetune.create(Backbone(), settings)
    begin(learner, SCENARIO, 0)
    with torch.no_grad():
        learner.adaptable().head().weight.mul_(20)
    return learner


def begin(learner: Learner, scenario: Scenario, stage: int) -> None:
    learner.begin_task(scenario.info(stage), torch.Generator().manual_seed(stage))


def images_to_test(count: int = 60) -> LabelledImages:
    draw = np.random.default_rng(1)
    return LabelledImages(
        images_NHWC=draw.integers(0, 256, (count, 2, 2, 3), dtype=np.uint8),
        labels_N=draw.integers(0, 6, count),
    )


def run_in(folder: Path, scenario: Scenario, appearance: Appearance = APPEARANCE) -> Run:
    return Run(folder, scenario, Runtime.open(0, "cpu"), appearance)


def state_of(learner: Learner) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in learner.modules().state_dict().items()}


def changes(learner: Learner, before: dict[str, Tensor]) -> set[str]:
    now = learner.modules().state_dict()
    return {name for name, value in before.items() if not torch.equal(now[name], value)}


def learning(learner: Learner) -> set[str]:
    named = learner.modules().named_parameters()
    return {name for name, parameter in named if parameter.requires_grad}


# --- which -----------------------------------------------------------------------------------


@cache
def miniature(learner: str, coupling: Coupling, *, arc: bool = True) -> Resolved:
    made = resolve(complete(fast(recipe(learner, "glyphs"))))
    setup = replace(made.recipe.setup, coupling=coupling)
    return replace(made, recipe=replace(made.recipe, setup=setup, arc=RELEASED if arc else None))


def between_in(folder: Path, made: Resolved) -> object:
    run = run_in(folder, made.scenario, made.appearance)
    return between(made.recipe, made.settings, run, made.learner(), images_to_test())


@pytest.mark.parametrize(
    ("coupling", "kind"),
    [("none", Uncoupled), ("freeze", FreezeAfterFirst), ("released", AsReleased)],
)
def test_a_recipe_names_its_coupling(coupling: Coupling, kind: type, tmp_path: Path) -> None:
    assert type(between_in(tmp_path, miniature("finetune", coupling))) is kind


@pytest.mark.parametrize("learner", ["l2p", "dualprompt", "coda_prompt"])
def test_prompts_are_not_adapted_on_the_test_stream(learner: str, tmp_path: Path) -> None:
    with pytest.raises(CompatibilityError, match=r"prompts .* choose --coupling none"):
        between_in(tmp_path, miniature(learner, "released"))
    assert between_in(tmp_path, miniature(learner, "none"))
    assert between_in(tmp_path, miniature(learner, "freeze"))


@pytest.mark.parametrize("learner", ["finetune", "l2p"])
def test_a_released_coupling_needs_released_values(learner: str, tmp_path: Path) -> None:
    made = miniature(learner, "released", arc=False)
    with pytest.raises(ConfigurationError, match=rf"{made.recipe.name} has none; .*\[arc\]"):
        between_in(tmp_path, made)
    for coupling in ("none", "freeze"):
        assert between_in(tmp_path, miniature(learner, coupling, arc=False))


# --- what ------------------------------------------------------------------------------------


def test_uncoupled_does_nothing() -> None:
    learner = toy()
    before, learns = state_of(learner), learning(learner)
    Uncoupled().freeze(0, learner)
    Uncoupled().adapt(0, learner)
    assert not changes(learner, before)
    assert learning(learner) == learns


@pytest.mark.parametrize("name", ["finetune", "icarl", "l2p", "dualprompt", "coda_prompt", "slca"])
def test_freezing_leaves_head_and_prompts(name: str) -> None:
    made = miniature(name, "freeze")
    learner = made.learner()
    begin(learner, made.scenario, 0)
    before, expected = state_of(learner), learning(learner)
    FreezeAfterFirst().freeze(0, learner)
    FreezeAfterFirst().adapt(0, learner)
    assert not changes(learner, before)
    kept = {one for one in expected if one.startswith(("head.", "prompts."))}
    assert learning(learner) == kept
    assert {"head.weight", "head.bias"} <= kept
    begin(learner, made.scenario, 1)
    assert learning(learner) & expected >= kept
    assert not any(one.startswith("backbone.") for one in learning(learner))


@pytest.mark.parametrize("name", ["der", "memo"])
def test_freezing_lets_a_new_branch_learn(name: str) -> None:
    """What grows with a task is trained, as after the released evaluation."""
    made = miniature(name, "freeze")
    learner = made.learner()
    begin(learner, made.scenario, 0)
    FreezeAfterFirst().freeze(0, learner)
    assert learning(learner) == {"head.weight", "head.bias"}
    begin(learner, made.scenario, 1)
    learns = learning(learner)
    assert {one.split(".")[2] for one in learns if one.startswith("backbone.")} == {"1"}
    FreezeAfterFirst().freeze(1, learner)
    assert learning(learner) == learns


def test_as_released_freezes_after_every_task(tmp_path: Path) -> None:
    made = miniature("der", "released")
    run = run_in(tmp_path, made.scenario, made.appearance)
    what = AsReleased(run, images_to_test(), RELEASED, 8)
    learner = made.learner()
    for stage in range(2):
        begin(learner, made.scenario, stage)
        what.freeze(stage, learner)
        assert learning(learner) == {"head.weight", "head.bias"}


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize(
    "arc",
    [
        RELEASED,
        replace(RELEASED, label_smoothing=0.1, entropy=False),
        replace(RELEASED, optimizer="adam", beta=0.5),
    ],
)
def test_the_head_becomes_what_arc_makes_of_it_class_by_class(
    arc: ReleasedARC, batch_size: int | None, tmp_path: Path
) -> None:
    arc = replace(arc, batch_size=batch_size)
    run, test, learner = run_in(tmp_path, SCENARIO), images_to_test(), toy()
    what = AsReleased(run, test, arc, training_batch=7)
    for stage in range(2):
        if stage:
            begin(learner, SCENARIO, stage)
        before = state_of(learner)
        expected = adapted(learner, stage, test, arc, batch_size or 7)
        what.adapt(stage, learner)
        assert changes(learner, before) == {"head.weight", "head.bias"}
        head = learner.adaptable().head()
        torch.testing.assert_close(head.weight.detach(), expected.weight)
        torch.testing.assert_close(head.bias.detach(), expected.bias)
        assert expected.steps > 3
        assert head.weight.requires_grad


def adapted(
    learner: Learner, stage: int, test: LabelledImages, arc: ReleasedARC, batch_size: int
) -> ARC:
    """By the plug-in itself: the classes seen in their order, the images of each as stored."""
    seen = SCENARIO.order[: SCENARIO.info(stage).seen_classes]
    rows = np.concatenate([np.flatnonzero(test.labels_N == label) for label in seen])
    pixels = torch.from_numpy(test.images_NHWC[rows]).permute(0, 3, 1, 2)
    with torch.no_grad():
        features = learner.adaptable().features((pixels / 255 - 0.5) / 0.25)
    values = {name: value for name, value in asdict(arc).items() if name in FIELDS}
    plug_in = ARC(
        learner.adaptable().head(),
        tasks=SCENARIO.tasks[: stage + 1],
        settings=ARCSettings.released(**values),
    )
    for batch in features.split(batch_size):
        plug_in(batch)
    return plug_in


FIELDS = (
    *("lr", "beta", "gamma", "temperature", "label_smoothing", "cross_entropy", "entropy"),
    *("retention", "correction", "optimizer"),
)


def test_without_retention_the_head_stays(tmp_path: Path) -> None:
    learner = toy()
    before = state_of(learner)
    arc = replace(RELEASED, retention=False)
    AsReleased(run_in(tmp_path, SCENARIO), images_to_test(), arc, 7).adapt(0, learner)
    assert not changes(learner, before)


# --- as recorded -----------------------------------------------------------------------------


class InDouble(nn.Module):
    """The recorded backbone, in the precision that it was recorded in."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            self.vit = VisionTransformer(
                img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=0
            ).double()
        self.num_features = 24
        start = "final_backbone/"
        names = [name for name in data.files if name.startswith(start)]
        state = {name.removeprefix(start): torch.from_numpy(data[name]) for name in names}
        self.vit.load_state_dict(state)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        features_BD: Tensor = self.vit(images_BCHW.double())
        return features_BD


def recorded(golden: Path, kind: str) -> Iterator[tuple[Any, Any]]:
    """Runs of the release, and their images."""
    paths = sorted(golden.glob(f"e2e_{kind}_arc_seed*.npz"))
    assert paths
    for path in paths:
        yield np.load(path), np.load(golden / f"e2e_data_{path.stem.rpartition('_')[2]}.npz")


@pytest.mark.parametrize("kind", ["finetune", "icarl"])
def test_the_head_goes_on_as_in_recorded_runs_of_the_release(
    golden: Path, kind: str, tmp_path: Path
) -> None:
    """There the backbone never changes after the first task, so the final one is that of all.

    Trained heads are taken as recorded; what ARC leaves of them, and the rows that the next task
    starts from, are ours.
    """
    for data, images in recorded(golden, kind):
        args = json.loads(str(data["args"]))
        scenario = Scenario(order=tuple(range(15)), tasks=(5, 5, 5))
        look = Appearance("as_stored", 32, Normalisation((0.0,) * 3, (1.0,) * 3))
        test = LabelledImages(
            images_NHWC=images["test_images"], labels_N=images["test_targets"].astype(np.int64)
        )
        what = AsReleased(run_in(tmp_path, scenario, look), test, arc_of(args), args["batch_size"])
        learner = finetune.create(
            InDouble(data), finetune.Settings(lr=0.1, epochs_first=1, epochs=1, batch_size=10)
        )
        for stage in range(3):
            begin(learner, scenario, stage)
            head = learner.adaptable().head()
            old = 5 * stage
            close(head.weight[:old], data[f"task{stage}_head_start_W"][:old])
            with torch.no_grad():
                head.weight.copy_(torch.from_numpy(data[f"task{stage}_head_trained_W"]))
                head.bias.copy_(torch.from_numpy(data[f"task{stage}_head_trained_b"]))
            what.freeze(stage, learner)
            what.adapt(stage, learner)
            close(head.weight, data[f"task{stage}_head_after_eval_W"])
            close(head.bias, data[f"task{stage}_head_after_eval_b"])


def arc_of(args: dict[str, Any]) -> ReleasedARC:
    return ReleasedARC(
        lr=args["adjust_lr"],
        beta=args["confidence_threshold"],
        gamma=args["ood_threshold"],
        temperature=args["iterative_temperature"],
        batch_size=args.get("arc_batch_size") if args["model_name"] != "icarl" else None,
    )


def close(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(
        found.detach(), torch.as_tensor(expected).double(), rtol=0, atol=1e-6
    )
