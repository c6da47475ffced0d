"""The shipped recipes: every learner on every data setting, in our form and in the released one.

A recipe names every setting of its learner, so that it means the same whatever the defaults
become. Its numbers and their origins come from `hyperparameters`, and are nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Literal, TypeAlias, get_args

from arc_cl.errors import ConfigurationError
from arc_cl.experiments import hyperparameters as known
from arc_cl.experiments.fields import check_name
from arc_cl.experiments.hyperparameters import Chosen, Values, ours, paper, released
from arc_cl.experiments.spec import Origin, Recipe, Setup, Value, Variant

Weights: TypeAlias = Literal["released", "paper"]
"""Backbones: that of the released files, or the one that the paper's text names."""
VARIANTS: tuple[Variant, ...] = get_args(Variant)
LEARNERS = ("finetune", "icarl", "der", "memo", "l2p", "dualprompt", "coda_prompt", "slca")
BUFFERED = "finetune_buffer"
"""Finetune with the exemplars that the paper's text claims, and no code base keeps."""
SEED = 1993
"""Of the class order, in PILOT and in ARC's release."""


@dataclass(frozen=True, kw_only=True)
class DataSetting:
    """A data source, cut into tasks."""

    source: str
    first_classes: int
    classes_per_task: int
    like: Literal["cifar100", "imagenet_r", "glyphs"]
    """Whose training values are taken."""
    published: bool = False
    """Those values were released for these very tasks; elsewhere we borrow them."""


DATA: Mapping[str, DataSetting] = {
    "cifar100-inc5": DataSetting(
        source="cifar100", first_classes=5, classes_per_task=5, like="cifar100"
    ),
    "cifar100-inc10": DataSetting(
        source="cifar100", first_classes=10, classes_per_task=10, like="cifar100", published=True
    ),
    "imagenet_r-inc10": DataSetting(
        source="imagenet_r", first_classes=10, classes_per_task=10, like="imagenet_r"
    ),
    "imagenet_r-inc20": DataSetting(
        source="imagenet_r",
        first_classes=20,
        classes_per_task=20,
        like="imagenet_r",
        published=True,
    ),
    "five_datasets": DataSetting(
        source="five_datasets", first_classes=10, classes_per_task=10, like="cifar100"
    ),
    "glyphs": DataSetting(source="glyphs", first_classes=10, classes_per_task=10, like="glyphs"),
}
ALIASES: Mapping[str, str] = {"cifar100": "cifar100-inc10", "imagenet_r": "imagenet_r-inc20"}


def names() -> tuple[str, ...]:
    """All shipped recipes, as `by_name` takes them."""
    return tuple(_shipped(DATA))


def by_name(name: str) -> Recipe:
    """The recipe `<learner>-<data>` or `<learner>-<data>-released`; `-` and `_` are the same."""
    key = name.replace("_", "-")
    shipped = {one.replace("_", "-"): how for one, how in _shipped((*DATA, *ALIASES)).items()}
    if key not in shipped:
        check_name(name, names(), "the list of shipped recipes")
    return recipe(*shipped[key])


def recipe(
    learner: str,
    data: str,
    variant: Variant = "sane",
    backbone: Weights = "released",
) -> Recipe:
    """The recipe of a learner on a data setting; of a learner unknown here, the setup alone.

    `backbone` has no say on the glyphs, which have their own.
    """
    data = _data_named(data)
    check_name(variant, VARIANTS, "the list of forms")
    if learner == BUFFERED and variant == "released":
        raise ConfigurationError(
            f"{BUFFERED} has no released form, since the released code trains Finetune without "
            f"exemplars; take the sane form, or the learner finetune"
        )
    where = DATA[data]
    setup = {**_setup(learner, where, variant), **_backbone(where, backbone)}
    settings = {**_settings(learner, where, variant)}
    plain = {name: one.value for name, one in setup.items()}
    return Recipe(
        name=_name(learner, data, variant),
        setup=Setup(**plain),  # type: ignore[arg-type]
        settings={name: one.value for name, one in settings.items()},
        origins={name: one.origin for name, one in (settings | setup).items()},
        arc=known.RELEASED_ARC.get((_learner(learner), where.source)),
    )


def origins(setup: Setup, settings: Mapping[str, Value]) -> dict[str, Origin]:
    """Who chose each value: whoever did so in the shipped recipes beside it, otherwise we."""
    given = {each.name: getattr(setup, each.name) for each in fields(Setup)} | dict(settings)
    found: dict[str, Origin] = dict.fromkeys(given, "ours")
    for values in _beside(setup):
        for name, one in values.items():
            if name in given and _same(given[name], one.value):
                found[name] = one.origin
    return found


def _beside(setup: Setup) -> Iterator[Values]:
    """What is known for a learner and its data, in both forms; also where the tasks are others."""
    sizes = (setup.first_classes, setup.classes_per_task)
    places = [one for one in DATA.values() if one.source == setup.data]
    exact = [one for one in places if (one.first_classes, one.classes_per_task) == sizes]
    learners = [setup.learner] + [BUFFERED] * (setup.learner == _learner(BUFFERED))
    for place in exact or [replace(one, published=False) for one in places]:
        for learner, variant in product(learners, VARIANTS):
            yield _setup(learner, place, variant)
            yield _settings(learner, place, variant)
        yield from (_backbone(place, choice) for choice in get_args(Weights))
        yield released(coupling="released")
        if place.published:
            yield known.ALSO_RELEASED.get((setup.learner, place.like), {})


def _same(one: Value, other: Value) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _setup(learner: str, data: DataSetting, variant: Variant) -> dict[str, Chosen]:
    """All but the backbone. What the paper says holds for its own data; the glyphs are ours."""
    said = ours if data.source == "glyphs" else paper
    pipeline = ours(normalise="weights") if variant == "sane" else released(normalise="none")
    return {
        **said(
            learner=_learner(learner),
            data=data.source,
            first_classes=data.first_classes,
            classes_per_task=data.classes_per_task,
            coupling="none",
            only_tasks=0,
            images_per_class=0,
        ),
        **(ours if variant == "sane" else released)(variant=variant),
        **_class_order(learner, data, variant),
        **_transform(learner, data),
        **pipeline,
    }


def _class_order(learner: str, data: DataSetting, variant: Variant) -> dict[str, Chosen]:
    if data.source == "five_datasets":
        return paper(class_order="natural")  # a task is a data set
    if data.source == "glyphs":
        return ours(class_order=SEED)
    if learner != "coda_prompt":
        return released(class_order=SEED)
    # CODA's files leave the classes in their order; the paper compares all on one split.
    return paper(class_order=SEED) if variant == "sane" else released(class_order="natural")


def _transform(learner: str, data: DataSetting) -> dict[str, Chosen]:
    if data.source == "glyphs":
        return ours(transform="as_stored")
    # CODA's own transforms are a choice of its release, not a slip: both forms keep them.
    own = {"cifar100": "coda_cifar", "imagenet_r": "coda_imagenet_r"}
    coda = learner == "coda_prompt"
    return released(transform=own.get(data.source, "pilot") if coda else "pilot")


def _backbone(data: DataSetting, choice: Weights) -> dict[str, Chosen]:
    """The paper's text names weights of ImageNet-21k; all files take them fine-tuned on 1k."""
    check_name(choice, get_args(Weights), "the choice of backbones")
    origin: Origin = "ours" if data.source == "glyphs" else choice
    pretrained = ours if data.source == "glyphs" else paper
    return {
        "backbone": Chosen(known.BACKBONES[origin], origin),
        **pretrained(weights="pretrained"),
    }


def _settings(learner: str, data: DataSetting, variant: Variant) -> Values:
    """Of the learner: training values, the form, and what this form corrects in the values."""
    name = _learner(learner)
    place = (name, data.like)
    values = known.TRAINING.get(place)
    if values is None:
        return {}
    corrected = known.CORRECTED.get(place, {}) if variant == "sane" else {}
    buffer = known.BUFFERS[data.like] if learner == BUFFERED else {}
    training = {**values, **corrected, **buffer}
    if not data.published and data.source != "glyphs":
        training = {each: _borrowed(each, one, data) for each, one in training.items()}
    return {**training, **known.FORMS[name][variant]}


def _borrowed(name: str, one: Chosen, data: DataSetting) -> Chosen:
    """A value where none was published is ours, but for the memory that the paper's text names."""
    named = name == "memory" and one.value and data.source in ("cifar100", "imagenet_r")
    return Chosen(one.value, "paper" if named else "ours")


def _data_named(name: str) -> str:
    """`-` and `_` are the same here too."""
    known = {one.replace("_", "-"): one for one in (*DATA, *ALIASES)}
    found = known.get(name.replace("_", "-"), name)
    found = ALIASES.get(found, found)
    check_name(found, tuple(DATA), "the list of data settings")
    return found


def _learner(name: str) -> str:
    return "finetune" if name == BUFFERED else name


def _name(learner: str, data: str, variant: Variant) -> str:
    return f"{learner}-{data}" + ("-released" if variant == "released" else "")


def _shipped(places: Iterable[str]) -> dict[str, tuple[str, str, Variant]]:
    """Names to the arguments of `recipe`."""
    return {
        _name(learner, data, variant): (learner, data, variant)
        for variant in VARIANTS
        for learner in (*LEARNERS, BUFFERED)
        for data in places
        if not (learner == BUFFERED and variant == "released")
    }
