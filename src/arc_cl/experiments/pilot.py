"""The JSON configurations of PILOT and of ARC's release, translated into recipes.

A translation is what that file would run, slips included: the learner's released form with the
file's values. Every key is understood, or listed with the reason why it has no effect here;
whatever our learners cannot do is an error before anything runs. The released code itself ignores
keys that it does not know, and fails on missing ones after hours of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from arc_cl.errors import ConfigurationError
from arc_cl.experiments import _pilot_files as files
from arc_cl.experiments import recipes
from arc_cl.experiments._pilot_settings import TRANSLATORS, need
from arc_cl.experiments.fields import build, check_name, names
from arc_cl.experiments.hyperparameters import BACKBONES
from arc_cl.experiments.spec import Recipe, ReleasedARC

_DATA = {
    "cifar224": ("cifar100", 100),
    "imagenetr": ("imagenet_r", 200),
    "5-dataset": ("five_datasets", 50),
    "5-datasets": ("five_datasets", 50),
    "five_datasets": ("five_datasets", 50),
}
"""Names of data sets in the files to ours, and their classes."""
_PLAIN_BACKBONES = {
    "vit_base_patch16_224": BACKBONES["released"],
    "pretrained_vit_b16_224": BACKBONES["released"],
    "vit_base_patch16_224_in21k": BACKBONES["paper"],
    "pretrained_vit_b16_224_in21k": BACKBONES["paper"],
}
_OWN_BACKBONE = ("memo", "l2p", "dualprompt", "coda_prompt")
"""Learners whose files name a variant of the transformer that they alone can use."""
_POSITIVE = {
    *("init_cls", "increment", "batch_size", "arc_batch_size", "init_epoch", "epochs"),
    *("tuned_epoch", "init_lr", "lrate", "size", "length", "top_k", "g_prompt_length", "T"),
}
_NOT_NEGATIVE = {
    *("memory_size", "memory_per_class", "init_weight_decay", "weight_decay", "init_lr_decay"),
    *("lrate_decay", "alpha_aux", "pull_constraint_coeff", "ca_epochs", "ca_with_logit_norm"),
    *("bcb_lrscale", "adjust_prompt_lr"),
}


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A configuration file as a recipe, and what the recipe cannot hold."""

    recipe: Recipe
    """With the class order of the first seed."""
    arc: ReleasedARC | None
    """None where the file is PILOT's."""
    seeds: tuple[int, ...]
    ignored: Mapping[str, str]
    """Keys of the file that have no effect here, and why."""

    def for_seed(self, seed: int) -> Recipe:
        """In the released code one seed decides the class order and everything else."""
        setup = self.recipe.setup
        if setup.class_order == "natural":
            return self.recipe
        return replace(self.recipe, setup=replace(setup, class_order=seed))


def read(source: str | Mapping[str, object], where: str = "the configuration") -> Translation:
    """Translate the text of a file, or what it holds; `where` names it in errors."""
    held = _parsed(source, where) if isinstance(source, str) else dict(source)
    learner = _choice(held, "model_name", tuple(files.FILES), where)
    file, arc = _checked(held, learner, where)
    data, classes = _DATA[_choice(held, "dataset", tuple(_DATA), where)]
    if file.init_cls > classes:
        raise ConfigurationError(f"{where}: init_cls is {file.init_cls}, {data} has {classes}")
    seeds = bool(file.seed) and min(file.seed) >= 0 and max(file.seed) < 2**32
    need(seeds, "seed", list(file.seed), "seeds from 0 on, below 2**32", where)
    base = recipes.recipe(learner, data, "released")
    settings = {**base.settings, **TRANSLATORS[learner](file, where)}
    released = _released_arc(learner, arc, where) if arc else None
    setup = replace(
        base.setup,
        backbone=_backbone(held, learner, where),
        first_classes=file.init_cls,
        classes_per_task=file.increment,
        class_order=_class_order(file),
        coupling="released" if _leaks(arc) else "none",
    )
    return Translation(
        recipe=Recipe(
            name=f"{learner}-{data}-{file.init_cls}-{file.increment}-pilot",
            setup=setup,
            settings=settings,
            origins=recipes.origins(setup, settings),
            arc=released,
        ),
        arc=released,
        seeds=file.seed,
        ignored=_ignored(held, file, arc),
    )


def _class_order(file: files.Shared) -> int | Literal["natural"]:
    return file.seed[0] if file.shuffle else "natural"


def _parsed(text: str, where: str) -> dict[str, object]:
    try:
        held = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where))
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{where} is not JSON: {error}") from None
    if not isinstance(held, dict):
        raise ConfigurationError(f"{where} holds no JSON object, as PILOT's configurations do")
    return held


def _unique(pairs: list[tuple[str, object]], where: str) -> dict[str, object]:
    held = dict(pairs)
    if len(held) < len(pairs):
        given = [name for name, _ in pairs]
        twice = next(name for name in given if given.count(name) > 1)
        raise ConfigurationError(f"{where} names {twice} twice; keep one")
    return held


def _choice(held: Mapping[str, object], key: str, known: tuple[str, ...], where: str) -> str:
    """A name among those known; the released code, too, reads them in any case."""
    value = held.get(key)
    if not isinstance(value, str):
        raise ConfigurationError(f"{where}: {key} is {value!r}, expected one of {', '.join(known)}")
    check_name(value.lower(), known, f"the list of what {key} may be in {where}")
    return value.lower()


def _checked(
    held: Mapping[str, object], learner: str, where: str
) -> tuple[files.Shared, files.AnyARC | None]:
    """The file by its types; ARC's keys by themselves, all of them or none."""
    kind, arc_kind = files.FILES[learner], files.ARC.get(learner)
    arc_names = names(arc_kind) if arc_kind else ()
    for name in held:
        check_name(name, names(kind) + arc_names, where)
    file = build(kind, {name: one for name, one in held.items() if name in names(kind)}, where)
    arc_part = {name: one for name, one in held.items() if name in arc_names}
    arc = build(arc_kind, arc_part, where) if arc_kind and arc_part else None
    for part in (file, arc) if arc else (file,):
        _check_bounds(asdict(part), where)
    return file, arc


def _check_bounds(values: Mapping[str, object], where: str) -> None:
    for name, value in values.items():
        if isinstance(value, int | float):
            need(name not in _POSITIVE or value > 0, name, value, "a number above 0", where)
            need(name not in _NOT_NEGATIVE or value >= 0, name, value, "0 or more", where)
        if name.endswith(("milestones", "_layer_idx")) and isinstance(value, tuple):
            need(min(value, default=0) >= 0, name, list(value), "numbers from 0 on", where)


def _backbone(held: Mapping[str, object], learner: str, where: str) -> str:
    """The tag that timm 0.6 meant by the bare name."""
    if learner not in _OWN_BACKBONE:
        return _PLAIN_BACKBONES[_choice(held, "backbone_type", tuple(_PLAIN_BACKBONES), where)]
    _choice(held, "backbone_type", (f"vit_base_patch16_224_{learner}",), where)
    return BACKBONES["released"]


def _released_arc(learner: str, keys: files.AnyARC, where: str) -> ReleasedARC:
    arc = ReleasedARC(
        **_rates(keys),
        beta=keys.confidence_threshold,
        gamma=keys.ood_threshold,
        temperature=keys.iterative_temperature,
        label_smoothing=0.1 if keys.soften_labels else 0.0,
        cross_entropy=keys.cross_entropy_loss,
        entropy=keys.entropy_loss,
        retention=keys.adaptive_retention,
        correction=keys.adaptive_correction,
        batch_size=None if isinstance(keys, files.ARCOfICaRL) else keys.arc_batch_size,
        shuffled=learner == "l2p",
    )
    try:
        arc.settings()
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}, the keys of ARC: {error}") from None
    return arc


def _rates(keys: files.AnyARC) -> dict[str, Any]:
    """Prompts go with Adam, heads alone with SGD."""
    if isinstance(keys, files.ARCOfPrompts):
        prompts = keys.adjust_prompt_lr if keys.train_prompt else None
        return {"lr": keys.adjust_head_lr, "lr_prompt": prompts, "optimizer": "adam"}
    return {"lr": keys.adjust_lr, "optimizer": "sgd"}


def _leaks(keys: files.AnyARC | None) -> bool:
    """Whether ARC's evaluation reaches later training: it freezes the rest and moves the head.

    With prompts it leaks too, in a way that arc-cl does not reproduce.
    """
    return keys is not None and not isinstance(keys, files.ARCOfPrompts) and keys.adaptive_retention


def _ignored(
    held: Mapping[str, object], file: files.Shared, keys: files.AnyARC | None
) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in (file, keys) if keys else (file,):
        reasons = {each.name: each.metadata.get("reason") for each in fields(part)}
        found |= {name: reason for name, reason in reasons.items() if reason and name in held}
    if isinstance(file, files.Rehearsed):
        unread = "memory_size" if file.fixed_memory else "memory_per_class"
        if unread in held:
            found[unread] = "fixed_memory chooses between the two memories"
    if isinstance(keys, files.ARCOfPrompts) and keys.train_prompt:
        found["train_prompt"] = (
            "arc-cl adapts the head alone, and nothing of it reaches later training"
        )
    return found
