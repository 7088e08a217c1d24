"""AdamW with bf16 moments, which take half the memory of fp32 moments. Weights or masters are in fp32.

Each step computes in fp32. The first moment is rounded to the nearest bf16 number. The second moment is rounded up or down at
random. If beta2 is near 1, a step changes the second moment by less than the spacing of bf16 numbers. With rounding to
nearest, the second moment would never shrink. The weights or masters are not rounded to bf16, because an update of a
thousandth of a weight would be lost.
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
    """AdamW with bf16 moments. Its state has the same keys as :class:`torch.optim.AdamW`."""

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
    """Round fp32 values to bf16 numbers, up or down at random.

    The probability of rounding up is the fraction that rounding down would drop.

    The random bits are a hash of the value and the step, so that every layout and a resumed run round alike.
    """
    bits = values.view(torch.int32)
    noise = (bits ^ (step * _HASH[2] % 2**31)) * _HASH[0]
    noise = (noise ^ (noise >> 15)) * _HASH[1]
    noise = (noise >> 13) & 0xFFFF
    return ((bits + noise) & ~0xFFFF).view(torch.float32)
