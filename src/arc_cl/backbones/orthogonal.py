"""Orthogonal components for CODA-Prompt: their start, and the penalty that keeps them apart.

    start     Gram-Schmidt of random rows against the rows before them
    penalty   mean((M Mᵀ − I)²)

*Deviations* from the released code: the start is orthogonal to rows that were trained meanwhile
too. Released (`independent`), the projections onto the old rows are subtracted one by one as if
those were orthogonal to each other, which after training they are not. The penalty stays on the
device of its rows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

GramSchmidt = Literal["exact", "independent"]

_TINY = 1e-24
"""Below this, a squared norm is taken for zero."""


def orthogonal_rows(
    old_MD: Tensor, count: int, generator: torch.Generator, rule: GramSchmidt = "exact"
) -> Tensor:
    """`count` rows of length 1, orthogonal to the old rows and to each other; float64, on the CPU.

    There are at most D such rows: with `exact`, each further D make a set of their own.
    """
    rows_MD = old_MD.detach().to("cpu", torch.float64)
    width, total = rows_MD.shape[1], len(rows_MD) + count
    while len(rows_MD) < total:
        place = len(rows_MD) % width
        size = min(total - len(rows_MD), width - place)
        drawn_CD = torch.randn(size, width, dtype=torch.float64, generator=generator)
        if rule == "exact":
            new_CD = _complete(rows_MD[len(rows_MD) - place :], drawn_CD)
        else:
            new_CD = _subtract(rows_MD, drawn_CD)
        rows_MD = torch.cat((rows_MD, new_CD))
    return rows_MD[len(old_MD) :]


def penalty(rows_SMD: Tensor, used_M: Tensor) -> Tensor:
    """Σ over S layers of the mean squared difference between a layer's Gram matrix and identity.

    `used_M` is 1 for rows that count; the others (0) must be zero.
    """
    gram_SMM = rows_SMD @ rows_SMD.mT
    errors: Tensor = (gram_SMM - used_M.diag()).square().sum()
    return errors / used_M.sum().square()


def _complete(old_MD: Tensor, drawn_CD: Tensor) -> Tensor:
    """Gram-Schmidt by a QR decomposition, whose signs are turned to where the rows pointed."""
    q_DM, r_MM = torch.linalg.qr(torch.cat((old_MD, drawn_CD)).T)
    signs_M = torch.where(r_MM.diagonal() < 0, -1.0, 1.0)
    complete_MD: Tensor = (q_DM * signs_M).T
    return complete_MD[len(old_MD) :]


def _subtract(old_MD: Tensor, drawn_CD: Tensor) -> Tensor:
    """Each row minus its projection onto each row before it, as if those were orthogonal."""
    rows_MD = old_MD
    for row_D in drawn_CD:
        shares_M = rows_MD @ row_D / rows_MD.square().sum(dim=1).clamp_min(_TINY)
        rows_MD = torch.cat((rows_MD, (row_D - shares_M @ rows_MD)[None]))
    return normalize(rows_MD[len(old_MD) :], dim=1)
