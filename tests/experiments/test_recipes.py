"""The shipped recipes say what they claim to say, and every one fits its learner."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from arc_cl import ARCSettings, catalogue
from arc_cl.errors import ConfigurationError
from arc_cl.experiments.demo import DEMO
from arc_cl.experiments.fields import build, names
from arc_cl.experiments.hyperparameters import BACKBONES, FORMS, RELEASED_ARC, TRAINING
from arc_cl.experiments.recipes import DATA, LEARNERS, by_name, origins, recipe
from arc_cl.experiments.recipes import names as shipped
from arc_cl.experiments.spec import Setup, Value
from arc_cl.experiments.toml import read

DOCUMENT = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")


def differences(learner: str, data: str) -> dict[str, tuple[Value, Value]]:
    """What the sane form changes: name to its value there, and to the released one."""
    sane, released = recipe(learner, data), recipe(learner, data, "released")
    ours = asdict(sane.setup) | dict(sane.settings)
    theirs = asdict(released.setup) | dict(released.settings)
    assert ours.keys() == theirs.keys()
    return {
        name: (ours[name], theirs[name])
        for name in ours
        if ours[name] != theirs[name] and name not in ("variant", "normalise")
    }


def test_the_demo_asks_only_for_what_exists() -> None:
    assert DEMO.recipe.setup.learner in catalogue.names("learners")
    for row in DEMO.rows:
        settings = catalogue.load("adapt", row.method).Settings
        assert row.settings is None or isinstance(row.settings, settings)


def test_the_demo_takes_the_paper_with_released_thresholds() -> None:
    arc = DEMO.rows[-1].settings
    assert isinstance(arc, ARCSettings)
    released = RELEASED_ARC["finetune", "cifar100"]
    assert (arc.beta, arc.gamma, arc.temperature) == (0.8, 1.5, 1.1)
    assert (arc.beta, arc.gamma) == (released.beta, released.gamma)
    assert DEMO.batch_size == released.batch_size
    paper = ARCSettings.paper()
    assert replace(arc, gamma=paper.gamma, lr=paper.lr, step=paper.step) == paper


def test_the_rows_of_the_demo_differ_in_one_switch_each() -> None:
    plain, retention, correction, arc = DEMO.rows
    assert plain.method == "none"
    assert isinstance(arc.settings, ARCSettings)
    assert retention.settings == replace(arc.settings, correction=False)
    assert correction.settings == replace(arc.settings, retention=False)


def test_finetune_on_the_glyphs_is_that_of_the_demo() -> None:
    settings = recipe("finetune", "glyphs").settings
    assert (settings["lr"], settings["epochs_first"], settings["epochs"]) == (3e-3, 6, 6)
    assert (settings["batch_size"], settings["momentum"], settings["memory"]) == (32, 0.9, 0)
    assert (settings["weight_decay_first"], settings["weight_decay"]) == (5e-4, 2e-4)


def test_all_learners_on_all_data_in_both_forms() -> None:
    assert set(LEARNERS) <= set(catalogue.names("learners"))
    expected = {f"{a}-{b}{c}" for a in LEARNERS for b in DATA for c in ("", "-released")}
    assert expected < set(shipped())


@pytest.mark.parametrize("name", shipped())
def test_a_recipe_names_every_setting_of_its_learner(name: str) -> None:
    found = by_name(name)
    assert found.name == name
    settings = catalogue.load("learners", found.setup.learner).Settings
    assert set(found.settings) == set(names(settings))
    made = build(settings, found.settings, name)
    assert all(getattr(made, each) == value for each, value in found.settings.items())


@pytest.mark.parametrize("name", shipped())
def test_every_value_has_an_origin(name: str) -> None:
    found = by_name(name)
    assert found.origins.keys() == set(found.settings) | {each.name for each in fields(Setup)}
    assert origins(found.setup, found.settings) == found.origins


@pytest.mark.parametrize("learner", LEARNERS)
def test_the_sane_form_is_the_default_of_the_learner(learner: str) -> None:
    settings = catalogue.load("learners", learner).Settings
    defaults = {each.name: each.default for each in fields(settings)}
    for name, one in FORMS[learner]["sane"].items():
        assert defaults[name] == one.value, name


@pytest.mark.parametrize("learner", LEARNERS)
def test_both_forms_say_the_same_fields(learner: str) -> None:
    forms = FORMS[learner]
    assert forms["sane"].keys() == forms["released"].keys()
    for name, one in forms["sane"].items():
        assert one.value != forms["released"][name].value, name


def test_what_the_released_form_changes() -> None:
    assert differences("icarl", "cifar100") == {"sticky_quota": (False, True)}
    assert differences("l2p", "cifar100") == {"selection": ("sample", "batch")}
    assert differences("dualprompt", "imagenet_r") == {
        "selection": ("sample", "batch"),
        "prefix_order": ("permuted", "scrambled"),
        "pool": (0, 10),
    }
    assert differences("coda_prompt", "cifar100") == {
        "class_order": (1993, "natural"),
        "delayed": (False, True),
        "remainder": ("spread", "dropped"),
        "gram_schmidt": ("exact", "independent"),
    }
    assert differences("memo", "cifar100") == {
        "specialised_init": ("pretrained", "random"),
        "last_mean_only": (False, True),
    }
    assert differences("slca", "cifar100") == {}
    assert differences("slca", "imagenet_r") == {"epochs_first": (50, 5), "epochs": (50, 5)}


@pytest.mark.parametrize("data", DATA)
def test_pixels_are_as_the_weights_expect_them_but_not_as_released(data: str) -> None:
    assert recipe("l2p", data).setup.normalise == "weights"
    assert recipe("l2p", data, "released").setup.normalise == "none"


@pytest.mark.parametrize("learner", LEARNERS)
def test_the_sane_form_learns_in_one_class_order(learner: str) -> None:
    assert recipe(learner, "cifar100").setup.class_order == 1993
    assert recipe(learner, "five_datasets").setup.class_order == "natural"


def test_the_classes_of_the_tasks() -> None:
    sizes = {
        data: (where.setup.first_classes, where.setup.classes_per_task)
        for data in DATA
        for where in [recipe("der", data)]
    }
    assert sizes == {
        "cifar100-inc5": (5, 5),
        "cifar100-inc10": (10, 10),
        "imagenet_r-inc10": (10, 10),
        "imagenet_r-inc20": (20, 20),
        "five_datasets": (10, 10),
        "glyphs": (10, 10),
    }


def test_exemplars() -> None:
    cifar, imagenet_r = recipe("memo", "cifar100"), recipe("memo", "imagenet_r")
    assert (cifar.settings["memory"], cifar.settings["memory_rule"]) == (2000, "total")
    assert (imagenet_r.settings["memory"], imagenet_r.settings["memory_rule"]) == (20, "per_class")
    assert recipe("finetune", "cifar100").settings["memory"] == 0
    claimed = recipe("finetune_buffer", "imagenet_r")
    assert claimed.setup.learner == "finetune"
    assert (claimed.settings["memory"], claimed.origins["memory"]) == (20, "paper")
    with pytest.raises(ConfigurationError, match="has no released form"):
        recipe("finetune_buffer", "cifar100", "released")


def test_where_nothing_was_published_the_value_is_ours() -> None:
    borrowed, published = recipe("icarl", "cifar100-inc5"), recipe("icarl", "cifar100")
    assert borrowed.settings == published.settings
    assert (borrowed.origins["epochs"], published.origins["epochs"]) == ("ours", "released")
    assert borrowed.origins["memory"] == "paper"
    assert recipe("icarl", "five_datasets").origins["memory"] == "ours"
    assert set(recipe("icarl", "glyphs").origins.values()) == {"ours"}


def test_coda_keeps_its_own_transforms_where_it_has_any() -> None:
    found = {data: recipe("coda_prompt", data).setup.transform for data in DATA}
    assert found["cifar100-inc5"] == found["cifar100-inc10"] == "coda_cifar"
    assert found["imagenet_r-inc10"] == found["imagenet_r-inc20"] == "coda_imagenet_r"
    assert (found["five_datasets"], found["glyphs"]) == ("pilot", "as_stored")


def test_the_glyph_backbone_has_four_blocks_only() -> None:
    for learner, name in (("dualprompt", "expert_layers"), ("coda_prompt", "layers")):
        layers = recipe(learner, "glyphs").settings[name]
        assert isinstance(layers, tuple)
        assert max(layers) < 4
    assert recipe("l2p", "glyphs").setup.backbone == BACKBONES["ours"] == "glyph_vit"


def test_the_weights_that_the_paper_names() -> None:
    plain, named = recipe("l2p", "cifar100"), recipe("l2p", "cifar100", backbone="paper")
    assert plain.setup.backbone.endswith("augreg_in21k_ft_in1k")
    assert named.setup == replace(plain.setup, backbone="vit_base_patch16_224.augreg_in21k")
    assert (plain.origins["backbone"], named.origins["backbone"]) == ("released", "paper")


def test_a_changed_value_is_ours_unless_somebody_else_chose_that_one() -> None:
    base = recipe("icarl", "imagenet_r")
    found = origins(base.setup, {**base.settings, "lr": 2e-3, "epochs": 20, "sticky_quota": True})
    assert (found["lr"], found["batch_size"]) == ("ours", "released")
    assert found["epochs"] == "released"  # PILOT's file for this very data
    assert found["sticky_quota"] == "released"
    other = origins(replace(base.setup, classes_per_task=7, coupling="released"), base.settings)
    assert (other["classes_per_task"], other["coupling"]) == ("ours", "released")
    assert other["batch_size"] == "ours"


def test_a_learner_of_somebody_else_gets_the_setup_of_the_data() -> None:
    mine = recipe("mine", "glyphs")
    assert mine.setup == replace(recipe("finetune", "glyphs").setup, learner="mine")
    assert (mine.settings, mine.arc) == ({}, None)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("icarl-cifar100", "icarl-cifar100-inc10"),
        ("coda-prompt-imagenet-r-inc10", "coda_prompt-imagenet_r-inc10"),
        ("coda_prompt-imagenet_r-released", "coda_prompt-imagenet_r-inc20-released"),
        ("finetune-buffer-five-datasets", "finetune_buffer-five_datasets"),
    ],
)
def test_other_spellings(name: str, meant: str) -> None:
    assert by_name(name).name == meant


def test_wrong_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'icarl-cifar100-inc10'"):
        by_name("icarl-cifar10-inc10")
    with pytest.raises(ConfigurationError, match="no 'cifar'; did you mean"):
        recipe("icarl", "cifar")
    with pytest.raises(ConfigurationError, match="no 'insane'; did you mean 'sane'"):
        recipe("icarl", "cifar100", "insane")  # type: ignore[arg-type]


def test_the_fourteen_released_configurations_of_arc() -> None:
    assert len(RELEASED_ARC) == 14
    assert RELEASED_ARC.keys() == {place for place in TRAINING if place[0] != "slca"} - {
        (learner, "glyphs") for learner in LEARNERS
    }
    assert sum(arc.label_smoothing == 0.1 for arc in RELEASED_ARC.values()) == 9
    assert [place for place, arc in RELEASED_ARC.items() if not arc.entropy] == [
        ("icarl", "imagenet_r")
    ]
    assert {learner for (learner, _), arc in RELEASED_ARC.items() if arc.shuffled} == {"l2p"}
    for (learner, _), arc in RELEASED_ARC.items():
        prompted = learner in ("l2p", "dualprompt", "coda_prompt")
        assert (arc.lr_prompt is not None, arc.optimizer == "adam") == (prompted, prompted)
        assert arc.temperature == (1.5 if prompted else 1.1)
        assert (arc.batch_size is None) == (learner == "icarl")
        settings = arc.settings()
        assert (settings.past_only, settings.candidates) == (False, "cumulative")
        assert (settings.beta, settings.gamma, settings.lr) == (arc.beta, arc.gamma, arc.lr)


def test_recipes_carry_what_the_release_adapts_with() -> None:
    assert recipe("der", "imagenet_r").arc == RELEASED_ARC["der", "imagenet_r"]
    assert recipe("finetune_buffer", "cifar100").arc == RELEASED_ARC["finetune", "cifar100"]
    for learner, data in (("slca", "cifar100"), ("der", "five_datasets"), ("der", "glyphs")):
        assert recipe(learner, data).arc is None


def test_the_table_of_forms_in_the_document_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(.+?)` \| `(.+?)` \|", DOCUMENT, re.MULTILINE)
    printed = {(a, b): (json.loads(sane), json.loads(other)) for a, b, sane, other in rows}
    assert printed == {
        (learner, name): (one.value, forms["released"][name].value)
        for learner, forms in FORMS.items()
        for name, one in forms["sane"].items()
    }


def test_the_document_names_all_data_and_its_file_is_a_recipe() -> None:
    for name in (*DATA, *LEARNERS):
        assert f"`{name}`" in DOCUMENT
    found = re.search(r"^```toml\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert found
    mine = read(found[1], "docs/recipes.md")
    build(catalogue.load("learners", mine.setup.learner).Settings, mine.settings, mine.name)
