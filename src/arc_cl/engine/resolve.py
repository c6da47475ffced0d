"""A recipe to objects; every error that can be known shows here, before the first batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType

from arc_cl import catalogue
from arc_cl.backbones.timm_models import Loaded, load
from arc_cl.contracts import DataSource, Learner, Training
from arc_cl.engine.images import Appearance, Normalisation
from arc_cl.experiments.fields import build, check_name, names, parse, split_pair
from arc_cl.experiments.spec import Recipe, Setup
from arc_cl.protocol.stream import Scenario, class_order, task_sizes

_UNIT = Normalisation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@dataclass(frozen=True)
class Resolved:
    """A recipe with every default filled in, and what it stands for."""

    recipe: Recipe
    settings: Training
    source: DataSource
    scenario: Scenario
    backbone: Loaded
    appearance: Appearance
    _learner: ModuleType

    def learner(self) -> Learner:
        """A fresh one, on its own copy of the backbone."""
        made: Learner = self._learner.create(copy.deepcopy(self.backbone.module), self.settings)
        return made


def complete(recipe: Recipe) -> Recipe:
    """The same recipe with every setting named and of its type, defaults included."""
    return replace(recipe, settings=asdict(_settings(recipe)))


def changed(recipe: Recipe, pairs: Sequence[str]) -> Recipe:
    """The recipe with `key=value` pairs of the command line put in; what they set is ours."""
    settings_of = catalogue.load("learners", recipe.setup.learner).Settings
    known = (*names(Setup), *names(settings_of))
    setup, settings, where = asdict(recipe.setup), dict(recipe.settings), "--set"
    set_here = dict(map(split_pair, pairs))
    for key, text in set_here.items():
        check_name(key, known, where)
        if key in names(Setup):
            setup[key] = parse(Setup, key, text, where)
        else:
            settings[key] = parse(settings_of, key, text, where)  # type: ignore[assignment]
    return replace(
        recipe,
        name=f"{recipe.name.removesuffix('-changed')}-changed" if pairs else recipe.name,
        setup=build(Setup, setup, where),
        settings=settings,
        origins={name: who for name, who in recipe.origins.items() if name not in set_here},
    )


def resolve(recipe: Recipe, root: Path | None = None) -> Resolved:
    """Load what the recipe names; `root` is the folder of the data sets."""
    settings = _settings(recipe)
    setup = recipe.setup
    source: DataSource = catalogue.load("data.sources", setup.data).create()
    scenario = _scenario(setup, len(source.class_names))
    backbone = load(setup.backbone, setup.weights)
    expected = Normalisation(tuple(backbone.mean), tuple(backbone.std))
    appearance = Appearance(
        setup.transform, backbone.image_size, expected if setup.normalise == "weights" else _UNIT
    )
    made = Resolved(
        replace(recipe, settings=asdict(settings)),
        settings,
        source,
        scenario,
        backbone,
        appearance,
        catalogue.load("learners", setup.learner),
    )
    made.learner()  # a backbone that does not fit the learner shows before data are fetched
    source.prepare(root)
    return made


def _settings(recipe: Recipe) -> Training:
    module = catalogue.load("learners", recipe.setup.learner)
    where = f"the recipe {recipe.name} for {recipe.setup.learner}"
    settings: Training = build(module.Settings, recipe.settings, where)
    return settings


def _scenario(setup: Setup, classes: int) -> Scenario:
    seed = None if setup.class_order == "natural" else setup.class_order
    tasks = task_sizes(classes, setup.first_classes, setup.classes_per_task)
    if setup.only_tasks:
        tasks = tasks[: setup.only_tasks]
    return Scenario(
        order=class_order(classes, seed), tasks=tasks, images_per_class=setup.images_per_class
    )
