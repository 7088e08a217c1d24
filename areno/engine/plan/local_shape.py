"""Give a model the shapes of one rank's tensor-parallel shard, according to the tensor-parallel plan of ``transformers``.

The model's code runs unchanged on the shard, because the code derives the numbers of heads and the MLP width from the weights.
Collective operations that gather or split tensors are emulated. All other collective operations are left out, because they do
not change the shapes of tensors.
"""

from typing import Any

import torch
from torch import Tensor, nn

_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLIT = ("rowwise_split_input", "rowwise_rep")


def keep_one_part(module: nn.Module, tp_size: int) -> None:
    """Replace each tensor that the model's tensor-parallel plan splits. The new tensor has the shape of one shard.

    Tied weights stay tied.
    """
    plan = {tuple(name.split(".")): style for name, style in (getattr(module, "tp_plan", None) or {}).items()}
    shards: dict[int, nn.Parameter] = {}
    for name, child in module.named_modules():
        parts = tuple(part for part in name.split(".") if part != "base_layer")
        style = _style(plan, parts)
        for own, tensor in list(child._parameters.items()):
            if tensor is None:
                continue
            if id(tensor) not in shards:
                dim = _split_dim(plan, parts, own, tensor.ndim)
                shards[id(tensor)] = tensor if dim is None else _part(tensor, dim, tp_size)
            child._parameters[own] = shards[id(tensor)]
        if name.endswith("base_layer"):  # the adapted layer gathers and splits
            continue
        if style in _GATHERED and parts[-1] != "lm_head":
            child.register_forward_hook(lambda _m, _args, output: torch.cat([output] * tp_size, -1))
        elif style in _SPLIT:
            child.register_forward_pre_hook(lambda _m, args: (args[0].chunk(tp_size, -1)[0], *args[1:]))


def all_logits(logits: Tensor, vocab: int) -> Tensor:
    """Return logits [N, ``vocab``] with all columns, given a rank's ``logits``.

    In a run, a rank with fewer than ``vocab`` columns gathers the missing columns from other ranks. The memory estimate needs
    only a tensor of the resulting shape, so this function returns an uninitialized tensor instead.
    """
    return logits if logits.shape[-1] >= vocab else logits.new_empty((*logits.shape[:-1], vocab))


def _style(plan: dict[tuple[str, ...], str], parts: tuple[str, ...]) -> str:
    for pattern, style in plan.items():
        if len(pattern) == len(parts) and all(w in ("*", p) for w, p in zip(pattern, parts, strict=True)):
            return style
    return ""


def _split_dim(plan: dict[tuple[str, ...], str], parts: tuple[str, ...], own: str, ndim: int) -> int | None:
    side = next((part for part in parts if part in ("lora_A", "lora_B")), "")
    owner = parts[: parts.index(side)] if side else parts
    style = _style(plan, (*owner, own)) or _style(plan, owner)
    if style.startswith("embedding_"):
        return 0 if style == "embedding_rowwise" else 1
    if "colwise" in style:
        return None if side == "lora_A" else max(ndim - 2, 0)
    if "rowwise" in style:
        return None if own == "bias" or ndim == 1 or side == "lora_B" else ndim - 1
    return None


def _part(tensor: nn.Parameter, dim: int, tp_size: int) -> nn.Parameter:
    shape: list[Any] = list(tensor.shape)
    shape[dim] = -(-shape[dim] // tp_size)
    return nn.Parameter(tensor.new_empty(shape), tensor.requires_grad)
