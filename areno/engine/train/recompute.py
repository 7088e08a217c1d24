"""Activation checkpointing: estimate activation memory, recompute layers, and offload layer inputs to host memory."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areno.engine.model.packed_model import PackedModel
from areno.engine.model.packing import PackedPlan

# Activations are kept instead of recomputed if they and the gradients take at most this share of the free memory.
KEPT_SHARE = 0.5
_PROBE_TOKENS = 64

Keeping = Callable[[], AbstractContextManager[Any]]
"""Creates a context manager that controls how autograd stores saved tensors; see ``torch.autograd.graph.saved_tensors_hooks``.
"""

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """Total size in bytes of the tensors that a forward pass keeps for the backward pass if no layer is recomputed."""

    per_token: float
    per_pair: float  # per pair of tokens of a row; above 0 if attention keeps explicit scores

    def of(self, lengths: Sequence[int]) -> float:
        """Return the total size in bytes of the tensors kept in a forward pass over rows with ``lengths`` tokens."""
        return sum(n * (self.per_token + n * self.per_pair) for n in lengths)


def kept_bytes(model: PackedModel) -> KeptBytes:
    """Measure, with three short rows, the size of the tensors that autograd saves for the backward pass.

    Only sizes that grow with the row length are counted, so the weights are not included.
    """
    n = min(_PROBE_TOKENS, (model.context_length or 3 * _PROBE_TOKENS) // 3)
    first, second, third = (_kept_of_row(model, tokens) for tokens in (n, 2 * n, 3 * n))
    per_pair = (third - 2 * second + first) / (2 * n * n)
    return KeptBytes((second - first) / n - 3 * n * per_pair, per_pair)


def _kept_of_row(model: PackedModel, tokens: int) -> int:
    """Return the total size in bytes of the tensors, including weights, that autograd saves in a forward pass over one row."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    plan = PackedPlan([tokens], model.device)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = model.body(torch.zeros_like(plan.position_ids), plan.position_ids, plan)
    del hidden  # kept the tensors alive until here, so that no two had the same address
    return sum(kept.values())


class InHostMemory(torch.autograd.graph.saved_tensors_hooks):
    """Context manager under which autograd keeps its saved floating-point tensors in host memory.

    Copies from a GPU are exact, and use page-locked host memory. A copy runs on the current CUDA stream, so later work on
    this stream starts after the copy. The next layer can therefore reuse the GPU memory of a copied tensor.
    """

    def __init__(self) -> None:
        super().__init__(_to_host, _from_host)


def _to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    if not tensor.is_floating_point():
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    copy.copy_(tensor, non_blocking=tensor.is_cuda)
    return tensor.device, copy


def _from_host(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, copy = kept
    return copy.to(device, non_blocking=True)


def recompute_layers(
    module: Any, enabled: bool, keeping: Keeping | None = None, contexts: Contexts | None = None
) -> None:
    """Enable or disable activation checkpointing with the methods of the installed ``transformers`` release.

    With activation checkpointing, a forward pass keeps only the inputs of layers. ``keeping`` determines how these
    inputs are stored. If ``keeping`` is None, the inputs stay on their device. ``contexts`` creates the context
    managers of a layer's forward pass and of its recomputation.
    """
    name = (
        "activation_checkpointing" if hasattr(module, "activation_checkpointing_enable") else "gradient_checkpointing"
    )
    if not enabled:
        getattr(module, f"{name}_disable")()
        return
    more = {} if contexts is None else {"context_fn": contexts}
    getattr(module, f"{name}_enable")({"use_reentrant": False, **more})
    if keeping is None:
        return
    for child in module.modules():
        run = getattr(child, "_gradient_checkpointing_func", None)
        if run is not None:
            child._gradient_checkpointing_func = functools.partial(_kept, keeping, run)


def _kept(keeping: Keeping, run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run a layer under activation checkpointing, and store the layer's inputs with ``keeping``.

    ``keeping`` does not apply to tensors that the layer computes. Activation checkpointing discards these tensors, and
    recomputes them in the backward pass.
    """
    with keeping():
        return run(*arguments, **options)
