"""A command line means one recipe, or an error that says how to name one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from arc_cl.errors import ConfigurationError
from arc_cl.experiments.choice import Choice, choose, with_origins
from arc_cl.experiments.recipes import by_name, recipe
from arc_cl.experiments.spec import Variant
from arc_cl.experiments.toml import dump

PILOT = {
    "prefix": "reproduce",
    "model_name": "finetune",
    "dataset": "cifar224",
    "backbone_type": "vit_base_patch16_224",
    "shuffle": True,
    "seed": [1997, 1998],
    "init_cls": 20,
    "increment": 10,
    "batch_size": 48,
    "init_epoch": 7,
    "init_lr": 1e-3,
    "init_milestones": [60],
    "init_lr_decay": 0.1,
    "init_weight_decay": 5e-4,
    "epochs": 5,
    "lrate": 1e-3,
    "milestones": [40],
    "lrate_decay": 0.1,
    "weight_decay": 2e-4,
}


def of_learner(learner: str, data: str, variant: Variant | None = None) -> Choice:
    return choose(learner, data, None, None, variant)


def pilot_file(folder: Path, **changes: object) -> Path:
    path = folder / "finetune.json"
    path.write_text(json.dumps({**PILOT, **changes}), encoding="utf-8")
    return path


def test_a_learner_and_its_data() -> None:
    assert of_learner("l2p", "cifar100") == Choice(recipe("l2p", "cifar100"), seed=0, ignored=())
    assert of_learner("coda-prompt", "imagenet-r").recipe == recipe("coda_prompt", "imagenet_r")
    for variant in ("sane", "released"):
        assert of_learner("l2p", "glyphs", variant).recipe == recipe("l2p", "glyphs", variant)


def test_a_recipe_by_its_name() -> None:
    found = choose(None, None, "slca-cifar100-inc10", None, None)
    assert found == Choice(by_name("slca-cifar100-inc10"))
    released = choose(None, None, "l2p-cifar100-released", None, None)
    assert released.recipe.setup.variant == "released"


def test_a_recipe_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    own = recipe("icarl", "cifar100")
    path.write_text(dump(own), encoding="utf-8")
    assert choose(None, None, str(path), None, None).recipe == own


def test_a_configuration_of_pilot_brings_its_seed_and_what_has_no_effect(tmp_path: Path) -> None:
    found = choose(None, None, None, pilot_file(tmp_path), None)
    setup = found.recipe.setup
    assert (setup.learner, setup.data, setup.variant) == ("finetune", "cifar100", "released")
    assert (setup.first_classes, setup.class_order, found.seed) == (20, 1997, 1997)
    assert found.recipe.settings["epochs_first"] == 7
    (line,) = found.ignored
    assert line.startswith("prefix: ")


@pytest.mark.parametrize(
    ("learner", "data", "name", "pilot"),
    [
        (None, None, None, False),
        ("l2p", "cifar100", "l2p-cifar100", False),
        ("l2p", None, "l2p-cifar100", False),
        (None, "cifar100", None, True),
        (None, None, "l2p-cifar100", True),
        ("l2p", "cifar100", "l2p-cifar100", True),
    ],
)
def test_one_way_is_asked_for(
    learner: str | None, data: str | None, name: str | None, pilot: bool, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="in one way: --learner and --data, or --recipe"):
        choose(learner, data, name, pilot_file(tmp_path) if pilot else None, None)


@pytest.mark.parametrize(("learner", "data"), [("l2p", None), (None, "glyphs")])
def test_learner_and_data_go_together(learner: str | None, data: str | None) -> None:
    with pytest.raises(ConfigurationError, match="give both --learner and --data, say"):
        choose(learner, data, None, None, None)


@pytest.mark.parametrize("variant", ["sane", "released"])
def test_a_variant_goes_with_a_learner_only(variant: Variant, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--variant goes with .*: a recipe has its own"):
        choose(None, None, "l2p-cifar100", None, variant)
    with pytest.raises(ConfigurationError, match=r"--variant goes with .*: --pilot reproduces"):
        choose(None, None, None, pilot_file(tmp_path), variant)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("l2p-cifar10-inc10", "did you mean 'l2p-cifar100-inc10'"),
        ("nowhere.toml", r"cannot read nowhere\.toml: .*; give the path of a file"),
        (".toml", "no '.toml'"),
    ],
)
def test_an_unknown_recipe(name: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        choose(None, None, name, None, None)


@pytest.mark.parametrize(
    ("learner", "data", "said"),
    [("l2p", "cifar", "cifar100"), ("finetune-buffer", "cifar100", "no released form")],
)
def test_unknown_data_and_a_form_that_nobody_released(learner: str, data: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        of_learner(learner, data, "released")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"setup = ", b"[settings]\nlr = 1"])
def test_an_unreadable_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"mine\.toml"):
        choose(None, None, str(path), None, None)
    with pytest.raises(ConfigurationError, match=r"mine\.toml"):
        choose(None, None, None, path, None)


def test_a_folder_or_no_file_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    for path in (folder, tmp_path / "none.toml"):
        with pytest.raises(ConfigurationError, match=rf"cannot read .*{path.name}"):
            choose(None, None, str(path), None, None)
        with pytest.raises(ConfigurationError, match=rf"cannot read .*{path.name}"):
            choose(None, None, None, path, None)


def test_a_wrong_configuration_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"finetune\.json.*init_cl"):
        choose(None, None, None, pilot_file(tmp_path, init_cl=3), None)


def test_a_published_value_keeps_its_origin_where_it_was_typed_in() -> None:
    shipped = recipe("l2p", "cifar100")
    bare = replace(shipped, origins={})
    assert with_origins(bare) == shipped
    typed = replace(bare, settings={**bare.settings, "lr": 123.0})
    found = with_origins(typed).origins
    assert found["lr"] == "ours"
    assert {**found, "lr": shipped.origins["lr"]} == shipped.origins
