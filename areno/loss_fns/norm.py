"""Normalising rewards or advantages over a batch or over groups.

A group is named by an id on each entry, never by its place in the batch: a prompt that lost an answer is still one group.
All is computed in float64, about the least value of each group, so that equal numbers give exactly zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Level = Literal["batch", "group"]


@dataclass(frozen=True, slots=True)
class Norm:
    """y = (x - mu) / (sigma + eps) over the entries that count.

    Attributes:
        std_level: sigma is that of the ``batch`` or of the ``group``; None does not divide, and adds no eps.

    sigma is the root mean square of x - mu, whatever mu is: about the means of the groups, or without an own value, or about
    0 where no mean is taken off.

    Raises:
        ValueError: a level is unknown, eps is negative, or leave-one-out has no mean to leave one out of.
    """

    mean_level: Level | None = "batch"  # mu is that of the ``batch``, of the entry's ``group``, or 0 (None)
    mean_leave1out: bool = False  # mu leaves the entry itself out, (S - x) / (n - 1); 0 for an entry alone
    std_level: Level | None = "batch"
    std_unbiased: bool = True  # sigma divides by n - 1 instead of n, and is 1 for an entry alone
    eps: float = 1e-5  # added to sigma, not negative

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
        """Normalise numbers.

        Args:
            values: one finite number per entry [N].
            groups: the group of each [N], any integers.
            mask: True for the entries that count [N]; None counts all.

        Returns:
            float64 [N], 0 where an entry does not count; the values as they are where none does.

        Raises:
            ValueError: lengths differ, or a number that counts is not finite.
        """
        x = torch.as_tensor(values, dtype=torch.float64)
        ids = torch.as_tensor(groups, dtype=torch.long, device=x.device)
        keep = torch.ones_like(x, dtype=torch.bool) if mask is None else torch.as_tensor(mask, device=x.device).bool()
        if x.ndim != 1 or not x.shape == ids.shape == keep.shape:
            raise ValueError(
                f"a norm needs one group and one mask entry per value, got shapes {tuple(x.shape)}, {tuple(ids.shape)} "
                f"and {tuple(keep.shape)}"
            )
        if not keep.any():
            return x
        kept = x[keep]
        if not torch.isfinite(kept).all():
            raise ValueError("a norm needs finite numbers; what made the rewards or advantages has diverged")
        return torch.zeros_like(x).masked_scatter(
            keep, self._normalise(kept, torch.unique(ids[keep], return_inverse=True)[1])
        )

    def _normalise(self, x: Tensor, groups: Tensor) -> Tensor:
        everyone = torch.zeros_like(groups)
        centred = x
        if self.mean_level is not None:
            centred = self._centred(x, groups if self.mean_level == "group" else everyone)
        if self.std_level is None:
            return centred
        of = groups if self.std_level == "group" else everyone
        counts, squares = _sums(torch.ones_like(x), of), _sums(centred.square(), of)
        if self.std_unbiased:
            sigma = torch.where(counts > 1, (squares / (counts - 1).clamp(min=1)).sqrt(), 1.0)
        else:
            sigma = (squares / counts).sqrt()
        divisor = sigma + self.eps
        return torch.where(divisor > 0, centred / divisor, 0.0)

    def _centred(self, x: Tensor, groups: Tensor) -> Tensor:
        """x - mu, from the distances to the least value of each group."""
        counts = _sums(torch.ones_like(x), groups)
        least = torch.full_like(x, torch.inf).scatter_reduce(0, groups, x, "amin")[groups]
        above = x - least
        total = _sums(above, groups)
        if not self.mean_leave1out:
            return above - total / counts
        return torch.where(counts > 1, above - (total - above) / (counts - 1).clamp(min=1), x)


def _sums(values: Tensor, groups: Tensor) -> Tensor:
    """Sum over each entry's group, at each entry [N]."""
    return torch.zeros_like(values).index_add(0, groups, values)[groups]
