"""State on disk: whole, checked, each tensor once; and what is left of an interrupted stage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from arc_cl.engine.checkpoints import (
    Place,
    drop_unfinished,
    finished_stages,
    load_stage,
    load_unfinished,
    read_meta,
    save_stage,
    save_unfinished,
)
from arc_cl.errors import RecordError


class Bag(nn.Module):
    """State of any kind and no parameters."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def emptied(self) -> Bag:
        return Bag(**{name: torch.zeros_like(one) for name, one in self.named_buffers()})


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    """Names, types, shapes and bits."""
    ours, theirs = found.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (one.dtype, one.shape), name
        assert bits(ours[name]) == bits(one), name


# --- stages ----------------------------------------------------------------------------------

STAGES = (
    Bag(still=torch.ones(3), moves=torch.zeros(2), late=torch.zeros(1)),
    Bag(still=torch.ones(3), moves=torch.ones(2), late=torch.zeros(1)),
    Bag(still=torch.ones(3), moves=torch.zeros(2), late=torch.ones(1)),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for stage, module in enumerate(STAGES):
        save_stage(tmp_path, stage, module, seed=7)
    return tmp_path


def stored(run: Path, stage: int) -> Path:
    return run / "stages" / f"{stage:02d}" / "model.safetensors"


def meta_of(run: Path, stage: int) -> Path:
    return run / "stages" / f"{stage:02d}" / "meta.json"


def test_tensors_of_every_kind_come_back_bit_by_bit(tmp_path: Path) -> None:
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    kinds = (*floats, torch.int32, torch.int64, torch.uint8, torch.bool)
    module = Bag(
        **{f"matrix_{str(kind)[6:]}": torch.arange(6).view(2, 3).to(kind) for kind in kinds},
        **{f"number_{str(kind)[6:]}": torch.tensor(1).to(kind) for kind in kinds},
        **{f"empty_{str(kind)[6:]}": torch.empty(0, 3, dtype=kind) for kind in kinds},
        odd=torch.tensor([torch.nan, torch.inf, -0.0, 1e-45]),
        turned=torch.arange(6.0).view(2, 3).T,
        part=torch.arange(9)[::2],
    )
    save_stage(tmp_path, 0, module, seed=0)
    found = module.emptied()
    load_stage(tmp_path, 0, found)
    assert_same(found, module)


def test_a_tensor_is_stored_only_where_it_changed(run: Path) -> None:
    held = [set(load_file(stored(run, stage))) for stage in range(3)]
    assert held == [{"still", "moves", "late"}, {"moves"}, {"moves", "late"}]
    assert {name: at for name, (at, _) in read_meta(run, 2).tensors.items()} == {
        "still": 0,
        "moves": 2,
        "late": 2,
    }


def test_every_stage_loads_whatever_file_holds_its_tensors(run: Path) -> None:
    for stage in (2, 0, 1):
        found = STAGES[0].emptied()
        meta = load_stage(run, stage, found)
        assert_same(found, STAGES[stage])
        assert (meta.stage, meta.seed) == (stage, 7)


def test_the_same_bytes_in_another_shape_or_type_are_another_tensor(tmp_path: Path) -> None:
    modules = (
        Bag(one=torch.zeros(4), other=torch.zeros(2)),
        Bag(one=torch.zeros(2, 2), other=torch.zeros(2, dtype=torch.int32)),
    )
    for stage, module in enumerate(modules):
        save_stage(tmp_path, stage, module, seed=0)
    found = modules[1].emptied()
    load_stage(tmp_path, 1, found)
    assert_same(found, modules[1])
    assert set(load_file(stored(tmp_path, 1))) == {"one", "other"}


def test_a_stage_has_one_checksum_which_tells_states_apart(run: Path, tmp_path: Path) -> None:
    sums = [read_meta(run, stage).sha256 for stage in range(3)]
    assert len(set(sums)) == 3
    again = tmp_path / "again"
    assert [save_stage(again, s, one, seed=7).sha256 for s, one in enumerate(STAGES)] == sums


def test_a_changed_tensor_in_a_shared_file_is_found_by_every_stage_that_uses_it(
    run: Path,
) -> None:
    save_stage(run, 3, Bag(still=torch.zeros(3), moves=torch.ones(2)), seed=7)
    file = stored(run, 0)
    save_file({**load_file(file), "still": torch.tensor([1.0, 1.0, 2.0])}, file)
    for stage in range(3):
        with pytest.raises(RecordError, match="checksum of still in stage 0 does not fit"):
            load_stage(run, stage, STAGES[0].emptied())
    load_stage(run, 3, Bag(still=torch.ones(3), moves=torch.ones(2)))


def drop_the_tensors(file: Path) -> None:
    save_file({}, file)


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        drop_the_tensors,
    ],
)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_damaged_file_of_tensors_is_refused(
    run: Path, stage: int, damage: Callable[[Path], object]
) -> None:
    damage(stored(run, stage))
    with pytest.raises(RecordError, match=r"stages/01 cannot be used: .*; train this run again"):
        load_stage(run, 1, STAGES[0].emptied())


def test_a_network_of_another_form_is_refused(run: Path) -> None:
    for module in (Bag(still=torch.ones(4)), Bag(other=torch.ones(3))):
        with pytest.raises(RecordError, match="cannot be used"):
            load_stage(run, 0, module)


@pytest.mark.parametrize(
    "content",
    [None, "", "{", "[]", "3", "{}", '{"schema": 2}', '{"schema": 2, "tensors": []}'],
)
def test_damaged_meta_data_are_refused(run: Path, content: str | None) -> None:
    meta_of(run, 1).unlink()
    if content is not None:
        meta_of(run, 1).write_text(content)
    with pytest.raises(RecordError, match=r"01/meta\.json cannot be used: .*; train this run"):
        read_meta(run, 1)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("schema", 3, "its schema is 3, not 2"),
        ("schema", 1, "its schema is 1, not 2"),
        ("stage", 2, "it is of stage 2"),
        ("tensors", {"still": [0]}, "not enough values"),
        ("more", 1, "more"),
    ],
)
def test_meta_data_of_another_version_or_stage_are_refused(
    run: Path, name: str, value: object, said: str
) -> None:
    change(meta_of(run, 1), name, value)
    with pytest.raises(RecordError, match=said):
        load_stage(run, 1, STAGES[0].emptied())


def change(meta: Path, name: str, value: object) -> None:
    meta.write_text(json.dumps({**json.loads(meta.read_text()), name: value}))


def test_stages_are_counted_from_the_first_and_only_whole_ones(run: Path) -> None:
    assert finished_stages(run) == 3
    (run / "stages" / "02").rename(run / "stages" / ".02-killed")
    assert finished_stages(run) == 2
    (run / "stages" / "00").rename(run / "stages" / "05")
    assert finished_stages(run) == 0
    assert finished_stages(run / "nowhere") == 0


def test_saving_a_stage_again_replaces_it(run: Path) -> None:
    save_stage(run, 2, STAGES[1], seed=8)
    found = STAGES[0].emptied()
    assert load_stage(run, 2, found).seed == 8
    assert_same(found, STAGES[1])
    assert sorted(path.name for path in (run / "stages").iterdir()) == ["00", "01", "02"]


def test_a_failed_save_leaves_what_was_there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("arc_cl.engine.checkpoints.save_file", full)
    with pytest.raises(OSError, match="no space"):
        save_stage(run, 2, STAGES[1], seed=8)
    found = STAGES[0].emptied()
    load_stage(run, 2, found)
    assert_same(found, STAGES[2])
    assert len(list((run / "stages").iterdir())) == 3


def test_a_stage_needs_the_one_before(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="00"):
        save_stage(tmp_path, 1, STAGES[1], seed=0)


# --- within a stage --------------------------------------------------------------------------

MakesOptimizer = Callable[[nn.Module], Optimizer]


def sgd(module: nn.Module) -> Optimizer:
    return SGD(groups(module), lr=0.1, momentum=0.9)


def plain_sgd(module: nn.Module) -> Optimizer:
    return SGD(groups(module), lr=0.1)


def adam(module: nn.Module) -> Optimizer:
    return Adam(groups(module), lr=0.1)


def groups(module: nn.Module) -> list[dict[str, object]]:
    first, *others = module.parameters()
    return [{"params": [first], "weight_decay": 0.01}, {"params": others, "lr": 0.2}]


def network() -> nn.Module:
    """Its second layer is frozen: no optimiser remembers anything of it."""
    layers = [nn.Linear(3, 4, dtype=torch.float32), nn.Linear(4, 2), nn.Linear(2, 2)]
    module = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    module[1].requires_grad_(False)
    return module


def steps(module: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        images = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        torch.autograd.backward(module(images).square().mean())
        optimizer.step()


def keep(run: Path, *place: int, make: MakesOptimizer = sgd) -> tuple[nn.Module, Optimizer]:
    """The state after as many steps as the last number of the place says."""
    module = network()
    optimizer = make(module)
    steps(module, optimizer, 0, place[2])
    numbers = {"loss": torch.tensor(place[2] / 3)}
    save_unfinished(run, Place(*place), module, optimizer, numbers)
    return module, optimizer


def found_in(run: Path, stage: int = 1) -> tuple[Place, dict[str, Tensor]] | None:
    module = network()
    return load_unfinished(run, stage, module, sgd(module))


@pytest.mark.parametrize("make", [sgd, plain_sgd, adam])
def test_a_step_after_loading_is_the_step_without(tmp_path: Path, make: MakesOptimizer) -> None:
    whole, optimizer = keep(tmp_path, 1, 0, 4, make=make)
    steps(whole, optimizer, 4, 7)
    resumed = network()
    fresh = make(resumed)
    assert load_unfinished(tmp_path, 1, resumed, fresh) is not None
    steps(resumed, fresh, 4, 7)
    assert_same(resumed, whole)
    for parameter, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        for name, one in optimizer.state[other].items():
            same = fresh.state[parameter][name]
            assert bits(same) == bits(one) if isinstance(one, Tensor) else same == one


def test_the_rates_are_those_of_the_new_optimizer(tmp_path: Path) -> None:
    keep(tmp_path, 1, 0, 4)
    module = network()
    other = SGD(groups(module), lr=0.5, momentum=0.9)
    load_unfinished(tmp_path, 1, module, other)
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.2]


def test_place_and_sums_come_back(tmp_path: Path) -> None:
    keep(tmp_path, 1, 2, 4)
    found = found_in(tmp_path)
    assert found is not None
    assert found[0] == Place(1, 2, 4)
    assert {name: value.item() for name, value in found[1].items()} == {
        "loss": torch.tensor(4 / 3).item()
    }


def test_a_state_without_sums_or_memory_comes_back(tmp_path: Path) -> None:
    module = network()
    save_unfinished(tmp_path, Place(1, 0, 0), module, sgd(module), {})
    found = found_in(tmp_path)
    assert found is not None
    assert found[1] == {}


def test_a_stage_without_a_state_begins_anew(tmp_path: Path) -> None:
    assert found_in(tmp_path) is None
    keep(tmp_path, 1, 0, 1)
    assert found_in(tmp_path, 0) is None
    assert found_in(tmp_path, 10) is None
    drop_unfinished(tmp_path)
    drop_unfinished(tmp_path)
    assert found_in(tmp_path) is None


def test_older_states_are_dropped(tmp_path: Path) -> None:
    for place in ((0, 1, 2), (1, 0, 1), (1, 0, 2)):
        keep(tmp_path, *place)
    assert [path.name for path in (tmp_path / "unfinished").iterdir()] == ["01-000-00002"]


@pytest.mark.parametrize(
    ("older", "newer"), [((1, 0, 9), (1, 0, 10)), ((1, 1, 9), (1, 2, 1)), ((1, 9, 5), (1, 10, 1))]
)
def test_the_newest_of_several_is_used(
    tmp_path: Path, older: tuple[int, int, int], newer: tuple[int, int, int]
) -> None:
    """A kill may come between writing a state and dropping the older one."""
    both(tmp_path, older, newer)
    found = found_in(tmp_path)
    assert found is not None
    assert found[0] == Place(*newer)


def both(run: Path, older: tuple[int, int, int], newer: tuple[int, int, int]) -> Path:
    """Two states; the folder of the newer one."""
    keep(run, *older)
    aside = shutil.copytree(run / "unfinished", run / "aside")
    keep(run, *newer)
    folder = next((run / "unfinished").iterdir())
    for one in aside.iterdir():
        one.rename(run / "unfinished" / one.name)
    assert len(list((run / "unfinished").iterdir())) == 2
    return folder


def test_half_a_state_of_a_killed_process_is_not_looked_at(tmp_path: Path) -> None:
    keep(tmp_path, 1, 0, 3)
    half = tmp_path / "unfinished" / ".01-000-00004-x"
    half.mkdir()
    (half / "meta.json").write_text("{")
    found = found_in(tmp_path)
    assert found is not None
    assert found[0] == Place(1, 0, 3)
    keep(tmp_path, 1, 0, 4)
    assert not half.exists()


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "optimizer.safetensors", "numbers.safetensors", "meta.json"],
)
@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-3]),
        lambda file: file.write_bytes(b"[]"),
    ],
)
def test_a_damaged_state_is_refused_with_the_remedy(
    tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    folder = both(tmp_path, (1, 0, 3), (1, 0, 4))
    damage(folder / name)
    with pytest.raises(RecordError, match=r"01-000-00004 cannot be used: .*; delete that folder"):
        found_in(tmp_path)
    shutil.rmtree(folder)
    found = found_in(tmp_path)
    assert found is not None
    assert found[0].step == 3


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    keep(tmp_path, 1, 0, 3)
    (file,) = tmp_path.glob("unfinished/*/model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RecordError, match="checksums do not fit"):
        found_in(tmp_path)


def test_a_state_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    keep(tmp_path, 1, 0, 3)
    (meta,) = tmp_path.glob("unfinished/*/meta.json")
    change(meta, "schema", 3)
    with pytest.raises(RecordError, match="schema"):
        found_in(tmp_path)


def test_a_state_of_another_network_or_optimizer_is_refused(tmp_path: Path) -> None:
    keep(tmp_path, 1, 0, 3)
    other = nn.Linear(3, 3)
    with pytest.raises(RecordError, match="cannot be used"):
        load_unfinished(tmp_path, 1, other, SGD(other.parameters(), lr=0.1))
