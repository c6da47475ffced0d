"""A miniature is the same experiment, small; what is small already stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arc_cl import catalogue
from arc_cl.experiments.fast import fast
from arc_cl.experiments.fields import build
from arc_cl.experiments.recipes import by_name, names, recipe
from arc_cl.experiments.spec import Value
from arc_cl.protocol.stream import task_sizes

AT_MOST = {"epochs_first": 1, "epochs": 1, "batch_size": 6, "memory": 18}
CLASSES = {"cifar100": 100, "imagenet_r": 200, "five_datasets": 50, "glyphs": 100}


@pytest.mark.parametrize("name", names())
def test_every_recipe_has_a_miniature_that_its_learner_takes(name: str) -> None:
    whole, small = by_name(name), fast(by_name(name))
    settings = catalogue.load("learners", small.setup.learner).Settings
    build(settings, small.settings, name)
    assert small.settings.keys() == whole.settings.keys()
    for field, most in AT_MOST.items():
        value = small.settings.get(field, 0)
        assert isinstance(value, int)
        assert value <= most
    sizes = task_sizes(
        CLASSES[small.setup.data], small.setup.first_classes, small.setup.classes_per_task
    )
    assert sizes[:3] == (3, 3, 3)
    assert (small.setup.only_tasks, small.setup.images_per_class) == (3, 6)


def test_only_size_and_backbone_differ() -> None:
    whole = recipe("icarl", "cifar100", "released")
    small = fast(whole)
    assert differing(dict(whole.settings), dict(small.settings)) == {
        "epochs_first",
        "epochs",
        "batch_size",
        "memory",
    }
    assert differing(vars(whole.setup), vars(small.setup)) == {
        "first_classes",
        "classes_per_task",
        "only_tasks",
        "images_per_class",
        "backbone",
        "weights",
    }
    assert (small.name, small.arc) == ("icarl-cifar100-inc10-released-fast", whole.arc)


def differing(one: dict[str, Value], other: dict[str, Value]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if one[name] != other[name]}


def test_downloads_nothing_unless_the_weights_are_embedded() -> None:
    large, own = fast(recipe("l2p", "cifar100")).setup, fast(recipe("l2p", "glyphs")).setup
    assert (large.backbone, large.weights) == ("vit_tiny_patch16_224", "random")
    assert (own.backbone, own.weights) == ("glyph_vit", "pretrained")
    whole = recipe("l2p", "cifar100")
    given = fast(replace(whole, setup=replace(whole.setup, weights="some.safetensors")))
    assert given.setup.weights == "random"


def test_what_is_small_already_stays() -> None:
    whole = recipe("finetune", "glyphs")
    whole = replace(
        whole,
        setup=replace(whole.setup, first_classes=2, classes_per_task=1),
        settings={**whole.settings, "batch_size": 4},
    )
    small = fast(whole)
    assert (small.setup.first_classes, small.setup.classes_per_task) == (2, 1)
    assert small.settings["batch_size"] == 4
    assert small.settings["memory"] == 0


def test_a_miniature_of_a_miniature_is_the_same() -> None:
    once = fast(recipe("slca", "imagenet_r"))
    again = fast(once)
    assert replace(again, name=once.name) == once


def test_what_was_made_small_has_no_origin_and_the_rest_keeps_its() -> None:
    whole = recipe("icarl", "cifar100")
    small = fast(whole)
    changed = differing(dict(whole.settings), dict(small.settings)) | differing(
        vars(whole.setup), vars(small.setup)
    )
    assert small.origins.keys() == whole.origins.keys() - changed
    assert small.origins.items() <= whole.origins.items()


def test_the_whole_recipe_is_left_as_it_was() -> None:
    whole = recipe("icarl", "cifar100")
    fast(whole)
    assert whole == recipe("icarl", "cifar100")
