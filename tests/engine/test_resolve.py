"""A recipe to objects: what is wrong shows before any data or weights are touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch

from arc_cl.data.sources.glyphs import Glyphs
from arc_cl.engine.resolve import Resolved, changed, complete, resolve
from arc_cl.errors import ARCError, CompatibilityError, ConfigurationError
from arc_cl.experiments.fast import fast
from arc_cl.experiments.recipes import recipe
from arc_cl.experiments.spec import Recipe, Value

FINETUNE = recipe("finetune", "glyphs")
L2P = recipe("l2p", "glyphs")


def with_setup(base: Recipe = FINETUNE, **values: object) -> Recipe:
    return replace(base, setup=replace(base.setup, **values))  # type: ignore[arg-type]


def with_settings(base: Recipe = FINETUNE, **values: object) -> Recipe:
    return replace(base, settings={**base.settings, **values})  # type: ignore[dict-item]


# --- --set -----------------------------------------------------------------------------------


def test_set_changes_setup_and_settings() -> None:
    found = changed(FINETUNE, ["lr=1e-2", "epochs=3", "milestones=1,2", "only_tasks=2"])
    assert found.settings == {**FINETUNE.settings, "lr": 0.01, "epochs": 3, "milestones": (1, 2)}
    assert found.setup == replace(FINETUNE.setup, only_tasks=2)
    assert found.name == "finetune-glyphs-changed"
    assert (FINETUNE.settings["epochs"], FINETUNE.setup.only_tasks) == (6, 0)


def test_without_pairs_a_recipe_stays_as_it_is() -> None:
    assert changed(FINETUNE, []) == FINETUNE


def test_the_last_of_two_values_holds_and_a_value_may_have_an_equals_sign() -> None:
    found = changed(FINETUNE, ["lr=1", "weights=a=b.safetensors", "lr=2", "class_order=natural"])
    assert found.settings["lr"] == 2
    assert (found.setup.weights, found.setup.class_order) == ("a=b.safetensors", "natural")


def test_what_was_set_is_nobodys_but_ours() -> None:
    base = recipe("l2p", "cifar100")
    found = changed(base, ["lr=1", "first_classes=20"])
    assert {"lr", "first_classes"} <= base.origins.keys()
    assert base.origins.keys() - found.origins.keys() == {"lr", "first_classes"}
    assert found.origins.items() <= base.origins.items()


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("lr", r"key=value, not 'lr'"),
        ("", r"key=value, not ''"),
        ("=3", "--set has no ''"),
        ("epoch=3", r"--set has no 'epoch'; did you mean 'epochs'\?"),
        ("top_k=3", "--set has no 'top_k'"),
        ("only_tasks=two", "--set: only_tasks is 'two', expected a whole number"),
        ("first_classes=2.5", "--set: first_classes is '2.5', expected a whole number"),
        ("coupling=half", "--set: coupling is 'half', expected one of 'none', 'freeze'"),
        ("class_order=true", "--set: class_order is 'true', expected a whole number or 'natural'"),
    ],
)
def test_a_wrong_pair_says_what_was_expected(pair: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        changed(FINETUNE, ["lr=1", pair])


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("epochs=2.5", "epochs is '2.5', expected a whole number"),
        ("lr=fast", "lr is 'fast', expected a finite number"),
        ("lr=nan", "lr is 'nan', expected a finite number"),
        ("milestones=1,x", "milestones is '1,x', expected a list, each a whole number"),
        ("sticky_quota=1", "sticky_quota is '1', expected true or false"),
        ("lr=-1", "lr=-1.0: expected a rate above 0"),
        ("learner=l2p", "for l2p has no"),
    ],
)
def test_a_wrong_setting_shows_when_the_recipe_is_completed(pair: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        complete(changed(FINETUNE, [pair]))


def test_a_complete_recipe_names_every_setting_in_its_type() -> None:
    found = complete(replace(L2P, settings={**required_of(L2P), "lr": 1}))
    assert found.settings.keys() == L2P.settings.keys()
    assert isinstance(found.settings["lr"], float)
    assert found.settings["selection"] == "sample"
    assert complete(found) == found


def required_of(base: Recipe) -> Mapping[str, Value]:
    return {name: base.settings[name] for name in ("epochs_first", "epochs", "batch_size")}


def test_a_lacking_setting_is_named() -> None:
    with pytest.raises(ConfigurationError, match="lacks lr, epochs_first, epochs, batch_size"):
        complete(replace(L2P, settings={}))


# --- errors ----------------------------------------------------------------------------------


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is prepared, read or loaded."""

    def too_early(*arguments: object, **named: object) -> None:
        raise AssertionError("too early")

    for place in ("prepare", "arrays"):
        monkeypatch.setattr(Glyphs, place, too_early)
    monkeypatch.setattr("arc_cl.engine.resolve.load", too_early)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (with_setup(learner="finetun"), r"no learner .* 'finetun'; did you mean 'finetune'\?"),
        (with_setup(data="glyph"), r"no data source .* 'glyph'; did you mean 'glyphs'\?"),
        (with_setup(first_classes=101), "at most 100 for the first"),
        (with_settings(lr=-1.0), "expected a rate above 0"),
        (with_settings(lr="fast"), "lr is 'fast'"),
        (with_settings(epoch=3), r"did you mean 'epochs'\?"),
        (with_settings(L2P, top_k=11), "expected at most pool"),
    ],
)
def test_an_error_comes_before_data_and_weights(wrong: Recipe, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        resolve(wrong)


def test_an_unknown_backbone_is_named_before_images_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Glyphs, "arrays")
    wrong = with_setup(backbone="vit_tiny_patch16_22", weights="random")
    with pytest.raises(ConfigurationError, match=r"did you mean 'vit_tiny_patch16_224"):
        resolve(wrong)


@pytest.mark.parametrize("learner", ["l2p", "dualprompt", "coda_prompt", "memo"])
def test_a_backbone_that_does_not_fit_its_learner_shows_before_images_are_read(
    learner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Glyphs, "arrays")
    wrong = with_setup(recipe(learner, "glyphs"), backbone="test_resnet", weights="random")
    with pytest.raises(CompatibilityError, match="VisionTransformer"):
        resolve(wrong)


def test_prompts_beyond_the_depth_of_the_backbone_show_before_the_first_batch() -> None:
    wrong = with_settings(recipe("coda_prompt", "glyphs"), layers=(0, 4))
    with pytest.raises(ARCError, match="4"):
        resolve(wrong)


# --- objects ---------------------------------------------------------------------------------


@cache
def miniature() -> Resolved:
    return resolve(fast(FINETUNE))


def test_a_recipe_is_resolved_to_its_whole_scenario() -> None:
    whole = resolve(FINETUNE).scenario
    assert whole.tasks == (10,) * 10
    assert sorted(whole.order) == list(range(100))
    assert whole.order[:3] != (0, 1, 2)
    natural = resolve(with_setup(class_order="natural", first_classes=40)).scenario
    assert natural.tasks == (40, *[10] * 6)
    assert natural.order == tuple(range(100))


def test_only_tasks_cuts_the_sequence_and_not_the_order() -> None:
    found = resolve(with_setup(only_tasks=2)).scenario
    assert found.tasks == (10, 10)
    assert found.order == resolve(FINETUNE).scenario.order
    assert (found.info(1).tasks, found.info(1).classes) == (2, 20)
    assert resolve(with_setup(only_tasks=11)).scenario.tasks == (10,) * 10


def test_images_per_class_takes_the_first_of_each() -> None:
    labels = torch.arange(100).repeat(4).numpy()
    found = resolve(with_setup(images_per_class=3)).scenario
    indices = found.training_indices(labels, 0)
    assert sorted(labels[indices]) == sorted([*found.order[:10]] * 3)
    assert max(indices) < 300
    assert len(resolve(FINETUNE).scenario.training_indices(labels, 0)) == 40


def test_each_learner_has_its_own_copy_of_the_backbone() -> None:
    made = miniature()
    one, other = made.learner().modules(), made.learner().modules()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.zero_()
    after = other.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert any(parameter.any() for parameter in made.backbone.module.parameters())


def test_images_look_as_the_weights_expect_or_as_released() -> None:
    expected = miniature().backbone
    ours = miniature().appearance.normalisation
    assert (ours.mean, ours.std) == (expected.mean, expected.std)
    released = resolve(fast(recipe("finetune", "glyphs", "released"))).appearance.normalisation
    assert (released.mean, released.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def test_resolving_leaves_the_global_generator() -> None:
    before = torch.get_rng_state()
    resolve(with_setup(backbone="test_vit", weights="random", transform="pilot"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "values", [{"first_classes": 0}, {"classes_per_task": 0}, {"images_per_class": -1}]
)
def test_a_setup_of_nothing_is_refused_where_it_is_made(values: dict[str, int]) -> None:
    (name,) = values
    with pytest.raises(ConfigurationError, match=f"{name} is"):
        with_setup(FINETUNE, **values)
