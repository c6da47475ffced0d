from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from arc_cl import ARCSettings
from arc_cl.errors import ConfigurationError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beta", -0.1),
        ("beta", 1.1),
        ("beta", float("nan")),
        ("beta", "0.8"),
        ("gamma", -1),
        ("temperature", 0),
        ("temperature", -1.0),
        ("temperature", float("inf")),
        ("label_smoothing", 1.0),
        ("lr", -1e-6),
        ("momentum", 1.0),
        ("weight_decay", -1),
        ("max_drift", 0),
        ("optimizer", "rmsprop"),
        ("step", "huge"),
        ("candidates", "all"),
        ("ratio", "none"),
        ("correction_rule", "naive"),
        ("retention", 1),
        ("lr", True),
    ],
)
def test_a_wrong_value_is_named_with_its_field_and_what_is_expected(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"{field}=.*{field} must be"):
        ARCSettings(**{field: value})


def test_an_unknown_optimizer_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="'sgd', 'adam'"):
        ARCSettings(optimizer="lion")  # type: ignore[arg-type]


def test_settings_are_values() -> None:
    assert ARCSettings(beta=0.7) == ARCSettings(beta=0.7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ARCSettings().beta = 0.1  # type: ignore[misc]


def test_presets_pin_every_field_and_switch_the_guards_off() -> None:
    paper, released = ARCSettings.paper(), ARCSettings.released()
    for preset in (paper, released):
        assert preset.max_drift is None
        assert not preset.step_warning
    differing = {
        field.name
        for field in dataclasses.fields(paper)
        if getattr(paper, field.name) != getattr(released, field.name)
    }
    assert differing == {"past_only", "recompute", "candidates", "adapt_first_task"}
    assert (released.past_only, released.recompute) == (False, False)
    assert (released.candidates, released.adapt_first_task) == ("cumulative", True)


def test_presets_take_changes() -> None:
    assert ARCSettings.released(beta=0.6, recompute=True).recompute
    assert ARCSettings.paper(gamma=1.5).gamma == 1.5
