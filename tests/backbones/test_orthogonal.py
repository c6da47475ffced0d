"""Orthogonal rows, and the penalty on those that are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from arc_cl.backbones.orthogonal import GramSchmidt, orthogonal_rows, penalty

both = pytest.mark.parametrize("rule", ["exact", "independent"])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


@both
def test_rows_are_orthonormal_and_orthogonal_to_orthogonal_ones(rule: GramSchmidt) -> None:
    old = orthogonal_rows(torch.empty(0, 12), 3, seeded(), rule)
    new = orthogonal_rows(old, 4, seeded(1), rule)
    rows = torch.cat((old, new))
    assert largest(rows @ rows.T - torch.eye(7, dtype=torch.float64)) < 1e-12


def test_trained_rows_are_no_obstacle_but_to_the_released_rule() -> None:
    trained = normal(5, 12)
    exact = orthogonal_rows(trained, 4, seeded(1))
    assert largest(exact @ trained.T) < 1e-12
    assert largest(exact @ exact.T - torch.eye(4, dtype=torch.float64)) < 1e-12
    released = orthogonal_rows(trained, 4, seeded(1), "independent")
    assert largest(released @ trained.T) > 0.05
    torch.testing.assert_close(released.norm(dim=1), torch.ones(4, dtype=torch.float64))


def test_the_rules_agree_where_the_old_rows_are_orthogonal() -> None:
    old = 3 * orthogonal_rows(torch.empty(0, 12), 3, seeded())
    exact = orthogonal_rows(old, 4, seeded(1))
    torch.testing.assert_close(exact, orthogonal_rows(old, 4, seeded(1), "independent"))


def test_more_rows_than_columns_make_several_sets() -> None:
    old = orthogonal_rows(torch.empty(0, 4), 3, seeded())
    rows = torch.cat((old, orthogonal_rows(old, 6, seeded(1))))
    assert rows.isfinite().all()
    for part in (rows[:4], rows[4:8]):
        assert largest(part @ part.T - torch.eye(4, dtype=torch.float64)) < 1e-12
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(9, dtype=torch.float64))


def test_rows_depend_on_their_generator_alone() -> None:
    before = torch.get_rng_state()
    one, other = (orthogonal_rows(torch.empty(0, 6), 2, seeded(1)) for _ in range(2))
    assert torch.equal(one, other)
    assert not torch.equal(one, orthogonal_rows(torch.empty(0, 6), 2, seeded(2)))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_penalty_is_zero_for_orthonormal_rows_only() -> None:
    rows = orthogonal_rows(torch.empty(0, 12), 5, seeded())
    used = torch.ones(5, dtype=torch.float64)
    assert penalty(rows[None], used).item() < 1e-20
    loose = normal(2, 5, 12)
    expected = sum(
        ((each @ each.T - torch.eye(5, dtype=torch.float64)) ** 2).mean() for each in loose
    )
    assert penalty(loose, used).item() == pytest.approx(float(expected))
    wider = torch.cat((loose, torch.zeros(2, 3, 12)), dim=1)
    wider_used = torch.cat((used, torch.zeros(3)))
    assert penalty(wider, wider_used).item() == pytest.approx(float(expected))


def test_the_penalty_stays_on_the_device_of_its_rows() -> None:
    rows, used = torch.empty(2, 5, 12, device="meta"), torch.empty(5, device="meta")
    assert penalty(rows, used).device.type == "meta"
