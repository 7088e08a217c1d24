"""The attention function that areno registers with ``transformers``.

A forward pass gives every layer the same attention plan (argument ``areno``). The plan determines which tokens attend to each
other. Training and prefill use a plan for packed sequences. Decoding uses a plan for the KV cache. areno registers no mask
function, so ``transformers`` builds no masks.

Shapes: T tokens per call, H query heads, K key/value heads, head size D (Dv for values).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from areno.engine.model.routing import Routing

Forward = Callable[..., Tensor]
"""The ``forward`` method of a layer."""

# Name of each backend's function in transformers: fused kernels where available, or explicit scores.
IMPLEMENTATIONS = {"flash": "areno", "native": "areno_native"}


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention parameters of a layer."""

    layer: int  # layer index, the key of its cache
    scale: float  # factor on the scores
    window: int | None = None  # number of keys that a query attends to, including its own; None: no limit
    sinks: Tensor | None = None  # per-head logits [H] of a virtual key whose value is zero (gpt_oss), or None
    softcap: float | None = None  # scores are squashed to ``softcap * tanh(score / softcap)`` (gemma 2), or None
    explicit: bool = False  # compute explicit scores instead of using PyTorch's fused kernels


class AttentionPlan(Protocol):
    """Determines which tokens of a forward pass attend to each other. All layers of a pass share one plan."""

    position_ids: Tensor  # position of each token [T]
    routing: Routing | None  # recording or replay of expert choices, see :mod:`areno.engine.model.routing`

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention outputs [T, H, Dv], given queries [T, H, D], keys [T, K, D] and values [T, K, Dv].

        If the plan has a KV cache, the queries also attend to the cached tokens.
        """
        ...

    def run_recurrent(self, module: nn.Module, forward: Forward, hidden: Tensor) -> Tensor:
        """Run the ``forward`` of a recurrent layer over hidden states [T, C]. Return the layer's output [T, C]."""
        ...


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, mask: Tensor | None, causal: bool = False
) -> Tensor:
    """Return attention outputs [B, H, Lq, Dv], given queries [B, H, Lq, D], keys [B, K, Lk, D] and values [B, K, Lk, Dv].

    ``mask`` is added to the scores: its entries are 0 or -inf, and its shape is broadcastable to [B, 1, Lq, Lk]. ``causal``
    applies a causal mask and requires Lq == Lk.
    """
    if layer.explicit or layer.softcap is not None or layer.sinks is not None:
        return _explicit_attention(q, k, v, layer, window_mask(q.shape[2], None, q) if causal else mask)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=layer.scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _explicit_attention(q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, mask: Tensor | None) -> Tensor:
    """Compute attention without a fused kernel. Soft-capping, sinks and the backend ``native`` need this function."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)).float() * layer.scale
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is not None:
        scores = scores + mask
    if layer.sinks is not None:
        sink = layer.sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(v.dtype) @ v


def window_mask(length: int, window: int | None, like: Tensor, first: int = 0) -> Tensor:
    """Return an additive causal mask [length - first, length] of 0 and -inf, in the dtype of ``like``.

    Row i belongs to the query at position ``first + i``. If ``window`` is set, a query sees only the last ``window`` keys,
    including its own.
    """
    rows = torch.arange(first, length, device=like.device)
    columns = torch.arange(length, device=like.device)
    visible = columns[None, :] <= rows[:, None]
    if window is not None:
        visible &= columns[None, :] > rows[:, None] - window
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, float("-inf"))


def _areno_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    areno: AttentionPlan | None = None,
    explicit: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for a layer of ``transformers``: ``query`` [1, H, T, D], ``key`` [1, K, T, D], ``value`` [1, K, T, Dv].

    The result is [1, T, H, Dv].
    """
    if areno is None:
        raise RuntimeError(
            "areno's attention function was called without an attention plan; call the model through areno.engine.model"
        )
    layer = LayerAttention(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        sinks=s_aux,
        softcap=softcap,
        explicit=explicit,
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return areno.attend(layer, q, k, v)[None], None


AttentionInterface.register(IMPLEMENTATIONS["flash"], _areno_attention)
AttentionInterface.register(IMPLEMENTATIONS["native"], functools.partial(_areno_attention, explicit=True))
