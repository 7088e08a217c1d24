"""What a machine could achieve at best in a rollout: its measured rates, and the work that no engine can avoid.

The work is counted in phases: the prefill of all prompts, then each decode step of all running samples. A phase
takes at least

    max(FLOP / GEMM rate, bytes / memory bandwidth)

and the limit of a workload is the sum over its phases. Per token, FLOP are 2 x the parameters of the layers' matrices,
2 x vocabulary x hidden if logits are needed, and 4 x layers x heads x head size x context for attention. Bytes are the
weights once per phase, and keys and values once: those of a prompt once for all its samples, those of each sample
separately. Norms, softmax and sampling are not counted, and a decode batch is as large as the workload allows; so no engine
reaches the limit.

:func:`measure_products` is a tighter limit of decoding: the time that the matrix products of a step take by themselves,
with the model's own shapes and row count, which is far from the GEMM rate if there are few rows. :func:`train_flop` counts an
optimizer step.

A small model lives in the processor's caches, which are faster than its memory. So bandwidth is measured over as many
bytes as the workload touches, and over a large buffer, and the faster of the two counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

LARGE_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A dense decoder with gated MLPs, grouped-query attention, tied embeddings; names as in :func:`common.make_checkpoint`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the products of one layer: queries, keys, values, output, gate, up, down."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        return [*attention, *[(self.hidden, self.intermediate)] * 2, (self.intermediate, self.hidden)]

    @property
    def body(self) -> int:
        """Parameters in the matrices of all layers."""
        return self.layers * sum(a * b for a, b in self.matrices)

    @property
    def head(self) -> int:
        """Parameters of the output embedding."""
        return self.vocab * self.hidden

    @property
    def attention_flop(self) -> int:
        """FLOP of attending from one token to one other, in all layers."""
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def kv_entries(self) -> int:
        """Numbers in the keys and values of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def shape_of(config: Any) -> Shape:
    """The shape of a ``transformers`` configuration. Raises AttributeError if the model is not such a dense decoder."""
    heads = config.num_attention_heads
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
    )


@dataclass(frozen=True)
class Phase:
    """Work that cannot be split further: what comes next depends on it."""

    flop: int
    bytes: int


@dataclass(frozen=True)
class Rates:
    """Measured rates of a machine, per second."""

    flop: float
    bytes: float

    def seconds(self, phases: list[Phase]) -> float:
        """Minimum time for consecutive phases."""
        return sum(max(phase.flop / self.flop, phase.bytes / self.bytes) for phase in phases)


def phases(shape: Shape, prompts: list[int], samples: int, lengths: list[int], itemsize: int) -> list[Phase]:
    """The work of one pass over a workload; see the module docstring.

    Args:
        shape: shape of the model.
        prompts: tokens of each prompt.
        samples: samples per prompt.
        lengths: new tokens of each prompt's samples, one number per prompt.
        itemsize: bytes of a number.
    """
    return list(_phases(shape, prompts, samples, lengths, itemsize))


def _phases(shape: Shape, prompts: list[int], samples: int, lengths: list[int], itemsize: int) -> Iterator[Phase]:
    weights = (shape.body + shape.head) * itemsize
    pairs = sum(count * (count + 1) // 2 for count in prompts)
    flop = 2 * shape.body * sum(prompts) + 2 * shape.head * len(prompts) + shape.attention_flop * pairs
    yield Phase(flop, weights + sum(prompts) * shape.kv_entries * itemsize)
    for new in range(1, max(lengths)):  # the prefill's logits give the first token of every sample
        live = [count for count, length in zip(prompts, lengths, strict=True) if length > new]
        rows = len(live) * samples
        context = samples * sum(live) + rows * new
        flop = 2 * (shape.body + shape.head) * rows + shape.attention_flop * context
        yield Phase(flop, weights + (sum(live) + rows * new) * shape.kv_entries * itemsize)


def train_flop(shape: Shape, prompts: list[int], samples: int, lengths: list[int]) -> int:
    """FLOP of forward and backward over all samples, each prompt computed once, logits of new tokens only.

    The backward pass counts twice the forward pass, and nothing is recomputed.
    """
    forward = 0
    for count, length in zip(prompts, lengths, strict=True):
        new = samples * length
        pairs = count * (count + 1) // 2 + new * count + samples * (length * (length + 1) // 2)
        forward += 2 * shape.body * (count + new) + 2 * shape.head * new + shape.attention_flop * pairs
    return 3 * forward


def working_set(shape: Shape, prompts: list[int], samples: int, lengths: list[int], itemsize: int) -> int:
    """Bytes of weights and of all keys and values, at the end of a pass."""
    tokens = sum(count + samples * length for count, length in zip(prompts, lengths, strict=True))
    return (shape.body + shape.head + tokens * shape.kv_entries) * itemsize


def measure_gemm(shape: Shape, rows: list[int], device: str, dtype: str) -> float:
    """FLOP/s of the fastest matrix product, among large square ones and the model's own with these row counts."""
    import torch

    side = 1024 if device == "cpu" else 8192
    sizes = {(side, side, side), (side // 2, side, 2 * side)}
    sizes |= {(n, a, b) for n in rows for a, b in [*shape.matrices, (shape.hidden, shape.vocab)]}
    best = 0.0
    for n, inner, outer in sizes:
        left = torch.randn(n, inner, device=device, dtype=getattr(torch, dtype))
        right = torch.randn(inner, outer, device=device, dtype=getattr(torch, dtype))
        out = torch.empty(n, outer, device=device, dtype=getattr(torch, dtype))
        works: list[Callable[[], Any]] = [lambda a=left, b=right, o=out: torch.mm(a, b, out=o)]  # type: ignore[misc]
        if device == "cpu" and torch.backends.mkldnn.is_available():
            # PyTorch's own choice on a CPU is MKL, which is not the fastest on every processor.
            weight = right.t().contiguous()
            works.append(lambda a=left, b=weight: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))  # type: ignore[misc]
        best = max(best, 2 * n * inner * outer / min(_fastest(work, device) for work in works))
    return best


def measure_products(shape: Shape, rows: int, dtype: str, seconds: float = 0.3) -> float:
    """Seconds that the matrix products of one decode step take on a CPU, each shape with the fastest library for it.

    Every layer has its own weights, so they are read from where a model's are: memory, unless the cache holds them. Each
    library is timed with each shape for ``seconds``.
    """
    import torch

    counts = {(shape.hidden, shape.vocab): 1}
    for size in shape.matrices:
        counts[size] = counts.get(size, 0) + shape.layers
    total = 0.0
    for (inner, outer), count in counts.items():
        left = torch.randn(rows, inner, dtype=getattr(torch, dtype))
        weights = [torch.randn(outer, inner, dtype=left.dtype) for _ in range(count)]
        total += min(_fastest(work, "cpu", seconds) for work in _product_works(left, weights))
    return total


def _product_works(left: Any, weights: list[Any]) -> Iterator[Callable[[], Any]]:
    """Ways to multiply by all weights: PyTorch's default, oneDNN, and both libraries with weights packed beforehand."""
    import torch

    rows, onednn, mkl = len(left), torch.ops.mkldnn, torch.ops.mkl
    yield lambda: [torch.mm(left, weight.t()) for weight in weights]
    if torch.backends.mkldnn.is_available():
        yield lambda: [onednn._linear_pointwise(left, weight, None, "none", [], "") for weight in weights]
        packed = [onednn._reorder_linear_weight(weight, rows) for weight in weights]
        yield lambda: [onednn._linear_pointwise(left, weight, None, "none", [], "") for weight in packed]
    if torch.backends.mkl.is_available() and left.dtype == torch.float32:
        pairs = [(mkl._mkl_reorder_linear_weight(weight, rows), weight) for weight in weights]
        yield lambda: [mkl._mkl_linear(left, ready, weight, None, rows) for ready, weight in pairs]


def measure_bandwidth(size: int, device: str) -> float:
    """Bytes/s over ``size`` bytes: the fastest of a copy, which reads and writes half each, a sum and a dot product."""
    import torch

    source = torch.ones(max(size // 4, 1 << 16), device=device)
    half = source.numel() // 2
    first, second = source[:half], source[half : 2 * half]
    works: list[Callable[[], Any]] = [
        lambda: first.copy_(second),
        lambda: source.sum(),
        lambda: torch.dot(first, second),
    ]
    return source.numel() * 4 / min(_fastest(work, device) for work in works)


def _fastest(work: Callable[[], Any], device: str, seconds: float = 0.1) -> float:
    """Minimum seconds of a call, over at least five timings and ``seconds``; on a GPU, a timing is of ten calls."""
    import torch

    calls = 1 if device == "cpu" else 10
    best, spent, number = float("inf"), 0.0, 0
    while number < 5 or spent < seconds:
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        if device != "cpu":
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        best, spent, number = min(best, took / calls), spent + took, number + 1
    return best
