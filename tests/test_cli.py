"""The command line: help with an example, one clean line for what goes wrong, and the demo."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from arc_cl import __version__, catalogue
from arc_cl.cli import main
from arc_cl.errors import ConfigurationError
from arc_cl.experiments.demo import DEMO

COMMANDS = ("demo", "train", "evaluate", "bench", "doctor")


def run(*tokens: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(tokens)
    code = stopped.value.code
    return code if isinstance(code, int) else 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, "--help") == 0
    assert f"Example: arc-cl {command}" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [("dmeo",), ("demo", "--seed", "x"), ("demo", "--sed", "1")])
def test_what_cannot_be_parsed_is_refused(
    tokens: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*tokens) != 0
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("missing", ["cyclopts", "rich", "tensorboardX", "lightning_fabric"])
def test_a_missing_extra_is_one_line(missing: str) -> None:
    script = (
        "import sys; sys.modules[sys.argv[1]] = None; from arc_cl import cli; cli.main(['demo'])"
    )
    command = [sys.executable, "-c", script, missing]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2
    assert found.stderr.strip().endswith('pip install "arc-cl[bench]"')
    assert missing in found.stderr
    assert found.stderr.count("\n") == 1


def test_an_error_of_ours_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ConfigurationError("beta=7: give 0 to 1")

    fail.__name__ = "doctor"
    monkeypatch.setattr("arc_cl.cli.doctor", fail)
    assert run("doctor") == 2
    assert capsys.readouterr().err == "arc-cl: beta=7: give 0 to 1\n"


def test_a_fault_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ModuleNotFoundError("No module named 'arc_cl.nothing'", name="arc_cl.nothing")

    fail.__name__ = "doctor"
    monkeypatch.setattr("arc_cl.cli.doctor", fail)
    with pytest.raises(ModuleNotFoundError):
        main(["doctor"])


def test_doctor_lists_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor") == 0
    shown = capsys.readouterr().out
    for word in ("torch", "cyclopts", "threads", "cpu"):
        assert word in shown


def test_a_place_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run("demo", "--out", str(tmp_path / "file")) == 2
    assert "choose another with --out" in capsys.readouterr().err


def test_the_demo_prints_its_table_and_its_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real demo, cut short: few images, one epoch, two tasks."""
    recipe = DEMO.recipe
    setup = replace(recipe.setup, only_tasks=2, images_per_class=4)
    settings = {**recipe.settings, "epochs": 1, "epochs_first": 1}
    short = replace(DEMO, recipe=replace(recipe, setup=setup, settings=settings))
    monkeypatch.setattr("arc_cl.experiments.demo.DEMO", short)
    assert run("demo", "--out", str(tmp_path / "new"), "--seed", "1") == 0
    shown = capsys.readouterr().out
    for row in short.rows:
        assert row.title in shown
    page = (tmp_path / "new" / "index.html").read_text(encoding="utf-8")
    assert f"arc-cl demo --out {tmp_path / 'new'} --seed 1" in page
    assert "index.html" in shown


def test_training_lists_the_learners_that_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--help") == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert ", ".join(catalogue.names("learners")) in shown
    assert "Example: arc-cl train --learner l2p" in shown


def test_training_shows_its_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("train", "--recipe", "slca-cifar100-inc10", "--set", "lr=0.5", "epochs=3", "--show")
        == 0
    )
    shown = capsys.readouterr().out
    assert "lr = 0.5" in shown
    assert "epochs = 3" in shown
    assert 'learner = "slca"' in shown


def test_a_shown_recipe_is_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--learner", "der", "--data", "glyphs", "--show") == 0
    shown = capsys.readouterr().out
    (tmp_path / "mine.toml").write_text(shown, encoding="utf-8")
    assert run("train", "--recipe", str(tmp_path / "mine.toml"), "--show") == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--learner", "l2p"), "give both --learner and --data"),
        ((), "in one way"),
        (("--learner", "l2", "--data", "glyphs"), "did you mean 'l2p'"),
        (("--learner", "l2p", "--data", "glyps"), "did you mean 'glyphs'"),
        (("--recipe", "l2p-glyph"), "did you mean 'l2p-glyphs'"),
        (("--recipe", "nowhere.toml"), "cannot read nowhere.toml"),
        (("--recipe", "l2p-glyphs", "--variant", "released"), "has its own form"),
        (("--learner", "l2p", "--data", "glyphs", "--set", "top=3"), "did you mean 'top_k'"),
        (("--learner", "l2p", "--data", "glyphs", "--set", "pool=x"), "pool is 'x'"),
        (("--learner", "l2p", "--data", "glyphs", "--set", "pool"), "key=value"),
        (("--learner", "l2p", "--data", "glyphs", "--devices", "cuda:99"), "choose auto, cpu"),
        (("--learner", "l2p", "--data", "cifar100"), "no data source is called 'cifar100'"),
        (("--recipe", "l2p-glyphs", "--set", "only_tasks=-1"), "only_tasks is -1; give 0 or more"),
        (("--recipe", "l2p-glyphs", "--set", "class_order=-1"), "class_order is -1"),
    ],
)
def test_what_is_wrong_with_a_training_is_said_at_once(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_miniature_keeps_what_was_set(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--learner", "l2p", "--data", "glyphs", "--fast", "--set", "epochs=9")
    assert run("train", *words, "--show") == 0
    shown = capsys.readouterr().out
    assert "epochs = 9 " in shown
    assert "epochs_first = 1 " in shown
    assert 'name = "l2p-glyphs-fast-changed"' in shown


def test_a_published_value_keeps_its_origin_when_it_is_typed_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--learner", "l2p", "--data", "cifar100", "--show", "--set")
    for value, origin in (("0.001875", "released"), ("0.002", "ours")):
        assert run("train", *words, f"lr={value}") == 0
        shown = capsys.readouterr().out
        line = next(line for line in shown.splitlines() if line.startswith("lr = "))
        assert line.endswith(f"# {origin}")


def test_images_that_a_backbone_cannot_take_are_refused_before_the_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--learner", "finetune", "--data", "glyphs", "--out", str(tmp_path / "run"))
    odd = ("--set", "backbone=vit_tiny_patch16_224", "weights=random")
    assert run("train", *words, *odd) == 2
    assert "32 x 32" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_is_trained_then_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert run("train", "--learner", "slca", "--data", "glyphs", "--fast", "--out", out) == 0
    assert "slca · A_B" in capsys.readouterr().out
    assert run("evaluate", out, "--method", "none", "arc", "--set", "beta=0.5", "--json") == 0
    plain, arc = json.loads(capsys.readouterr().out)
    assert (plain["method"], arc["method"]) == ("none", "arc")
    assert arc["settings"]["beta"] == 0.5
    assert run("evaluate", out, "--method", "nune") == 2
    assert "did you mean 'none'" in capsys.readouterr().err
