"""Methods and settings of a command line, as rows."""

from __future__ import annotations

import pytest

from arc_cl import ARCSettings
from arc_cl.engine.rows import rows_of
from arc_cl.errors import ConfigurationError


def test_a_pair_reaches_every_method_that_has_the_key() -> None:
    plain, arc = rows_of(["none", "arc"], ["beta=0.7", "arc.gamma=1.5"], None)
    assert (plain.method, arc.method) == ("none", "arc")
    assert arc.settings == ARCSettings(beta=0.7, gamma=1.5)


@pytest.mark.parametrize("preset", ["paper", "released"])
def test_a_preset_is_arcs_and_what_is_set_goes_above_it(preset: str) -> None:
    _, arc = rows_of(["none", "arc"], ["lr=0.5"], preset)  # type: ignore[arg-type]
    made = ARCSettings.paper if preset == "paper" else ARCSettings.released
    assert arc.settings == made(lr=0.5)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("bata=1", "did you mean 'beta'"),
        ("arc.bata=1", "did you mean 'beta'"),
        ("ark.beta=1", "did you mean 'arc'"),
        ("beta=x", "beta is 'x', expected a finite number"),
        ("beta", "key=value"),
    ],
)
def test_what_is_wrong_is_named(pair: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rows_of(["none", "arc"], [pair], None)
