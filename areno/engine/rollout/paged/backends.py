"""Choose the implementation of decode attention on the paged KV cache.

The implementations are areno's Triton kernel, and PyTorch's attention on gathered pages.

The choice depends on a test on each GPU, not on version numbers. On first use, the kernel runs on a small case. If the result
is correct, the GPU uses the kernel.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from areno.engine.model.attention import LayerAttention, scaled_dot_product
from areno.engine.rollout.slot_cache import decode_mask
from areno.errors import first_line

logger = logging.getLogger(__name__)

# Layer, q [rows, heads, size], keys and values [pages, page_size, heads, size], block table [rows, width], positions
# [rows] of the new tokens (-1: padding), columns to attend to. Returns [rows, heads, size].
PagedAttention = Callable[[LayerAttention, Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]

_TOLERANCE = 3e-2


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """An implementation of decode attention."""

    name: str  # for logs and benchmarks
    run: PagedAttention
    fixed_shape: bool  # the launch does not depend on context lengths, as CUDA graphs require


def gathered(pool: Tensor, table: Tensor, columns: int) -> Tensor:
    """Copy the keys or values of each row's first ``columns`` tokens from the pages: [rows, heads, columns, head size]."""
    return pool[table[:, : -(-columns // pool.shape[1])]].flatten(1, 2)[:, :columns].transpose(1, 2)


def gather_attention(
    layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, positions: Tensor, columns: int
) -> Tensor:
    """Copy the pages to contiguous contexts, then run PyTorch's attention, which works on every device."""
    k, v = (gathered(pool, table, columns) for pool in (keys, values))
    at = positions.clamp(min=0)  # padding rows attend to one column, because softmax over none is NaN
    mask = decode_mask(at, torch.arange(columns, device=q.device), layer.window, q.dtype)
    return scaled_dot_product(q[:, :, None], k, v, layer, mask[:, None, None])[:, :, 0]


def triton_attention(
    layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, positions: Tensor, columns: int
) -> Tensor:
    """Run areno's Triton kernel; see :mod:`~areno.engine.rollout.paged.kernel`."""
    from areno.engine.rollout.paged.kernel import decode_attention

    return decode_attention(layer, q, keys, values, table, (positions + 1).int(), columns=columns)


GATHER = AttentionBackend("gather", gather_attention, fixed_shape=False)
_TRITON = AttentionBackend("triton", triton_attention, fixed_shape=True)


@functools.cache
def best_backend(device: torch.device, dtype: torch.dtype, page_size: int) -> AttentionBackend:
    """Return the Triton backend if the Triton kernel works on the device, and the gather backend otherwise.

    If a GPU has to use the gather backend, a warning is logged.
    """
    if device.type != "cuda":
        return GATHER
    reason = why_not(_TRITON, device, dtype, page_size)
    if reason is None:
        logger.debug("decode attention on %s uses the backend %s", device, _TRITON.name)
        return _TRITON
    logger.warning(
        "decode attention uses the slow backend %s, because the backend %s does not work: %s",
        *(GATHER.name, _TRITON.name, reason),
    )
    return GATHER


def why_not(backend: AttentionBackend, device: torch.device, dtype: torch.dtype, page_size: int) -> str | None:
    """Test a backend on a small case. Return the problem; None if the backend works."""
    generator = torch.Generator().manual_seed(0)
    rows, width = 3, 5
    positions = torch.tensor([3, width * page_size - 1, 2 * page_size], device=device)
    table = torch.arange(1, rows * width + 1, dtype=torch.int32, device=device).view(rows, width)
    shape = (rows * width + 1, page_size, 2, 64)
    keys, values = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    q = torch.randn(rows, 4, 64, generator=generator).to(device, dtype)
    layer = LayerAttention(0, 64**-0.5, window=page_size + 3)
    arguments = (table, positions, width * page_size)
    expected = gather_attention(layer, q.float(), keys.float(), values.float(), *arguments)
    try:
        actual = backend.run(layer, q, keys, values, *arguments).float()
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    gap = float((actual - expected).abs().max())
    return None if gap <= _TOLERANCE else f"its results differ from those of PyTorch's attention by {gap:.1e}"


def paged_attention(
    layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, positions: Tensor, columns: int
) -> Tensor:
    """Compute the attention of each row's new token over the row's pages, with the fastest backend that supports the layer."""
    backend = GATHER if layer.explicit else best_backend(q.device, q.dtype, keys.shape[1])
    return backend.run(layer, q, keys, values, table, positions, columns)
