"""Computes an output head in chunks of rows, so that the logits of all rows need not be in memory at once.

Small chunks are efficient on a CPU. On a GPU, a chunk must be large enough to occupy the device. :func:`run_chunks` sums the
head's gradients over chunks in fp32. For bf16 weights, autograd would sum these gradients in bf16. A bf16 sum loses more
precision than the rest of the backward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Hidden states [n, C], targets [n] and temperatures [n], or their log-probs [n], entropies [n] and extreme logits [n, 2].
Chunk = tuple[Tensor, Tensor, Tensor]
Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]

# 512 MiB of fp32 logits, but at least 1,024 rows, even for vocabularies of more than 131,072 tokens.
CUDA_ELEMENTS, CUDA_ROWS = 128 * 1024 * 1024, 1024


def rows_of_chunk(vocab: int, elements: int, device_type: str) -> int:
    """Return the number of rows per chunk. Each row has ``vocab`` logits.

    On a CPU, a chunk has about ``elements`` logits. On a GPU, a chunk has about ``CUDA_ELEMENTS`` logits, but at least
    ``CUDA_ROWS`` rows.
    """
    if device_type == "cuda":
        return max(CUDA_ELEMENTS // vocab, CUDA_ROWS)
    return max(elements // vocab, 1)


def run_chunks(run: Run, chunks: Chunk, rows: int, weights: Sequence[Tensor]) -> Chunk:
    """Call ``run`` for at most ``rows`` rows at a time, and return the concatenated results.

    The backward pass recomputes each chunk of rows, and sums weight gradients in fp32.
    """
    result: Chunk = _Chunked.apply(run, rows, weights, *chunks, *weights)
    return result


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        rows: int,
        parameters: Sequence[Tensor],
        hidden: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        *weights: Tensor,
    ) -> Chunk:
        ctx.save_for_backward(hidden, targets, temperatures)
        ctx.run, ctx.rows, ctx.parameters = run, rows, parameters
        parts = [run(*chunk) for chunk in _split(rows, hidden, targets, temperatures)]
        logprobs, spreads, extremes = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.mark_non_differentiable(spreads, extremes)
        return logprobs, spreads, extremes

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        parameters = list(ctx.parameters)
        sums: list[Tensor | None] = [None] * len(parameters)
        parts = []
        for chunk, part in zip(_split(ctx.rows, *ctx.saved_tensors), grad.split(ctx.rows), strict=True):
            hidden = chunk[0].detach().requires_grad_()
            with torch.enable_grad():
                logprobs = ctx.run(hidden, *chunk[1:])[0]
            to_hidden, *to_weights = torch.autograd.grad(logprobs, [hidden, *parameters], part, allow_unused=True)
            parts.append(to_hidden)
            for index, gradient in enumerate(to_weights):
                if gradient is not None:
                    total = sums[index]
                    sums[index] = gradient.float() if total is None else total.add_(gradient)
        rounded = (
            None if total is None else total.to(weight.dtype) for total, weight in zip(sums, parameters, strict=True)
        )
        return None, None, None, torch.cat(parts), None, None, *rounded


def _split(rows: int, *tensors: Tensor) -> Iterator[Any]:
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
