"""Sampling kernel for decode steps on a CPU, for rows that need only temperature sampling or greedy decoding.

For 64 rows of 32,000 logits on two cores, code compiled by PyTorch takes 1.3 ms. This kernel takes a quarter of that time.
"""

import torch
from torch import Tensor

from areno.engine.kernels.library import KernelLibrary

KERNEL = KernelLibrary(
    "plain_draw",
    "plain_draw(Tensor logits, Tensor temperatures, Tensor greedy, Tensor u, int size) -> (Tensor, Tensor)",
)


@torch.library.register_fake("areno::plain_draw", lib=KERNEL.declared)
def _shape(logits: Tensor, temperatures: Tensor, greedy: Tensor, u: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape, dtype=torch.long), logits.new_empty(u.shape)


def plain_draw(
    logits: Tensor, temperatures: Tensor, greedy: Tensor, u: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Sample one token per row.

    Args:
        logits: logits of each row, fp32 [B, V].
        temperatures: sampling temperature of each row, fp32 [B].
        greedy: for each row, whether to select the most likely token [B]. Among equally likely tokens, the token with the
            lowest id is selected.
        u: uniform random number in [0, 1) for each row, float64 [B].
        block_size: number of tokens per block; see :mod:`areno.engine.rollout.inverse_cdf`.

    Returns:
        Tokens [B] and their log-probs [B] under the temperature-scaled policy.
    """
    tokens, logprobs = torch.ops.areno.plain_draw(logits, temperatures, greedy, u, block_size)
    return tokens, logprobs
