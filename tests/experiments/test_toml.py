"""Recipes as files: what is written is read back, and mistakes are named."""

from __future__ import annotations

import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arc_cl.errors import ConfigurationError
from arc_cl.experiments.recipes import by_name, names, origins, recipe
from arc_cl.experiments.spec import Recipe, ReleasedARC, Setup
from arc_cl.experiments.toml import dump, read

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = (
    st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | TEXTS
    | st.lists(st.integers()).map(tuple)
)
SETUPS = st.builds(
    Setup,
    learner=TEXTS,
    data=TEXTS,
    backbone=TEXTS,
    first_classes=st.integers(1),
    classes_per_task=st.integers(1),
    class_order=st.integers(0, 2**32 - 1) | st.just("natural"),
    variant=st.sampled_from(["sane", "released"]),
    weights=TEXTS,
    transform=st.sampled_from(["as_stored", "pilot"]),
    normalise=st.sampled_from(["weights", "none"]),
    only_tasks=st.integers(0),
)
ARCS = st.builds(
    ReleasedARC,
    lr=st.floats(0, 1),
    lr_prompt=st.none() | st.floats(0, 1),
    beta=st.floats(0, 1),
    gamma=st.floats(0, 2),
    temperature=st.floats(1, 2),
    batch_size=st.none() | st.integers(1, 128),
)

OWN = """
[setup]
learner = "icarl"
data = "cifar100"
backbone = "vit_base_patch16_224.augreg_in21k_ft_in1k"
first_classes = 50
classes_per_task = 10

[settings]
lr = 1e-3
epochs = 7
milestones = [3, 5]
"""


@pytest.mark.parametrize("name", names())
def test_shipped_recipes_come_back_with_their_origins(name: str) -> None:
    assert read(dump(by_name(name)), "there") == by_name(name)


@given(
    name=TEXTS.filter(bool),
    setup=SETUPS,
    settings=st.dictionaries(TEXTS, VALUES),
    arc=st.none() | ARCS,
)
def test_whatever_is_written_is_read_back(
    name: str, setup: Setup, settings: dict[str, object], arc: ReleasedARC | None
) -> None:
    written = Recipe(
        name=name,
        setup=setup,
        settings=settings,  # type: ignore[arg-type]
        origins=origins(setup, settings),  # type: ignore[arg-type]
        arc=arc,
    )
    found = read(dump(written), "there")
    assert found == written
    for each, value in settings.items():
        assert type(found.settings[each]) is type(value)


def test_each_value_stands_in_a_line_with_its_origin() -> None:
    text = dump(recipe("slca", "imagenet_r", backbone="paper"))
    lines = [re.split(r"\s+", line) for line in text.splitlines()]
    assert ["lr", "=", "0.01", "#", "released"] in lines
    assert ["epochs", "=", "50", "#", "ours"] in lines
    assert ["milestones", "=", "[40]", "#", "released"] in lines
    assert ["data", "=", '"imagenet_r"', "#", "paper"] in lines
    assert ["backbone", "=", '"vit_base_patch16_224.augreg_in21k"', "#", "paper"] in lines
    assert list(tomllib.loads(text)) == ["name", "setup", "settings"]


def test_an_own_file_needs_no_more_than_differs_from_the_defaults() -> None:
    found = read(OWN, "own.toml")
    assert found.name == "icarl-cifar100"
    assert (found.setup.first_classes, found.setup.class_order) == (50, 1993)
    assert dict(found.settings) == {"lr": 1e-3, "epochs": 7, "milestones": (3, 5)}
    assert (found.origins["first_classes"], found.origins["epochs"]) == ("ours", "ours")


def test_an_edited_value_is_no_longer_released() -> None:
    text = dump(recipe("icarl", "cifar100"))
    found = read(text.replace("epochs = 20 ", "epochs = 21 "), "edited.toml")
    assert (found.settings["epochs"], found.origins["epochs"]) == (21, "ours")
    assert found.origins["epochs_first"] == "released"


def test_settings_are_left_to_whoever_knows_the_learner() -> None:
    assert read(OWN + "nonsense = true\n", "own.toml").settings["nonsense"] is True


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[setup]", "[setup", "own.toml is not TOML"),
        ("[setup]", "[set_up]", "own.toml has no 'set_up'; did you mean 'setup'"),
        ("[setup]", "setup = 3\n[settings.x]", "setup is 3, expected a table"),
        ("first_classes", "first_class", r"\[setup\] of own.toml has no 'first_class'; did you"),
        ('learner = "icarl"', "", r"\[setup\] of own.toml lacks learner"),
        ("= 50", '= "50"', r"\[setup\] of own.toml: first_classes is '50', expected a whole"),
        ("= 50", "= true", "first_classes is True, expected a whole number"),
        ("[3, 5]", "[3, 5.5]", r"\[settings\] of own.toml: milestones is \[3, 5.5\], expected"),
        ("= 7", "= 2026-11-20", r"\[settings\] of own.toml: epochs is"),
        ("= 7", "= {a = 1}", r"\[settings\] of own.toml: epochs is"),
        ("\n[setup]", "name = 3\n[setup]", "own.toml: name is 3, expected a text"),
        ("\n[setup]", "settings = 3\n[setup]", "not TOML"),
        ("[settings]", "[arc]", r"\[arc\] of own.toml has no 'epochs'"),
    ],
)
def test_mistakes_are_named(old: str, new: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        read(OWN.replace(old, new, 1), "own.toml")


def test_a_table_is_no_value() -> None:
    with pytest.raises(ConfigurationError, match="settings is 3, expected a table"):
        read("settings = 3\n" + OWN.partition("[settings]")[0], "own.toml")
