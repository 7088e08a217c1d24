"""Linear layers in fp32 on processors where PyTorch's choice of matrix product is the slow one.

PyTorch multiplies fp32 matrices on x86 with MKL, which on other makers' processors leaves AVX-512 unused; oneDNN, which
PyTorch ships as well, does not. Measured on two cores of an AMD EPYC: 200 and 440 GFLOP/s from 256 rows on, in forward and
in the gradient of the input. Weights stay as they are; nothing is repacked. Few rows are multiplied by a kernel of our own
(:mod:`areno.engine.kernels.row_product`), with AVX2 as well; on Intel's processors in an output layer of a large vocabulary
alone, which MKL repacks for each product (64 rows: 123 GFLOP/s, ours 263 on a Xeon with AVX-512).
"""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from areno.engine.kernels import row_product

# Below this much work MKL's smaller overhead wins. A traced step has no row count to look at: it goes by the weight.
_LEAST_FLOP = 4e6
_LEAST_WEIGHT = 40_000
# On Intel's processors: weights that no cache close to a core holds.
_LARGE_WEIGHT = 8_000_000
_WIDE_OUTPUT = 8  # times as many outputs as inputs
# Up to so many rows our own product is faster than either library, by a tenth at 128 and a quarter at 64.
_FEW_ROWS = 256


def use_fast_products(module: nn.Module) -> None:
    """Let the plain linear layers of a model choose their matrix product, on processors where that is faster."""
    least = least_weight()
    if least is None:
        return
    for child in module.modules():
        if type(child) is nn.Linear and type(weight := child.weight) is nn.Parameter and _gains(weight, least):
            child.__class__ = FastLinear if weight.dtype == torch.float32 and weight.is_cpu else nn.Linear


def _gains(weight: Tensor, least: int) -> bool:
    """Whether a weight [O, C] is large enough; where size counts, only an output layer is."""
    return least == 0 or (weight.numel() >= least and weight.shape[0] >= _WIDE_OUTPUT * weight.shape[1])


def use_row_products(module: nn.Module) -> None:
    """Let the layers that :func:`use_fast_products` has found multiply few rows with our kernel, which must be loaded."""
    for child in module.modules():
        if isinstance(child, FastLinear):
            child.row_products = True


@functools.cache
def least_weight() -> int | None:
    """Numbers in the smallest weight that this processor multiplies faster without MKL; None where it has no AVX2."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not both or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    return _LARGE_WEIGHT if _is_intel() else 0


@functools.cache
def _is_intel() -> bool:
    """Whether Intel made the processor; taken for granted where that cannot be known, so that PyTorch's choice stays."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True


@functools.cache
def _wide() -> bool:
    """Whether oneDNN is faster than MKL from some size on."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not _is_intel()


class FastLinear(nn.Linear):
    """A linear layer that multiplies with what is fastest; everything else is :class:`torch.nn.Linear`."""

    row_products = False  # multiply few rows with our kernel, where no gradient is wanted

    def forward(self, input: Tensor) -> Tensor:
        """Input [..., C] to output [..., O]."""
        rows = input.reshape(-1, self.in_features)
        if torch.compiler.is_exporting():
            out = self._in_decode_step(rows)
        elif self.row_products and rows.shape[0] <= _FEW_ROWS and not torch.is_grad_enabled():
            out = self._row_product(rows)
        elif not _wide() or 2 * rows.numel() * self.out_features < _LEAST_FLOP:
            return linear(input, self.weight, self.bias)
        elif torch.is_grad_enabled() and (rows.requires_grad or self.weight.requires_grad):
            out = _Product.apply(rows, self.weight, self.bias)
        else:
            out = _multiply(rows, self.weight, self.bias)
        return out.view(*input.shape[:-1], self.out_features)

    def _in_decode_step(self, rows: Tensor) -> Tensor:
        """As it is traced; a step has few rows, and no gradient."""
        if row_product.KERNEL.loaded:
            return self._row_product(rows)
        if _wide() and self.weight.numel() >= _LEAST_WEIGHT:
            return _multiply(rows, self.weight, self.bias)
        return linear(rows, self.weight, self.bias)

    def _row_product(self, rows: Tensor) -> Tensor:
        out = row_product.row_product(rows, self.weight)
        return out if self.bias is None else out + self.bias


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows [N, C] times weight [O, C] transposed, plus bias [O]."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    """The product and its three gradients."""

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
