"""Matrix product with few rows, for decode steps on a CPU. The kernel reads the weights once, in their original layout.

oneDNN and MKL are optimized for square matrices. For few rows, oneDNN and MKL are fast only with repacked copies of the
weights, which would have to be updated after each training step. For 64 rows and a model of 42 M parameters, all matrix
products of a decode step together take 13.9 ms with this kernel, 20.5 ms with oneDNN and 48 ms with MKL (two cores of an AMD
EPYC). The result of a row does not depend on the other rows.
"""

import torch
from torch import Tensor

from areno.engine.kernels.library import KernelLibrary

KERNEL = KernelLibrary("row_product", "row_product(Tensor rows, Tensor weight) -> Tensor")


@torch.library.register_fake("areno::row_product", lib=KERNEL.declared)
def _shape(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


def row_product(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``rows`` [N, C] by the transpose of ``weight`` [O, C]. Both tensors are fp32 with contiguous features.

    Returns:
        Products [N, O].
    """
    return torch.ops.areno.row_product(rows, weight)
