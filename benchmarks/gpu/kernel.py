"""Decode attention over pages: how much of the memory bandwidth each way to launch it reaches, then every feature against
float64.

Times are those inside a CUDA graph. They come first: each feature is another kernel to compile."""

# ruff: noqa: I001  (shared comes first: it finds the checkout and imports areno before torch)

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from shared import Checks, Report, graph_seconds, run_stage, seconds

import torch
from torch import Tensor

from areno.engine.model import varlen
from areno.engine.model.attention import LayerAttention
from areno.engine.rollout.paged import backends

# Rounding of the inputs is the same on both sides; what is left is that of the weights and of the result.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# Keys per step of a program's loop, and steps whose loads are in flight.
CANDIDATES = tuple(itertools.product((64, 128), (3, 5)))


def exact(layer: LayerAttention, q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Attention of each row in float64; 0 for a row without a context."""
    out = q.new_zeros(len(q), q.shape[1], values.shape[-1], dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        if not length:
            continue
        first = 0 if layer.window is None else max(length - layer.window, 0)
        k, v = (pool[table[row].long()].flatten(0, 1)[first:length].double() for pool in (keys, values))
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("hd,nhd->hn", q[row].double(), k.repeat_interleave(group, 1)) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        if layer.sinks is not None:
            scores = torch.cat([scores, layer.sinks.double()[:, None]], 1)
        weights = scores.softmax(-1)[:, : length - first]
        out[row] = torch.einsum("hn,nhd->hd", weights, v.repeat_interleave(group, 1))
    return out


def case(
    device: str, dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int], lengths: list[int], page: int
) -> list[Tensor]:
    """Random q, keys, values, block table and lengths; pages lie in no order and some are nobody's."""
    generator = torch.Generator().manual_seed(len(lengths) + sum(sizes))
    rows, width = len(lengths), max(-(-max(lengths) // page), 1)
    pages = rows * width + 3
    table = torch.randperm(pages, generator=generator)[: rows * width].int().view(rows, width)
    q = torch.randn(rows, heads[0], sizes[0], generator=generator)
    keys, values = (torch.randn(pages, page, heads[1], size, generator=generator) for size in sizes)
    tensors = (q.to(dtype), keys.to(dtype), values.to(dtype), table, torch.tensor(lengths, dtype=torch.int32))
    return [x.to(device) for x in tensors]


def cases(args: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """Shapes and features: every option alone, then together, over grouped, single and odd heads."""
    mixed = [1, 0, 17, 64, 130, 200]
    plain = {"window": None, "softcap": None, "sinks": False}
    options = [plain, {**plain, "window": 20}, {**plain, "softcap": 5.0}, {**plain, "sinks": True}]
    options.append({"window": 70, "softcap": 3.0, "sinks": True})
    # In the interpreter bf16 is stored as unsigned integers and multiplied as such, so it is for the GPU alone.
    dtypes = [torch.float32, torch.float16] if args.device == "cpu" else list(BOUNDS)
    shapes = [((4, 2), (64, 64), 16), ((3, 1), (80, 48), 8), ((2, 2), (128, 128), 16)]
    chosen = list(itertools.product(dtypes, options, (1, 4)))
    if args.tiny:  # the interpreter takes a second for each
        chosen = [c for c in chosen if c[0] == torch.float32 or c[1] is options[-1]]
    for index, (dtype, extra, parts) in enumerate(chosen):
        yield (dtype, *shapes[index % 3], mixed, extra, parts)
    if not args.tiny:
        long = [5000, 1, 0, 4096, 333, 2047, 16, 4999]
        for dtype, extra, parts in itertools.product(dtypes, options, (1, 8, None)):
            yield dtype, (16, 8), (128, 128), 16, long, extra, parts
        yield torch.bfloat16, (8, 2), (256, 256), 16, long, plain, None


def check_kernel(args: argparse.Namespace, checks: Checks) -> None:
    from areno.engine.rollout.paged.kernel import decode_attention

    for dtype, heads, sizes, page, lengths, extra, parts in cases(args):
        q, keys, values, table, own = case(args.device, dtype, heads, sizes, lengths, page)
        sinks = torch.linspace(-2, 2, heads[0], device=args.device) if extra["sinks"] else None
        layer = LayerAttention(0, sizes[0] ** -0.5, extra["window"], sinks, extra["softcap"])
        got = decode_attention(layer, q, keys, values, table, own, columns=max(lengths), parts=parts)
        gap = (got.double() - exact(layer, q, keys, values, table, own)).abs().max()
        features = "+".join(name for name, value in extra.items() if value) or "plain"
        name = f"triton {str(dtype)[6:]} heads {heads} sizes {sizes} page {page} {features} parts {parts}"
        checks.below(name, float(gap), BOUNDS[dtype])


def measure(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    """Time and bandwidth of the kernel's launches and of the alternatives, 16 query and 8 key heads of 128; tiny: 4 and 2."""
    from areno.engine.rollout.paged.kernel import decode_attention

    layer, dtype = LayerAttention(0, 128**-0.5), torch.float32 if args.tiny else torch.bfloat16
    shapes = ((2, 40), (1, 100)) if args.tiny else ((32, 2048), (1, 8192), (256, 1024), (64, 512), (8, 32_768))
    heads = (4, 2) if args.tiny else (16, 8)  # the interpreter takes one after the other
    best: dict[str, Any] = {}
    for rows, length in shapes:
        q, keys, values, table, own = case(args.device, dtype, heads, (128, 128), [length] * rows, 16)
        size = 2 * rows * length * heads[1] * 128 * dtype.itemsize
        expected = backends.gather_attention(layer, q, keys, values, table, own.long() - 1, length).float()
        ways = {
            f"triton keys {b} stages {s}": lambda b=b, s=s, a=(layer, q, keys, values, table, own), n=length: (
                decode_attention(*a, columns=n, block=b, stages=s)
            )
            for b, s in CANDIDATES
        }
        arguments = (layer, q, keys, values, table, own.long() - 1, length)
        ways[backends.GATHER.name] = lambda a=arguments: backends.gather_attention(*a)
        for name, run in ways.items():
            entry: dict[str, Any] = {"rows": rows, "length": length, "way": name}
            try:
                gap = float((run().float() - expected).abs().max())
                time = graph_seconds(run) if args.device == "cuda" else seconds(run, 1, warm=0)
            except Exception as error:
                report.add("table", {**entry, "error": str(error).splitlines()[0][:200] if str(error) else repr(error)})
                continue
            entry |= {"us": round(1e6 * time, 2), "tb_s": round(size / time / 1e12, 3), "gap": gap}
            if "copy_tb_s" in report["machine"]:
                entry["share_of_copy"] = round(entry["tb_s"] / report["machine"]["copy_tb_s"], 3)
            report.add("table", entry)
            if name.startswith("triton"):
                checks.below(f"{name}, {rows} rows of {length}: difference from gathered pages", gap, BOUNDS[dtype])
                known = best.get(f"{rows} x {length}")
                if known is None or entry["us"] < known["us"]:
                    best[f"{rows} x {length}"] = entry
        report["best"] = best


def candidates(report: Report) -> None:
    """Which implementations prove themselves on this device."""
    device = torch.device("cuda", torch.cuda.current_device())
    report["decode_candidates"] = {"triton": backends.why_not(backends._TRITON, device, torch.bfloat16, 16) or "works"}
    report["packed_candidates"] = {
        kernel.name: varlen.why_not(kernel, device) or "works"
        for kernel in (varlen.torch_varlen(), varlen.flash_attn_varlen())
        if kernel is not None
    }
    report["chosen"] = backends.best_backend(device, torch.bfloat16, 16).name


def stage(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    if importlib.util.find_spec("triton") is None:
        report["skipped"] = "triton is not installed"
        return
    if args.device.startswith("cuda"):
        candidates(report)
    measure(args, checks, report)
    check_kernel(args, checks)


if __name__ == "__main__":
    run_stage("kernel", stage)
