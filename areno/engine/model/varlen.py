"""Attention over packed sequences on a GPU, with ``torch.nn.attention.varlen`` or the ``flash-attn`` package.

Training and prefill use these kernels, which need no padding. The kernels do not support some cases, such as sinks, fp32, head
sizes above 256 and old GPUs. In these cases, attention uses :func:`~areno.engine.model.attention.scaled_dot_product`, and the
reason is logged once as a warning. To find out what a kernel supports, areno inspects the parameter names of the kernel's
function, not the version number of its package. Before a kernel is used, its forward and backward results are compared with
PyTorch's attention.
"""

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areno.engine.model.attention import LayerAttention, scaled_dot_product, window_mask
from areno.errors import first_line

logger = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)
_MAX_HEAD_SIZE = 256
_TOLERANCE = 5e-2


@dataclass(frozen=True, slots=True)
class VarlenKernel:
    """A variable-length attention function, and how to call it."""

    name: str
    call: Callable[..., Any]
    scale: str  # name of the argument for the scale of the scores
    groups: str | None = None  # name of the flag for grouped-query attention; None if there is no flag
    repeats: bool = False  # whether key heads must be repeated to match query heads
    causal: str | None = None  # name of the flag for causal attention, in addition to the window
    softcap: bool = False  # whether soft-capped scores are supported

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        layer: LayerAttention,
    ) -> Tensor:
        """Return the causal attention outputs of N packed sequences.

        There are Tq queries with H heads (``q`` [Tq, H, D]), and Tk keys and values with K heads (``k``, ``v`` [Tk, K, D]). The
        last query of each sequence is at the position of the sequence's last key. ``starts`` and ``longest`` are pairs: the
        first element is for queries, and the second is for keys. Each tensor in ``starts`` holds the start of each sequence,
        followed by the total length (int32 [N + 1]). Each number in ``longest`` is the maximum length of a sequence.
        """
        if self.repeats and q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return self.call(q, k, v, starts[0], starts[1], longest[0], longest[1], **self._options(layer))

    def _options(self, layer: LayerAttention) -> dict[str, Any]:
        options: dict[str, Any] = {self.scale: layer.scale}
        options["window_size"] = (-1 if layer.window is None else layer.window - 1, 0)
        if self.groups:
            options[self.groups] = True
        if self.causal:
            options[self.causal] = True
        if layer.softcap is not None:
            options["softcap"] = layer.softcap
        return options


@functools.cache
def torch_varlen() -> VarlenKernel | None:
    """Return PyTorch's kernel; None if this PyTorch release has no suitable kernel."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= names.keys():
        return None
    groups = "enable_gqa" if "enable_gqa" in names else None
    return VarlenKernel("varlen_attn", varlen_attn, "scale", groups, repeats=groups is None)


@functools.cache
def flash_attn_varlen() -> VarlenKernel | None:
    """Return the kernel of the ``flash-attn`` package; None if the package cannot be imported."""
    try:
        from flash_attn import flash_attn_varlen_func
    except (ImportError, OSError):
        return None
    softcap = "softcap" in inspect.signature(flash_attn_varlen_func).parameters
    return VarlenKernel("flash-attn", flash_attn_varlen_func, "softmax_scale", causal="causal", softcap=softcap)


def find_kernel(layer: LayerAttention, q: Tensor, v: Tensor) -> VarlenKernel | None:
    """Return a kernel for a layer; None if no kernel supports the layer."""
    if layer.explicit or q.device.type != "cuda":
        return None
    if q.dtype not in _HALF:
        _warn_once(f"the model computes in {q.dtype}, but fused kernels compute in bfloat16 or float16")
    elif q.shape[-1] > _MAX_HEAD_SIZE or v.shape[-1] != q.shape[-1]:
        _warn_once(
            f"the query heads have size {q.shape[-1]} and the value heads have size {v.shape[-1]}, but fused kernels need "
            f"equal sizes of at most {_MAX_HEAD_SIZE}"
        )
    elif layer.sinks is not None:
        _warn_once("it has attention sinks")
    else:
        kernels = _working(q.device)
        fitting = [kernel for kernel in kernels if layer.softcap is None or kernel.softcap]
        if not fitting and kernels:
            _warn_once(
                "the model soft-caps its attention scores, but no fused kernel that works on this machine supports "
                "soft-capping (recent releases of flash-attn do)"
            )
        return fitting[0] if fitting else None
    return None


@functools.cache
def _working(device: torch.device) -> tuple[VarlenKernel, ...]:
    """Return the kernels that work on a device, according to :func:`why_not`."""
    reasons, working = [], []
    capability = torch.cuda.get_device_capability(device)
    for kernel in (torch_varlen(), flash_attn_varlen()):
        if kernel is None:
            continue
        reason = f"compute capability {capability} is below (8, 0)" if capability < (8, 0) else why_not(kernel, device)
        if reason is None:
            working.append(kernel)
        else:
            reasons.append(f"{kernel.name} does not work ({reason})")
    if not working:
        _warn_once(
            "; ".join(reasons)
            or "this PyTorch release has no suitable variable-length kernel, and flash-attn cannot be loaded"
        )
    return tuple(working)


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "this model does not use FlashAttention, because %s; its attention uses padding and is slower", reason
    )


def why_not(kernel: VarlenKernel, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Test a kernel's forward and backward pass on a small case. Return the problem; None if the kernel works."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = (5, 40), (9, 40)
    shapes = ((sum(queries), 4, 64), (sum(keys), 2, 64), (sum(keys), 2, 64))
    layer = LayerAttention(0, 0.125, window=16)
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
        starts = [torch.tensor([0, n[0], sum(n)], dtype=torch.int32, device=device) for n in (queries, keys)]
        expected = _reference(leaves, queries, keys, layer)
        expected_gradients = torch.autograd.grad(expected.square().sum(), leaves)
        try:
            actual = kernel.attend(
                leaves[0], leaves[1], leaves[2], (starts[0], starts[1]), (max(queries), max(keys)), layer
            )
            gradients = torch.autograd.grad(actual.float().square().sum(), leaves)
        except Exception as error:
            return f"{type(error).__name__}: {first_line(error)}"
    pairs = [(actual.detach(), expected.detach()), *zip(gradients, expected_gradients, strict=True)]
    gap = max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)
    return None if gap <= _TOLERANCE else f"its results differ from PyTorch's attention by {gap:.1e}"


def _reference(leaves: list[Tensor], queries: tuple[int, ...], keys: tuple[int, ...], layer: LayerAttention) -> Tensor:
    outputs = []
    parts = zip(leaves[0].split(queries), leaves[1].split(keys), leaves[2].split(keys), strict=True)
    for q, k, v in parts:
        own = [x.float().transpose(0, 1)[None] for x in (q, k, v)]
        mask = window_mask(len(k), layer.window, own[0], len(k) - len(q))
        outputs.append(scaled_dot_product(own[0], own[1], own[2], layer, mask)[0].transpose(0, 1))
    return torch.cat(outputs)
