"""What the fast forms of `replay` read."""

from __future__ import annotations

from torch import Tensor


class Stream:
    """A stream of features."""

    def __init__(
        self, features_ND: Tensor, norm_N: Tensor, finite_N: Tensor, batch_size: int
    ) -> None:
        self.features_ND = features_ND.contiguous()  # entries that were not finite are 0
        self.norm_N = norm_N  # ‖f‖ of each row
        self.finite_N = finite_N  # bool, the row had only finite entries
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.features_ND)
