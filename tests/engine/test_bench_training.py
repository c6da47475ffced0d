"""Speeds of training: their ratios are those of the figures, and a target is only set with cause.

Nothing here says how fast anything is.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from arc_cl.engine.bench import Figure, recorded, threads
from arc_cl.engine.bench_training import Bench, measure_training, speeds_of
from arc_cl.engine.runtime import Runtime
from arc_cl.errors import ConfigurationError, RecordError
from arc_cl.experiments.recipes import recipe
from arc_cl.experiments.spec import Value

BACKBONE = "test_vit"
"""Of timm: six narrow blocks, for images of any size."""
RELEASED = {"finetune": 2.0, "l2p": 1e9}
SETTINGS: dict[str, dict[str, Value]] = {
    name: {**recipe(name, "cifar100").settings, "batch_size": 1} for name in ("finetune", "l2p")
}
AT = f"batch 1, {BACKBONE}, fp32"
PLAIN = f"plain forward + backward, {AT}"


@pytest.fixture(scope="module")
def measured() -> list[Figure]:
    bench = Bench(BACKBONE, Runtime.open(0, "cpu"), steps=1)
    with threads(1):
        return list(measure_training(bench, SETTINGS, RELEASED))


@pytest.fixture(scope="module")
def by_name(measured: list[Figure]) -> dict[str, Figure]:
    assert len({figure.name for figure in measured}) == len(measured)
    return {figure.name: figure for figure in measured}


def test_every_figure_is_there_once(by_name: dict[str, Figure]) -> None:
    assert list(by_name) == [
        "finetune, released code",
        "l2p, released code",
        f"finetune, {AT}",
        PLAIN,
        f"finetune, {AT}: of plain forward + backward",
        f"finetune, {AT}: over the released code",
        f"l2p, {AT}",
        f"l2p, {AT}: of plain forward + backward",
        f"l2p, {AT}: of its bound",
        f"l2p, {AT}: over the released code",
    ]
    assert all(0 < figure.value < float("inf") for figure in by_name.values())


@pytest.mark.parametrize("name", ["finetune", "l2p"])
def test_ratios_are_those_of_the_speeds(name: str, by_name: dict[str, Figure]) -> None:
    """One plain speed serves all learners of a batch size."""
    speed = by_name[f"{name}, {AT}"].value
    of_plain = by_name[f"{name}, {AT}: of plain forward + backward"]
    over = by_name[f"{name}, {AT}: over the released code"]
    assert of_plain.value == pytest.approx(speed / by_name[PLAIN].value)
    assert over.value == pytest.approx(speed / RELEASED[name])


def test_what_is_asked_of_whom(by_name: dict[str, Figure]) -> None:
    asked = {name: figure.target for name, figure in by_name.items() if figure.target is not None}
    assert asked == {
        f"finetune, {AT}: over the released code": 8.0,
        f"l2p, {AT}: over the released code": 8.0,
        f"l2p, {AT}: of its bound": 0.8,
    }
    assert by_name[f"l2p, {AT}: over the released code"].holds is False


def test_a_record_holds_every_figure(measured: list[Figure]) -> None:
    record = recorded(measured, torch.device("cpu"), "x")
    rows = json.loads(json.dumps(record))["figures"]
    assert [(row["name"], row["value"], row["holds"]) for row in rows] == [
        (figure.name, figure.value, figure.holds) for figure in measured
    ]
    assert record["provenance"]["command"] == "x"


def test_wrong_settings_and_names_are_errors_of_ours() -> None:
    bench = Bench(BACKBONE, Runtime.open(0, "cpu"), steps=1)
    with pytest.raises(ConfigurationError, match="the recipe for finetune lacks lr"):
        list(measure_training(bench, {"finetune": {}}, {}))
    with pytest.raises(ConfigurationError, match="no learner"):
        list(measure_training(bench, {"finetun": {}}, {}))


# --- speeds of the released code -------------------------------------------------------------


def test_speeds_of_the_released_code_are_read_where_there_are_any(tmp_path: Path) -> None:
    assert speeds_of(None) == {}
    path = tmp_path / "speeds.json"
    path.write_text(json.dumps({"images/s": RELEASED, "more": 1}))
    assert speeds_of(path) == RELEASED


@pytest.mark.parametrize("content", [None, b"", b"{", b"{}", b'{"speeds": {}}', b"\xff"])
def test_unreadable_speeds_name_their_file_and_its_maker(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "speeds.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordError, match=r"speeds\.json: .*benchmarks/released\.py"):
        speeds_of(path)
