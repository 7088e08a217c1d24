"""Sampling kernel for decode steps on a CPU, for plain rows (without filters or logit edits).

For 64 rows of 32,000 tokens on two cores it takes a quarter of the 1.3 ms that the same arithmetic takes when compiled by
PyTorch.
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
        logits: fp32 [B, V].
        temperatures: fp32 [B].
        greedy: whether each row takes its most likely token (the first of equals) [B].
        u: uniform numbers in [0, 1), float64 [B].
        block_size: number of tokens of a block, see :mod:`areno.engine.rollout.inverse_cdf`.

    Returns:
        Tokens [B] and their log-probs under the scaled policy [B].
    """
    tokens, logprobs = torch.ops.areno.plain_draw(logits, temperatures, greedy, u, block_size)
    return tokens, logprobs
