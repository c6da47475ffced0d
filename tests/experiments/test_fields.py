"""Names and plain values into typed settings: what fits is taken, everything else is named."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arc_cl.errors import ConfigurationError
from arc_cl.experiments.fields import build, check_name, names, parse, required


@dataclass(frozen=True, kw_only=True)
class Example:
    lr: float
    epochs: int = 1
    warm: bool = False
    title: str = ""
    rule: Literal["total", "per_class"] = "total"
    layers: tuple[int, ...] = ()
    order: int | Literal["natural"] = "natural"
    decay: float | None = None
    fixed: Literal[True] = True


EXAMPLES = st.builds(
    Example,
    lr=st.floats(-1e300, 1e300),
    epochs=st.integers(),
    warm=st.booleans(),
    title=st.text(),
    rule=st.sampled_from(["total", "per_class"]),
    layers=st.lists(st.integers(-9, 9)).map(tuple),
    order=st.integers(0, 9) | st.just("natural"),
    decay=st.none() | st.floats(0, 1),
)


@given(EXAMPLES)
def test_what_has_the_right_types_is_taken_as_it_is(example: Example) -> None:
    assert build(Example, vars(example), "here") == example


@given(EXAMPLES)
def test_json_has_lists_for_tuples(example: Example) -> None:
    assert build(Example, json.loads(json.dumps(vars(example))), "here") == example


def test_fields_and_those_without_a_default() -> None:
    assert names(Example)[:3] == ("lr", "epochs", "warm")
    assert required(Example) == ("lr",)


def test_a_whole_number_serves_as_a_float() -> None:
    made = build(Example, {"lr": 1, "decay": 2}, "here")
    assert (made.lr, made.decay) == (1.0, 2.0)
    assert type(made.lr) is type(made.decay) is float


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"here has no 'epoch'; did you mean 'epochs'\?"):
        build(Example, {"lr": 1.0, "epoch": 3}, "here")
    with pytest.raises(ConfigurationError, match=r"has no 'zzz' \(there are: lr, epochs"):
        check_name("zzz", names(Example), "here")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigurationError, match="here lacks lr"):
        build(Example, {"epochs": 3}, "here")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr", "fast", "'fast', expected a finite number"),
        ("lr", True, "True, expected a finite number"),
        ("lr", float("nan"), "nan, expected a finite number"),
        ("lr", float("-inf"), "-inf, expected a finite number"),
        ("lr", 10**400, "expected a finite number"),
        ("epochs", 3.0, "3.0, expected a whole number"),
        ("epochs", True, "True, expected a whole number"),
        ("warm", 1, "1, expected true or false"),
        ("title", 1, "1, expected a text"),
        ("rule", "each", "'each', expected one of 'total', 'per_class'"),
        ("layers", 3, "3, expected a list, each a whole number"),
        ("layers", [1, 2.5], "[1, 2.5], expected a list, each a whole number"),
        ("layers", [True], "[True], expected a list, each a whole number"),
        ("order", "random", "'random', expected a whole number or 'natural'"),
        ("order", True, "True, expected a whole number or 'natural'"),
        ("decay", "none", "'none', expected a finite number or nothing"),
        ("fixed", False, "False, expected True"),
        ("fixed", 1, "1, expected True"),
    ],
)
def test_a_wrong_type_names_field_value_and_what_was_expected(
    name: str, value: object, expected: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(expected)) as error:
        build(Example, {"lr": 1.0, name: value}, "here")
    assert str(error.value).startswith(f"here: {name} is ")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("lr", "1e-3", 1e-3),
        ("lr", "3", 3.0),
        ("epochs", "12", 12),
        ("warm", "true", True),
        ("title", "12", "12"),
        ("title", "a b", "a b"),
        ("rule", "per_class", "per_class"),
        ("layers", "2,3,4", (2, 3, 4)),
        ("layers", "[2, 3]", (2, 3)),
        ("layers", "2", (2,)),
        ("layers", "", ()),
        ("order", "7", 7),
        ("order", "natural", "natural"),
        ("decay", "null", None),
        ("decay", "0.5", 0.5),
    ],
)
def test_texts_of_the_command_line(name: str, text: str, value: object) -> None:
    parsed = parse(Example, name, text, "--set")
    assert parsed == value
    assert type(parsed) is type(value)
    build(Example, {"lr": 1.0, name: parsed}, "--set")


@pytest.mark.parametrize(
    ("name", "text"), [("lr", "fast"), ("lr", "NaN"), ("epochs", "1e3"), ("warm", "yes")]
)
def test_a_text_that_does_not_fit_is_refused_when_built(name: str, text: str) -> None:
    assert parse(Example, name, text, "--set") == text
    with pytest.raises(ConfigurationError, match=f"--set: {name} is '{text}'"):
        build(Example, {"lr": 1.0, name: text}, "--set")


def test_an_unknown_name_on_the_command_line() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'layers'"):
        parse(Example, "layer", "3", "--set")
