"""LoRA adapters of tensor-parallel models.

An adapter is sharded like its layer. In a column-parallel layer, matrix A is replicated, and matrix B is sharded by rows. In a
row-parallel layer, A is sharded by columns, and B is replicated. The adapter's output is added before the layer's output is
gathered or reduced, so the adapter needs no extra communication in a pass. Each rank computes a partial gradient of the
replicated matrix. The optimizer sums the ranks' partial gradients once per step.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from areno.engine.model.adapter import NAME, Adapter
from areno.engine.parallel.parts import local, shard_of
from areno.engine.parallel.sharding import style_of
from areno.errors import UsageError

# Tensor-parallel styles of column-parallel and row-parallel linear layers.
_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
_ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")


class ShardedAdapter(Adapter):
    """The LoRA adapter of a tensor-parallel module. All ranks must call the same methods in the same order.

    Raises UsageError: a layer has an unsupported tensor-parallel style.
    """

    def __init__(self, wrapped: Any, *, may_merge: bool) -> None:
        super().__init__(wrapped, may_merge=may_merge)
        self._partial: set[int] = set()
        for name, layer, style in _sharded_layers(wrapped.get_base_model(), self._layers):
            _refuse_other_layer(name, layer, style)
            self._partial.add(id(_shard_adapter(layer, style)))

    def partial_names(self) -> set[str]:
        """See :meth:`Adapter.partial_names`."""
        module: nn.Module = self._wrapped.get_base_model()
        return {name for name, p in module.named_parameters() if id(p) in self._partial}

    def put(self, layer: Any, weight: Tensor) -> Callable[[], None]:
        """See :meth:`Adapter.put`; ``weight`` is this rank's shard."""
        base = layer.get_base_layer()
        before = base.weight
        if not isinstance(before, DTensor):  # the layer is replicated
            return super().put(layer, weight)
        mesh, places = before.device_mesh, before.placements
        after = DTensor.from_local(weight, mesh, places, run_check=False, shape=before.shape, stride=before.stride())
        base._parameters["weight"] = nn.Parameter(after, requires_grad=False)
        return functools.partial(base._parameters.__setitem__, "weight", before)

    def sum_of(self, layer: Any) -> Tensor:
        """See :meth:`Adapter.sum_of`; the result is this rank's shard of the sum."""
        first, second = local(layer.lora_A[NAME].weight), local(layer.lora_B[NAME].weight)
        return local(layer.get_base_layer().weight) + second @ first * layer.scaling[NAME]


@contextmanager
def as_if_unsharded(module: Any) -> Iterator[None]:
    """Within the ``with`` block, give sharded linear layers unsharded placeholder weights that take no memory.

    With these placeholders, ``peft`` creates and reads unsharded matrices, with the same random numbers as for an unsharded
    model.
    """
    mesh, module._device_mesh = module._device_mesh, None
    swapped: list[tuple[Any, str, nn.Parameter, nn.Parameter]] = []
    for child in module.modules():
        for name, own in child.named_parameters(recurse=False) if isinstance(child, nn.Linear) else ():
            if isinstance(own, DTensor):
                wide = torch.empty(1, dtype=own.dtype, device=own.device).expand(own.shape)
                swapped.append((child, name, own, nn.Parameter(wide, requires_grad=own.requires_grad)))
    for child, name, _, wide in swapped:
        child._parameters[name] = wide
    try:
        yield
    finally:
        for child, name, own, wide in swapped:
            own.requires_grad_(wide.requires_grad)
            child._parameters[name] = own
        module._device_mesh = mesh


@torch.no_grad()
def merge_sharded(wrapped: Any, layers: list[Any]) -> nn.Module:
    """Merge an unsharded adapter into a sharded module's weights, and return the module without the adapter."""
    refuse_other_layers(wrapped.get_base_model(), layers)
    for layer in layers:
        weight = layer.get_base_layer().weight
        if isinstance(weight, DTensor):
            local(weight).add_(shard_of(layer.get_delta_weight(NAME), weight))
        else:  # the layer is replicated, and may have more than a product, such as a bias
            layer.merge(adapter_names=[NAME])
    return cast(nn.Module, wrapped.unload())


def refuse_other_layers(module: Any, layers: list[Any]) -> None:
    """Raise UsageError if an adapted layer has an unsupported tensor-parallel style."""
    for name, layer, style in _sharded_layers(module, layers):
        _refuse_other_layer(name, layer, style)


def _sharded_layers(module: Any, layers: list[Any]) -> Iterator[tuple[str, Any, str]]:
    names = {id(layer): name for name, layer in module.named_modules()}
    for layer in layers:
        name = names[id(layer)]
        weight = layer.get_base_layer()._parameters.get("weight")
        style = style_of(module, name)
        if style is not None or not isinstance(weight, nn.Parameter) or isinstance(weight, DTensor):
            yield name, layer, str(style)


def _refuse_other_layer(name: str, layer: Any, style: str) -> None:
    from peft.tuners.lora import Linear

    plain = type(layer) is Linear and type(layer.get_base_layer()) is nn.Linear and not layer.lora_variant
    if not plain or style not in (*_COLUMNS, *_ROWS) or layer.lora_B[NAME].bias is not None:
        what = f"{name} ({type(layer.get_base_layer()).__name__}, {style})"
        raise UsageError(
            f"--tp-size: an adapter of {what} cannot be sharded; areno shards only plain LoRA (no DoRA, no lora_bias) of "
            "column-parallel or row-parallel linear layers; remove the layer from --lora-target-modules, or use --tp-size 1"
        )


def _shard_adapter(layer: Any, style: str) -> nn.Parameter:
    """Shard the adapter of ``layer`` like the layer. Return the adapter's matrix (A or B) that stays replicated."""
    base = layer.get_base_layer()
    mesh, in_columns = base.weight.device_mesh, style in _COLUMNS
    first, second = layer.lora_A[NAME], layer.lora_B[NAME]
    cut, place = (second, Shard(0)) if in_columns else (first, Shard(1))
    cut.weight = nn.Parameter(distribute_tensor(cut.weight.detach(), mesh, [place], src_data_rank=None))
    # The communication that transformers installs around the layer must wrap the sum of both products.
    del base.forward
    base.forward = functools.partial(_product_and_adapter, type(base).forward, base, layer, in_columns)
    ALL_PARALLEL_STYLES[style].install_forward(base, mesh)
    layer.forward = base.forward
    return cast(nn.Parameter, (first if in_columns else second).weight)


def _product_and_adapter(
    product: Callable[[nn.Module, Tensor], Tensor], base: nn.Module, layer: Any, in_columns: bool, x: Tensor
) -> Tensor:
    """Compute this rank's part of the output [..., O] of a layer and its adapter.

    In a column-parallel layer, the part consists of some columns. In a row-parallel layer, the part is a partial sum.
    """
    out = product(base, x)
    if layer.disable_adapters or layer.merged:
        return out
    first, second = local(layer.lora_A[NAME].weight), local(layer.lora_B[NAME].weight)
    part = layer.lora_dropout[NAME](_local(x, Partial() if in_columns else None).to(first.dtype))
    added = nn.functional.linear(nn.functional.linear(part, first), second) * layer.scaling[NAME]
    own = _local(out, None if in_columns else Replicate())
    total = (own + added).to(own.dtype)
    if not isinstance(out, DTensor):
        return total
    return DTensor.from_local(
        total, out.device_mesh, out.placements, run_check=False, shape=out.shape, stride=out.stride()
    )


def _local(tensor: Tensor, gradient: Placement | None) -> Tensor:
    """Return this rank's shard of a tensor.

    ``gradient`` is the placement of the shard's gradient. If it is None, the gradient has the same placement as the tensor.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=tensor.placements if gradient is None else [gradient])
