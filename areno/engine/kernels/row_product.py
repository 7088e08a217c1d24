"""Matrix product for decode steps on a CPU: few rows, and weights that are read once and as they lie.

Libraries are made for square matrices, and reach their speed on few rows only over repacked copies of the weights, which
training would have to renew. Measured on two cores of an AMD EPYC, for the products of a 42 M model at 64 rows: 13.9 ms;
oneDNN 20.5, MKL 48. A row's result depends on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areno.engine.kernels.library import KernelLibrary

KERNEL = KernelLibrary(
    "row_product",
    "row_product(Tensor rows, Tensor weight) -> Tensor",
    "row_product_2(Tensor rows, Tensor first, Tensor second) -> (Tensor, Tensor)",
    "row_product_3(Tensor rows, Tensor first, Tensor second, Tensor third) -> (Tensor, Tensor, Tensor)",
)


def _shape(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


def _shapes(rows: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(_shape(rows, weight) for weight in weights)


torch.library.register_fake("areno::row_product", _shape, lib=KERNEL.declared)
torch.library.register_fake("areno::row_product_2", _shapes, lib=KERNEL.declared)
torch.library.register_fake("areno::row_product_3", _shapes, lib=KERNEL.declared)


def row_product(rows: Tensor, weight: Tensor) -> Tensor:
    """Rows [N, C] times weight [O, C] transposed, both fp32 with contiguous features.

    Returns:
        [N, O].
    """
    return torch.ops.areno.row_product(rows, weight)


# Several products of the same rows in one go, bit for bit, by how many weights they take.
OF_SEVERAL = {2: torch.ops.areno.row_product_2, 3: torch.ops.areno.row_product_3}
