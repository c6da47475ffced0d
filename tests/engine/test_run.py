"""A sequence of tasks from training to records, on a toy: coloured squares, three tasks."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

from arc_cl import ARCSettings, Decision
from arc_cl.adapt.none import Plain
from arc_cl.backbones.timm_models import Loaded
from arc_cl.contracts import LabelledImages, Split
from arc_cl.engine.compare import Compared, compare
from arc_cl.engine.evaluate import Result, Stream, evaluate
from arc_cl.engine.features import load_features
from arc_cl.engine.images import Appearance, DeviceImages, Normalisation
from arc_cl.engine.progress import Silent
from arc_cl.engine.resolve import Resolved
from arc_cl.engine.runs import Trained
from arc_cl.engine.runtime import Runtime
from arc_cl.engine.sequence import Run, stages
from arc_cl.engine.training import Order
from arc_cl.errors import ARCError, ConfigurationError, RecordError
from arc_cl.experiments.spec import Comparison, Recipe, Row, Setup
from arc_cl.learners import finetune
from arc_cl.protocol.record import Evaluation
from arc_cl.protocol.stream import Scenario, class_order

CLASSES = 7
NORMALISATION = Normalisation((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
ARC = ARCSettings.paper(gamma=1.5, step="relative", lr=1e-2)
APPEARANCE = Appearance("as_stored", 4, NORMALISATION)
COMPARISON = Comparison(
    title="Toy",
    recipe=Recipe(
        name="toy",
        setup=Setup(
            learner="finetune",
            data="squares",
            backbone="toy",
            first_classes=3,
            classes_per_task=2,
            transform="as_stored",
        ),
        settings={"lr": 0.1, "epochs_first": 2, "epochs": 2, "batch_size": 16},
    ),
    rows=(
        Row(title="plain", method="none"),
        Row(title="+ ARC", method="arc", settings=ARC),
    ),
    batch_size=8,
    shuffled=True,
)
PLAIN = COMPARISON.rows[0]
TASKS = (3, 2, 2)


@dataclass(frozen=True)
class Squares:
    """Each class is a colour; images differ by noise."""

    seed: int = 0

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(f"colour {c}" for c in range(CLASSES))

    def prepare(self, root: Path | None) -> None: ...

    def arrays(self, split: Split) -> LabelledImages:
        draw = np.random.default_rng([self.seed, split == "test"])
        labels = np.repeat(np.arange(CLASSES), 20)
        colours = np.random.default_rng(7).integers(40, 216, (CLASSES, 3))
        noise = draw.normal(0, 40, (len(labels), 4, 4, 3))
        images = (colours[labels][:, None, None] + noise).clip(0, 255)
        return LabelledImages(images_NHWC=images.astype(np.uint8), labels_N=labels)


class Backbone(nn.Module):
    num_features = 16

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16, 48, generator=generator) / 7)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return torch.tanh(images_BCHW.flatten(1) @ self.weight.T)


def resolved(**settings: float) -> Resolved:
    """The toy; what it names is not in the catalogue, so it is put together by hand."""
    recipe = replace(COMPARISON.recipe, settings={**COMPARISON.recipe.settings, **settings})
    backbone = Loaded(
        module=Backbone(),
        name="toy",
        weights="random",
        sha256="",
        mean=NORMALISATION.mean,
        std=NORMALISATION.std,
        image_size=4,
    )
    scenario = Scenario(order=class_order(CLASSES), tasks=TASKS)
    made = finetune.Settings(**recipe.settings)  # type: ignore[arg-type]
    return Resolved(recipe, made, Squares(), scenario, backbone, APPEARANCE, finetune)


def run_in(folder: Path, seed: int = 0) -> Run:
    return Run(folder, resolved().scenario, Runtime.open(seed, "cpu"), APPEARANCE)


def compare_in(
    folder: Path, comparison: Comparison = COMPARISON, seed: int = 0, **settings: float
) -> Compared:
    order = Order(folder, Runtime.open(seed, "cpu"), "x")
    return compare(order, comparison, resolved(**settings), Silent())


def evaluate_in(folder: Path, row: Row = PLAIN, *, shuffled: bool = True) -> Result:
    trained = Trained(run_in(folder), resolved(), Squares().arrays("test"))
    return evaluate(trained, row, Stream(shuffled, 8), {}, Silent())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison. Tests only read it."""
    path = tmp_path_factory.mktemp("run")
    compare_in(path)
    return path


def records(folder: Path) -> dict[str, Evaluation]:
    found = [Evaluation.read(path) for path in sorted((folder / "evaluations").glob("*.json"))]
    return {each.method: each for each in found}


def test_it_learns_and_counts_every_test_image(folder: Path) -> None:
    plain = records(folder)["none"]
    assert plain.total == ((60,), (60, 40), (60, 40, 40))
    assert plain.correct[0][0] > 45
    assert plain.correct[2][2] > 15
    assert (plain.seed, plain.stream, plain.tasks) == (0, "shuffled", (3, 2, 2))


def test_changes_add_up_to_the_difference(folder: Path) -> None:
    both = records(folder)
    for stage in range(3):
        gain = sum(both["arc"].correct[stage]) - sum(both["none"].correct[stage])
        detections = both["arc"].detections[stage]
        assert gain == detections.repaired - detections.broken
        assert detections.corrected >= detections.corrected_past
    assert both["arc"].detections[0].corrected == 0
    assert both["arc"].detections[-1].corrected > 0


def test_answers_are_kept_image_by_image(folder: Path) -> None:
    (path,) = (folder / "evaluations").glob("arc-*.safetensors")
    columns = load_file(path)
    labels = Squares().arrays("test").labels_N
    order = np.array(class_order(CLASSES))
    np.testing.assert_array_equal(order[columns["02/label"]], labels[columns["02/index"]])
    right = columns["02/answer"] == columns["02/label"]
    assert right.sum() == sum(records(folder)["arc"].correct[2])


def test_the_same_seed_gives_the_same_run_and_leaves_the_global_rng(
    folder: Path, tmp_path: Path
) -> None:
    before = torch.get_rng_state()
    compare_in(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    first, again = records(folder)["arc"], records(tmp_path)["arc"]
    assert first == replace(again, seconds=first.seconds, provenance=first.provenance)
    for stage in ("00", "02"):
        name = f"stages/{stage}/model.safetensors"
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes()


def test_another_seed_gives_another_run(folder: Path, tmp_path: Path) -> None:
    compare_in(tmp_path, replace(COMPARISON, rows=(PLAIN,)), seed=1)
    name = "stages/00/model.safetensors"
    assert (folder / name).read_bytes() != (tmp_path / name).read_bytes()


def test_a_class_sorted_stream_comes_in_class_order(folder: Path) -> None:
    result = evaluate_in(folder, shuffled=False)
    assert (np.diff(result.answers[-1].label) >= 0).all()
    assert result.evaluation.stream == "sorted"
    assert result.evaluation.correct == records_of_plain(folder).correct


def records_of_plain(folder: Path) -> Evaluation:
    return next(
        each
        for path in (folder / "evaluations").glob("none-*.json")
        if (each := Evaluation.read(path)).stream == "shuffled"
    )


def test_stages_put_a_learner_where_training_left_it(folder: Path) -> None:
    run, fresh = run_in(folder), resolved().learner()
    data = Squares().arrays("test")
    images = DeviceImages(data.images_NHWC, APPEARANCE, torch.device("cpu"))
    for meta in stages(run, fresh):
        stored = load_features(folder, meta.stage, meta.sha256)
        computed = fresh.adaptable().features(images.at_test(torch.from_numpy(stored.indices_N)))
        torch.testing.assert_close(stored.features_ND, computed)
        assert fresh.adaptable().head().out_features == run.scenario.info(meta.stage).seen_classes


def test_images_are_normalised_on_the_device() -> None:
    pixels = np.full((2, 4, 5, 3), (0, 128, 255), dtype=np.uint8)
    images = DeviceImages(pixels, APPEARANCE, torch.device("cpu"))
    batch = images.at_test(torch.tensor([1]))
    assert batch.shape == (1, 3, 4, 5)
    torch.testing.assert_close(batch[0, :, 0, 0], torch.tensor([-2.0, 4 * (128 / 255 - 0.5), 2.0]))


def damaged(folder: Path, tmp_path: Path, file: str, content: bytes | None) -> Path:
    """A copy of the run in which one file is another, or is missing."""
    for path in folder.rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("stages/01/model.safetensors", None),
        ("stages/01/model.safetensors", b"cut"),
        ("stages/01/meta.json", b"{}"),
        ("stages/01/meta.json", None),
        ("features/01.safetensors", None),
        ("features/01.safetensors", b"cut"),
    ],
)
def test_damage_is_found_and_named(
    folder: Path, tmp_path: Path, file: str, content: bytes | None
) -> None:
    with pytest.raises(RecordError, match="01"):
        evaluate_in(damaged(folder, tmp_path, file, content))


def test_features_of_another_checkpoint_are_refused(folder: Path) -> None:
    with pytest.raises(RecordError, match="another checkpoint"):
        load_features(folder, 0, "0" * 64)


def test_checkpoints_appear_whole_and_are_not_made_again(folder: Path) -> None:
    assert sorted(path.name for path in (folder / "stages").iterdir()) == ["00", "01", "02"]
    meta = json.loads((folder / "stages" / "02" / "meta.json").read_text())
    assert (meta["schema"], meta["stage"], meta["seed"]) == (2, 2, 0)
    before = (folder / "stages" / "02" / "model.safetensors").stat().st_mtime_ns
    compare_in(folder)
    assert (folder / "stages" / "02" / "model.safetensors").stat().st_mtime_ns == before


def test_a_folder_keeps_its_run(folder: Path) -> None:
    with pytest.raises(RecordError, match=r"another run .*lr = 0\.1.*lr = 0\.2"):
        compare_in(folder, lr=0.2)
    with pytest.raises(RecordError, match="seed = 1"):
        compare_in(folder, seed=1)


def test_a_diverging_training_says_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="lower the learning rate"):
        compare_in(tmp_path, lr=1e30)


class ByImages(Plain):
    """The plain answers again, from images: it computes the features for itself."""

    consumes: Literal["features", "images"] = "images"

    def predict(self, batch: Tensor) -> Decision:
        assert batch.shape[1:] == (3, 4, 4)
        with torch.no_grad():
            return super().predict(self._adaptable.features(batch))


def test_a_method_that_wants_images_gets_them_in_the_order_of_the_stream(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_features = evaluate_in(folder).evaluation
    monkeypatch.setattr("arc_cl.adapt.none.create", lambda settings: ByImages())
    by_images = evaluate_in(folder).evaluation
    assert by_images.correct == by_features.correct
    assert by_images.detections == by_features.detections


def test_an_unknown_method_is_an_error_of_ours(folder: Path) -> None:
    row = Row(title="?", method="ark")
    with pytest.raises(ARCError, match="did you mean 'arc'"):
        evaluate_in(folder, row)
