"""Training as a run: it resumes bit by bit, is not changed by evaluating, and couples by name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from safetensors.numpy import load_file

from arc_cl import catalogue
from arc_cl.contracts import LabelledImages, Split
from arc_cl.data.sources.glyphs import Glyphs
from arc_cl.engine.checkpoints import finished_stages
from arc_cl.engine.progress import Silent
from arc_cl.engine.resolve import Resolved, complete, resolve
from arc_cl.engine.runs import open_run
from arc_cl.engine.runtime import Runtime
from arc_cl.engine.training import Order, plain, train
from arc_cl.errors import RecordError
from arc_cl.experiments.fast import fast
from arc_cl.experiments.hyperparameters import RELEASED_ARC
from arc_cl.experiments.recipes import recipe
from arc_cl.experiments.spec import Coupling

LEARNERS = catalogue.names("learners")
EVERY = pytest.mark.parametrize("learner", LEARNERS)


class FewGlyphs(Glyphs):
    """What a miniature uses of the glyphs, drawn once."""

    @cache  # noqa: B019
    def arrays(self, split: Split) -> LabelledImages:
        return super().arrays(split)


GLYPHS = FewGlyphs(train=6, test=4)


@cache
def miniature(learner: str) -> Resolved:
    return replace(resolve(complete(fast(recipe(learner, "glyphs")))), source=GLYPHS)


def order_in(folder: Path, seed: int = 0, keep_seconds: float = 1e9) -> Order:
    return Order(folder, Runtime.open(seed, "cpu"), "x", keep_seconds)


def weights(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted((folder / "stages").rglob("*.safetensors"))
    }


def events(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


class StopAfter(Silent):
    """Raises as an interrupt would, after so many batches."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def advance(self, share: float, images: int) -> None:
        self.left -= images > 0
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every learner's miniature, trained without interruption, each in a folder of its name."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("whole")
    for learner in LEARNERS:
        train(order_in(root / learner), miniature(learner), Silent())
    return root


@EVERY
def test_each_learner_runs_and_leaves_all_that_a_run_folder_holds(
    learner: str, whole: Path
) -> None:
    folder = whole / learner
    assert finished_stages(folder) == 3
    assert not (folder / "unfinished").exists()
    for stage in range(3):
        features = load_file(folder / "features" / f"{stage:02d}.safetensors")
        assert len(features["labels"]) == 12 * (stage + 1)
    names = [each["event"] for each in events(folder)]
    assert names.count("epoch") == names.count("accuracy") == names.count("stage ends") == 3
    assert list(folder.glob("events.out.tfevents.*"))
    assert json.loads((folder / "provenance.json").read_text())["run"]["seed"] == 0


@EVERY
@pytest.mark.parametrize("batches", [1, 3, 5, 8])
def test_an_interrupted_run_ends_with_the_same_bits(
    learner: str, batches: int, whole: Path, tmp_path: Path
) -> None:
    order = order_in(tmp_path, keep_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        train(order, miniature(learner), StopAfter(batches))
    train(order, miniature(learner), Silent())
    assert weights(tmp_path) == weights(whole / learner)


def test_kill_9_at_any_moment_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """Real processes, killed without warning at three moments of the run."""
    words = [
        "train",
        "--learner",
        "icarl",
        "--data",
        "glyphs",
        "--fast",
        "--devices",
        "cpu",
        "--keep-minutes",
        "0",
    ]
    words += ["--set", "epochs=3", "epochs_first=3"]
    runs = {name: [*words, "--out", str(tmp_path / name)] for name in ("killed", "whole")}
    for awaited in ("unfinished/00-*", "unfinished/01-*", "features/01.*"):
        process = launch(runs["killed"])
        wait_for(tmp_path / "killed", awaited, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    for words in runs.values():
        assert launch(words).wait() == 0
    assert any(each["event"] == "resumed" for each in events(tmp_path / "killed"))
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


def launch(words: list[str]) -> subprocess.Popen[bytes]:
    script = "from arc_cl.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[bytes]) -> None:
    end = monotonic() + 120
    while not list(folder.glob(pattern)):
        assert process.poll() is None, "it ended before it could be killed"
        assert monotonic() < end
        sleep(0.002)


def test_evaluating_changes_nothing_in_a_run_nor_in_training(whole: Path, tmp_path: Path) -> None:
    """Two stages, an evaluation, the third: as if nobody had looked."""
    made = miniature("icarl")
    order = order_in(tmp_path, keep_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        train(order, made, StopAfter(8))
    before = {path: path.read_bytes() for path in (tmp_path / "stages").rglob("*.*")}
    state = torch.get_rng_state()
    first_two = replace(made, scenario=replace(made.scenario, tasks=made.scenario.tasks[:2]))
    run_order = order_in(whole / "icarl")
    found = plain(run_order, train(run_order, made, Silent()), Silent())
    assert found.learner == "icarl"
    assert first_two.scenario.tasks == (3, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert {path: path.read_bytes() for path in before} == before
    train(order, made, Silent())
    assert weights(tmp_path) == weights(whole / "icarl")


def test_plain_answers_are_those_counted_while_training(whole: Path) -> None:
    for learner in LEARNERS:
        order = order_in(whole / learner)
        record = plain(order, train(order, miniature(learner), Silent()), Silent())
        logged = [e["right"] for e in events(whole / learner) if e["event"] == "accuracy"]
        assert [sum(row) for row in record.correct] == logged[:3]


def test_a_run_is_opened_from_its_folder(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows its seed and recipe; other data, a stage too few, or no run at all are refused."""
    monkeypatch.setattr("arc_cl.data.sources.glyphs.create", lambda: GLYPHS)
    opened = open_run(whole / "slca", "cpu")
    assert opened.run.scenario == miniature("slca").scenario
    assert opened.run.runtime.seed == 0
    assert opened.resolved.settings == miniature("slca").settings
    record = plain(order_in(whole / "slca"), opened, Silent())
    assert record.learner == "slca"
    shutil.copytree(whole / "l2p", tmp_path / "short")
    shutil.rmtree(tmp_path / "short" / "stages" / "02")
    with pytest.raises(RecordError, match="2 of its 3 stages"):
        open_run(tmp_path / "short", "cpu")
    with pytest.raises(RecordError, match="arc-cl train"):
        open_run(tmp_path / "nothing", "cpu")
    monkeypatch.setattr("arc_cl.data.sources.glyphs.create", lambda: FewGlyphs(train=6, test=5))
    with pytest.raises(RecordError, match=r"other weights or data .*test images"):
        open_run(whole / "slca", "cpu")


def test_a_frozen_tensor_is_stored_once(whole: Path) -> None:
    sizes = [
        (whole / "l2p" / "stages" / f"{stage:02d}" / "model.safetensors").stat().st_size
        for stage in range(3)
    ]
    assert sizes[1] < sizes[0] / 10
    assert sizes[2] < sizes[0] / 10


def test_others_may_read_what_a_run_wrote(whole: Path) -> None:
    """As far as the umask lets them: safetensors and temporary folders would not."""
    plain_file = whole / "l2p" / "recipe.toml"
    stage = whole / "l2p" / "stages" / "00"
    for path in (stage / "model.safetensors", stage / "meta.json"):
        assert path.stat().st_mode == plain_file.stat().st_mode
    assert stage.stat().st_mode == (whole / "l2p" / "stages").stat().st_mode


def backbone_changes(folder: Path) -> list[bool]:
    """Whether any tensor of the backbone is another one, after each stage but the first."""
    found = []
    for stage in (1, 2):
        meta = json.loads((folder / "stages" / f"{stage:02d}" / "meta.json").read_text())
        held = [at for name, (at, _) in meta["tensors"].items() if name.startswith("backbone.")]
        found.append(max(held) == stage)
    return found


@pytest.mark.parametrize(
    ("coupling", "changes"),
    [("none", [True, True]), ("freeze", [False, False]), ("released", [False, False])],
)
@pytest.mark.parametrize("learner", ["finetune", "icarl"])
def test_a_coupling_freezes_the_backbone(
    learner: str, coupling: Coupling, changes: list[bool], tmp_path: Path
) -> None:
    """§A 1 of the released code's slips: on by name only."""
    made = coupled(learner, coupling)
    train(order_in(tmp_path), made, Silent())
    assert backbone_changes(tmp_path) == changes
    record = plain(order_in(tmp_path), train(order_in(tmp_path), made, Silent()), Silent())
    assert record.training["coupling"] == coupling


def test_an_interrupted_coupled_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    made = coupled("icarl", "released")
    train(order_in(tmp_path / "whole"), made, Silent())
    order = order_in(tmp_path / "stopped", keep_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        train(order, made, StopAfter(8))
    train(order, made, Silent())
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


def test_a_released_coupling_moves_the_head_that_the_next_task_starts_from(
    tmp_path: Path,
) -> None:
    """With the backbone frozen in both, only what ARC left in the head tells them apart."""
    for coupling in ("freeze", "released"):
        train(order_in(tmp_path / coupling), coupled("finetune", coupling), Silent())
    one, other = weights(tmp_path / "freeze"), weights(tmp_path / "released")
    assert one["stages/00/model.safetensors"] == other["stages/00/model.safetensors"]
    assert one["stages/01/model.safetensors"] != other["stages/01/model.safetensors"]


def coupled(learner: str, coupling: Coupling) -> Resolved:
    made = miniature(learner)
    arc = replace(RELEASED_ARC["finetune", "cifar100"], lr=1e-2, beta=0.1)
    setup = replace(made.recipe.setup, coupling=coupling)
    return replace(made, recipe=replace(made.recipe, setup=setup, arc=arc))


def test_a_released_coupling_without_retention_freezes_nothing(tmp_path: Path) -> None:
    made = coupled("finetune", "released")
    assert made.recipe.arc is not None
    arc = replace(made.recipe.arc, retention=False)
    train(order_in(tmp_path), replace(made, recipe=replace(made.recipe, arc=arc)), Silent())
    assert backbone_changes(tmp_path) == [True, True]


def test_seeds_differ_and_chance_is_named(whole: Path, tmp_path: Path) -> None:
    train(order_in(tmp_path, seed=1), miniature("finetune"), Silent())
    assert weights(tmp_path) != weights(whole / "finetune")
    assert all(isinstance(e["loss"], float) for e in events(tmp_path) if e["event"] == "epoch")
