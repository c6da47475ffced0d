"""A miniature of a recipe: the same learner and the same path, in seconds on a CPU."""

from __future__ import annotations

from dataclasses import replace

from arc_cl.experiments.spec import Recipe, Setup, Value

_BACKBONE = "vit_tiny_patch16_224"
_AT_MOST: dict[str, int] = {
    "epochs_first": 1,
    "epochs": 1,
    "batch_size": 6,
    "memory": 18,
    "alignment_epochs": 1,
    "alignment_samples": 16,
}


def fast(recipe: Recipe) -> Recipe:
    """Three tasks of at most three classes, six images a class, one epoch; weights at random.

    Only the embedded glyph backbone keeps its own weights. What it learns means nothing.
    """
    setup = recipe.setup
    embedded = setup.backbone == "glyph_vit"
    small: dict[str, object] = {
        "first_classes": min(setup.first_classes, 3),
        "classes_per_task": min(setup.classes_per_task, 3),
        "only_tasks": 3,
        "images_per_class": 6,
        "backbone": setup.backbone if embedded else _BACKBONE,
        "weights": setup.weights if embedded else "random",
    }
    settings = {name: _small(name, value) for name, value in recipe.settings.items()}
    changed = {*small, *(name for name in settings if settings[name] != recipe.settings[name])}
    return replace(
        recipe,
        name=f"{recipe.name.removesuffix('-changed')}-fast",
        setup=_changed(setup, small),
        settings=settings,
        origins={name: who for name, who in recipe.origins.items() if name not in changed},
    )


def _changed(setup: Setup, values: dict[str, object]) -> Setup:
    return replace(setup, **values)  # type: ignore[arg-type]


def _small(name: str, value: Value) -> Value:
    return min(value, _AT_MOST[name]) if name in _AT_MOST and isinstance(value, int) else value
