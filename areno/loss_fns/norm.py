"""Normalization of rewards or advantages over a batch or over groups.

Each entry has a group id, so groups may differ in size. The computation is in float64. Centering two or more equal
numbers gives exactly 0, because the code first subtracts their minimum, and then the mean of the differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Level = Literal["batch", "group"]


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalization y = (x - mu) / (sigma + eps) of the entries that the mask selects.

    mu is the mean over the batch or the group, or 0. With ``mean_leave1out``, this mean excludes the entry itself (leave
    one out). sigma is the root mean square of x - mu.

    Attributes:
        std_level: compute sigma over the ``batch`` or the ``group``. None disables the division.

    Raises:
        ValueError: a level is unknown, eps is negative, or ``mean_leave1out`` is set although ``mean_level`` is None.
    """

    mean_level: Level | None = "batch"  # compute mu over the ``batch`` or the ``group``; None: mu = 0
    mean_leave1out: bool = False  # whether mu excludes the entry itself: (sum - x) / (n - 1), and 0 for a single entry
    std_level: Level | None = "batch"
    std_unbiased: bool = True  # whether sigma divides by n - 1 instead of n; sigma is then 1 for a single entry
    eps: float = 1e-5  # added to sigma; must not be negative

    def __post_init__(self) -> None:
        for name, level in (("mean_level", self.mean_level), ("std_level", self.std_level)):
            if level not in ("batch", "group", None):
                raise ValueError(f"{name} must be batch, group or null, got {level!r}")
        if self.mean_leave1out and self.mean_level is None:
            raise ValueError("mean_leave1out has no effect without a mean; set mean_level to batch or group")
        if not self.eps >= 0:
            raise ValueError(f"eps of a norm must not be negative, got {self.eps}")

    def __call__(
        self,
        values: Sequence[float] | Tensor,
        groups: Sequence[int] | Tensor,
        mask: Sequence[bool] | Tensor | None = None,
    ) -> Tensor:
        """Normalize values over the batch or over groups.

        Args:
            values: one number per entry [N].
            groups: group id of each entry [N], any integers.
            mask: True for the entries to normalize [N]; None means all entries.

        Returns:
            Normalized values, float64 [N], with 0 for each entry outside the mask. However, if the mask excludes all
            entries, the values are returned unchanged.

        Raises:
            ValueError: lengths differ, or an entry to normalize is not finite.
        """
        x = torch.as_tensor(values, dtype=torch.float64)
        ids = torch.as_tensor(groups, dtype=torch.long, device=x.device)
        keep = torch.ones_like(x, dtype=torch.bool) if mask is None else torch.as_tensor(mask, device=x.device).bool()
        if x.ndim != 1 or not x.shape == ids.shape == keep.shape:
            raise ValueError(
                "the values, groups and mask of a norm must be one-dimensional and equally long, got the shapes "
                f"{tuple(x.shape)}, {tuple(ids.shape)} and {tuple(keep.shape)}"
            )
        if not keep.any():
            return x
        if not torch.isfinite(x[keep]).all():
            raise ValueError(
                "normalization needs finite numbers, but not all numbers are finite; check the model or function that computes "
                "the rewards or advantages"
            )
        return torch.zeros_like(x).masked_scatter(
            keep, self._normalize(x[keep], torch.unique(ids[keep], return_inverse=True)[1])
        )

    def _normalize(self, x: Tensor, groups: Tensor) -> Tensor:
        one_group = torch.zeros_like(groups)
        centered = x
        if self.mean_level is not None:
            centered = self._centered(x, groups if self.mean_level == "group" else one_group)
        if self.std_level is None:
            return centered
        ids = groups if self.std_level == "group" else one_group
        counts, squares = _sums(torch.ones_like(x), ids), _sums(centered.square(), ids)
        if self.std_unbiased:
            sigma = torch.where(counts > 1, (squares / (counts - 1).clamp(min=1)).sqrt(), 1.0)
        else:
            sigma = (squares / counts).sqrt()
        divisor = sigma + self.eps
        return torch.where(divisor > 0, centered / divisor, 0.0)

    def _centered(self, x: Tensor, groups: Tensor) -> Tensor:
        counts = _sums(torch.ones_like(x), groups)
        minimum = torch.full_like(x, torch.inf).scatter_reduce(0, groups, x, "amin")[groups]
        above = x - minimum
        total = _sums(above, groups)
        if not self.mean_leave1out:
            return above - total / counts
        return torch.where(counts > 1, above - (total - above) / (counts - 1).clamp(min=1), x)


def _sums(values: Tensor, groups: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add(0, groups, values)[groups]
