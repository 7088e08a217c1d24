"""AdamW with bf16 moments, which take half the memory of fp32 moments.

The updated tensors, which are the model's weights or its master weights, remain in fp32.

Each step computes in fp32, and rounds the new moments. The first moment is rounded to the nearest bf16 number. The
second moment is rounded up or down at random. If beta2 is near 1, a step decreases the second moment by less than
half of the spacing of bf16 numbers. Rounding to the nearest number would undo each decrease. Weights and master
weights are not rounded to bf16, because rounding would undo an update that changes a weight by a
thousandth of its value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from areno.engine.train.adam_8bit import LowPrecisionAdam, move

_CHUNK = 1 << 20  # numbers converted to fp32 at a time
WORKING_BYTES = 28 * _CHUNK
_HASH = (0x1B873593, 0x4CF5AD43, 0x3C6EF372)  # odd or arbitrary constants below 2^31


class AdamBf16(LowPrecisionAdam):
    """AdamW with bf16 moments. The optimizer state has the same keys as the state of :class:`torch.optim.AdamW`."""

    def moments_of(self, parameter: nn.Parameter, quantised: bool | None = None) -> dict[str, Any]:
        """See :meth:`LowPrecisionAdam.moments_of`."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            zeros = (torch.zeros_like(parameter, dtype=torch.bfloat16) for _ in range(2))
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = zeros
        return state

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] += 1
        flat = (parameter.view(-1), gradient.reshape(-1), state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1))
        for w, g, mean, square in zip(*(values.split(_CHUNK) for values in flat), strict=True):
            m, v = mean.float(), square.float()
            move(w, g, m, v, group, int(state["step"]))
            mean.copy_(m)
            square.copy_(_rounded(v, int(state["step"])))


def _rounded(values: Tensor, step: int) -> Tensor:
    """Round fp32 values up or down to bf16 numbers at random, and return the result as fp32.

    The probability of rounding up is the distance to the bf16 number below the value, divided by the spacing of bf16
    numbers. The random bits are a hash of the value and the step. The rounding of a value in a step therefore depends
    neither on the parallel layout nor on whether the run was resumed.
    """
    bits = values.view(torch.int32)
    noise = (bits ^ (step * _HASH[2] % 2**31)) * _HASH[0]
    noise = (noise ^ (noise >> 15)) * _HASH[1]
    noise = (noise >> 13) & 0xFFFF
    return ((bits + noise) & ~0xFFFF).view(torch.float32)
