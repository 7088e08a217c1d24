"""Triton kernels for decode attention on the paged KV cache, for one new token per row and any page size.

Each program of the first kernel handles one row, one part of the context, and one key head with all of its query heads. The
softmax is computed online in fp32 (Milakov and Gimelshein 2018). A second kernel merges the parts (split-K, as in flash
decoding). Keys outside a sliding window are skipped. Attention sinks are added last, as a key without a value. The kernels read
the context lengths on the device, so a captured launch stays valid while contexts grow.

Importing this module requires Triton.
"""

import functools

import torch
import triton  # type: ignore[import-untyped,import-not-found]
import triton.language as tl  # type: ignore[import-untyped,import-not-found]
from torch import Tensor

from areno.engine.model.attention import LayerAttention

# Tensor cores need at least 16 rows, columns and features.
MIN_TILE = 16
MAX_PARTS = 16
# A part of at most this many keys is not split further.
MIN_KEYS = 256
# Software pipeline stages of a program's loop. The page lookup takes two of the three; the third is for keys and values.
STAGES = 3


@triton.jit
def _attend(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    length_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_ptr: tl.tensor,
    stat_ptr: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_page: tl.tensor,
    k_cell: tl.tensor,
    k_head: tl.tensor,
    v_page: tl.tensor,
    v_cell: tl.tensor,
    v_head: tl.tensor,
    table_row: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + row)
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    blocks = tl.cdiv(length, BLOCK_N) - first // BLOCK_N
    each = tl.cdiv(blocks, PARTS)
    begin = (first // BLOCK_N + part * each) * BLOCK_N
    end = tl.minimum(begin + each * BLOCK_N, length)

    group, key, value = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    heads = head * GROUP + group
    mine = group < GROUP
    q_at = q_ptr + row * q_row + heads[:, None] * q_head + key[None, :]
    q = tl.load(q_at, mask=mine[:, None] & (key < K_SIZE)[None, :], other=0.0)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    for start in range(begin, end, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        inside = column < end
        page = tl.load(table_ptr + row * table_row + column // PAGE, mask=inside, other=0).to(tl.int64)
        cell = column % PAGE
        k_at = k_ptr + (page * k_page + cell * k_cell + head * k_head)[:, None] + key[None, :]
        k = tl.load(k_at, mask=inside[:, None] & (key < K_SIZE)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        seen = inside
        if WINDOWED:
            seen = seen & (column >= first)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))  # every block has a visible key, so this is finite
        shrink = tl.exp(top - highest)
        weights = tl.exp(scores - highest[:, None])
        v_at = v_ptr + (page * v_page + cell * v_cell + head * v_head)[:, None] + value[None, :]
        v = tl.load(v_at, mask=inside[:, None] & (value < V_SIZE)[None, :], other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = highest

    wanted = mine[:, None] & (value < V_SIZE)[None, :]
    if PARTS == 1:
        if SINKS:
            sink = tl.load(sink_ptr + heads, mask=mine, other=0.0).to(tl.float32)
            highest = tl.maximum(top, sink)
            shrink = tl.exp(top - highest)
            total = total * shrink + tl.exp(sink - highest)
            acc = acc * shrink[:, None]
        scale = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)  # a row of padding has no key at all
        at = (row * HEADS + heads)[:, None] * V_SIZE + value[None, :]
        tl.store(out_ptr + at, (acc * scale[:, None]).to(out_ptr.dtype.element_ty), mask=wanted)
    else:
        at = (row * HEADS + heads) * PARTS + part
        tl.store(part_ptr + at[:, None] * V_SIZE + value[None, :], acc, mask=wanted)
        tl.store(stat_ptr + 2 * at, top, mask=mine)
        tl.store(stat_ptr + 2 * at + 1, total, mask=mine)


@triton.jit
def _merge_parts(
    part_ptr: tl.tensor,
    stat_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HEADS: tl.constexpr,
    V_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, value = tl.arange(0, PARTS), tl.arange(0, BLOCK_V)
    at = (row * HEADS + head) * PARTS + part
    top = tl.load(stat_ptr + 2 * at)
    total = tl.load(stat_ptr + 2 * at + 1)
    highest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sink_ptr + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp(top - highest)
    mass = tl.sum(total * shrink, 0)
    if SINKS:
        mass += tl.exp(sink - highest)
    parts = tl.load(part_ptr + at[:, None] * V_SIZE + value[None, :], mask=(value < V_SIZE)[None, :], other=0.0)
    acc = tl.sum(parts * shrink[:, None], 0)
    out = acc * tl.where(mass > 0, 1.0 / tl.where(mass > 0, mass, 1.0), 0.0)
    tl.store(out_ptr + (row * HEADS + head) * V_SIZE + value, out.to(out_ptr.dtype.element_ty), mask=value < V_SIZE)


def decode_attention(
    layer: LayerAttention,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    columns: int,
    parts: int | None = None,
    block: int | None = None,
    stages: int = STAGES,
) -> Tensor:
    """Compute the attention of one query per row over the row's pages.

    Args:
        layer: attention layer, which has the scale, window, sinks and soft-capping.
        q: queries [rows, heads, size], with contiguous features.
        keys: pool of keys [pages, page_size, KV heads, size] in the dtype of ``q``.
        values: pool of values [pages, page_size, KV heads, value size] in the dtype of ``q``.
        table: block table [rows, width], int32.
        lengths: number of tokens of each context [rows], int32. Padding rows have length 0, and get the output 0.
        columns: maximum number of tokens per context, from which the default of ``parts`` is chosen.
        parts: number of parts into which each context is split, to use more of the GPU's processors; a power of two. None uses
            :func:`choose_parts`.
        block: number of keys per loop iteration. None means 64, or 32 for heads of more than 128 features.
        stages: number of software pipeline stages of the kernel's loop over the keys.

    Returns:
        Attention outputs [rows, heads, value size] in the dtype of ``q``.
    """
    rows, heads, size = q.shape
    key_heads, v_size = values.shape[2:]
    if parts is None:
        parts = choose_parts(rows * key_heads, min(columns, layer.window or columns), _processors(q.device))
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = q.new_empty(rows, heads, v_size)
    part = stat = out
    if parts > 1:
        part = q.new_empty(rows, heads, parts, v_size, dtype=torch.float32)
        stat = q.new_empty(rows, heads, parts, 2, dtype=torch.float32)
    sinks = out if layer.sinks is None else layer.sinks
    block_v = max(triton.next_power_of_2(v_size), MIN_TILE)
    _attend[(rows, key_heads, parts)](
        *(q, keys, values, table, lengths, sinks, out, part, stat),
        *(layer.scale, layer.softcap or 1.0, layer.window or 0),
        *(q.stride(0), q.stride(1), *keys.stride()[:3], *values.stride()[:3], table.stride(0)),
        HEADS=heads,
        GROUP=heads // key_heads,
        K_SIZE=size,
        V_SIZE=v_size,
        PAGE=keys.shape[1],
        PARTS=parts,
        WINDOWED=layer.window is not None,
        CAPPED=layer.softcap is not None,
        SINKS=layer.sinks is not None,
        BLOCK_G=max(triton.next_power_of_2(heads // key_heads), MIN_TILE),
        BLOCK_N=block or (64 if size <= 128 else 32),
        BLOCK_K=max(triton.next_power_of_2(size), MIN_TILE),
        BLOCK_V=block_v,
        num_stages=stages,
    )
    if parts > 1:
        _merge_parts[(rows, heads)](
            *(part, stat, sinks, out),
            HEADS=heads,
            V_SIZE=v_size,
            PARTS=parts,
            SINKS=layer.sinks is not None,
            BLOCK_V=block_v,
        )
    return out


def choose_parts(programs: int, columns: int, processors: int) -> int:
    """Return the number of parts into which the attention kernel splits each context.

    The number is chosen so that there are about two Triton programs for each multiprocessor of the GPU. The number is at most
    :data:`MAX_PARTS`, and lower for short contexts.
    """
    parts = 1
    while parts < MAX_PARTS and programs * parts < 2 * processors and columns > MIN_KEYS * parts:
        parts *= 2
    return parts


@functools.cache
def _processors(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors. On a CPU, return 1, because Triton's interpreter runs programs sequentially."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
