"""Faster fp32 linear layers for CPUs on which PyTorch chooses a slow matrix product.

On x86, PyTorch multiplies fp32 matrices with MKL. On non-Intel CPUs, MKL does not use AVX-512. The library oneDNN, which is
also part of PyTorch, does use AVX-512. For at least 256 rows on two cores of an AMD EPYC, MKL reaches 200 GFLOP/s and oneDNN
reaches 440 GFLOP/s.

Without gradients, products with few rows use areno's kernel (:mod:`areno.engine.kernels.row_product`). The kernel requires AVX2
or AVX-512. On Intel CPUs, only output layers with a large vocabulary use areno's kernel, because MKL would repack the weights
of these layers for each product. For 64 rows on a Xeon with AVX-512, MKL reaches 123 GFLOP/s and areno's kernel reaches 263
GFLOP/s.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from areno.engine.kernels import row_product

# Below this much work, MKL's smaller overhead wins. Traced steps have no static row count and use the weight size instead.
_LEAST_FLOP = 4e6
_LEAST_WEIGHT = 40_000
# On Intel CPUs: minimum number of weight elements, more than the per-core caches hold.
_LARGE_WEIGHT = 8_000_000
_WIDE_OUTPUT = 8  # minimum ratio of outputs to inputs
# Up to this many rows, our kernel is faster than either library, by a tenth at 128 and a quarter at 64.
_FEW_ROWS = 256


def use_fast_products(module: nn.Module) -> None:
    """Replace the plain linear layers of a model with :class:`FastLinear` where :class:`FastLinear` is faster on this CPU."""
    least = least_weight()
    if least is None:
        return
    for child in module.modules():
        if type(child) is nn.Linear and type(weight := child.weight) is nn.Parameter and _gains(weight, least):
            child.__class__ = FastLinear if weight.dtype == torch.float32 and weight.is_cpu else nn.Linear


def _gains(weight: Tensor, least: int) -> bool:
    return least == 0 or (weight.numel() >= least and weight.shape[0] >= _WIDE_OUTPUT * weight.shape[1])


def use_row_products(module: nn.Module) -> None:
    """Make all :class:`FastLinear` layers use areno's kernel for inputs with few rows. The kernel must already be loaded."""
    for child in module.modules():
        if isinstance(child, FastLinear):
            child.row_products = True


@functools.cache
def least_weight() -> int | None:
    """Return the minimum number of weight elements for which :class:`FastLinear` can be faster than ``nn.Linear``.

    The result is None if :class:`FastLinear` is never faster on this CPU.
    """
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not both or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    return _LARGE_WEIGHT if _is_intel() else 0


@functools.cache
def _is_intel() -> bool:
    """Whether the CPU is made by Intel.

    If the maker is unknown, return True, so that areno treats the CPU like an Intel CPU. On Intel CPUs, :class:`FastLinear`
    replaces only a few large layers.
    """
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True


@functools.cache
def _wide() -> bool:
    """Whether oneDNN uses AVX-512 on this CPU, but MKL does not."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not _is_intel()


class FastLinear(nn.Linear):
    """A :class:`torch.nn.Linear` that selects the fastest matrix product for each input."""

    row_products = False  # use our kernel for few rows without gradient

    def forward(self, input: Tensor) -> Tensor:
        """Compute the output [..., out_features] for an input [..., in_features]."""
        rows = input.reshape(-1, self.in_features)
        if torch.compiler.is_exporting():
            out = self._in_decode_step(rows)
        elif self.row_products and rows.shape[0] <= _FEW_ROWS and not torch.is_grad_enabled():
            out = self._row_product(rows.contiguous())
        elif not _wide() or 2 * rows.numel() * self.out_features < _LEAST_FLOP:
            return linear(input, self.weight, self.bias)
        elif torch.is_grad_enabled() and (rows.requires_grad or self.weight.requires_grad):
            out = _Product.apply(rows, self.weight, self.bias)
        else:
            out = _multiply(rows, self.weight, self.bias)
        return out.view(*input.shape[:-1], self.out_features)

    def _in_decode_step(self, rows: Tensor) -> Tensor:
        """Compute the output while ``torch.export`` traces a decode step, which has few rows and no gradient."""
        if row_product.KERNEL.loaded:
            return self._row_product(rows)
        if _wide() and self.weight.numel() >= _LEAST_WEIGHT:
            return _multiply(rows, self.weight, self.bias)
        return linear(rows, self.weight, self.bias)

    def _row_product(self, rows: Tensor) -> Tensor:
        out = row_product.row_product(rows, self.weight)
        return out if self.bias is None else out + self.bias


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows [N, C] by the transpose of weight [O, C], and add bias [O]."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        need_rows, need_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if need_weight else None, weight if need_rows else None)
        return _multiply(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        rows, weight = ctx.saved_tensors
        need_rows, need_weight, need_bias = ctx.needs_input_grad
        return (
            _multiply(grad, weight.t()) if need_rows else None,
            _multiply(grad.t(), rows.t()) if need_weight else None,
            grad.sum(0) if need_bias else None,
        )
