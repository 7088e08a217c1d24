"""The policy: a ``transformers`` causal LM, called in two halves.

``body`` turns packed tokens into hidden states; ``logits`` applies the output head to the few rows that somebody reads.
The head is the model class's own ``forward`` with the body replaced by a pass-through, so soft-capped or rescaled logits
(gemma, granite, cohere) need no knowledge here. Rollout and training use both halves and the one log-prob function
:func:`token_logprobs`; what they disagree on can therefore only be rounding.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from areno.engine.model.attention import AttentionPlan

# 32 MiB of fp32 logits: large enough for efficient matrix products, small beside any model that needs chunks.
CHUNK_ELEMENTS = 8 * 1024 * 1024


class _HiddenOnly:
    """A base model's output that carries hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _PassThrough(nn.Module):
    """Stands in for the body: returns the embeddings it is given as its hidden states."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _HiddenOnly:
        return _HiddenOnly(inputs_embeds)


class CausalLM:
    """A causal LM behind the two calls that the engine needs.

    Args:
        module: any ``transformers`` ``*ForCausalLM``; its attention implementation must be areno's.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        prefix = cast(str, module.base_model_prefix)
        self._body = cast(nn.Module, getattr(module, prefix))
        self._head = copy.copy(module)
        self._head._modules = {**module._modules, prefix: _PassThrough()}

    @property
    def config(self) -> Any:
        """The ``transformers`` configuration."""
        return self.module.config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type that the weights compute in."""
        return next(self.module.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def context_length(self) -> int | None:
        """Most positions the model was made for, where its configuration says so."""
        value = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return int(value) if value else None

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters by name, tied ones once."""
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def body(self, tokens: Tensor, position_ids: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden states [T, C] of tokens [T] at positions [T], attending as ``plan`` says."""
        out = self._body(input_ids=tokens[None], position_ids=position_ids[None], use_cache=False, areno=plan)
        return out.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, C], in the model's dtype."""
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def logprobs(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        """Log-probs [N] of ``targets`` [N] after hidden [N, C]; never holds more than a chunk of logits.

        With several chunks, backward recomputes each chunk's logits, so memory does not grow with N.
        """
        rows = max(CHUNK_ELEMENTS // self.vocab_size, 1)
        if len(targets) <= rows:
            return self._chunk_logprobs(hidden, targets, temperatures)
        chunks = zip(hidden.split(rows), targets.split(rows), temperatures.split(rows), strict=True)
        if not torch.is_grad_enabled():
            return torch.cat([self._chunk_logprobs(*chunk) for chunk in chunks])
        return torch.cat(
            [cast(Tensor, checkpoint(self._chunk_logprobs, *chunk, use_reentrant=False)) for chunk in chunks]
        )

    def _chunk_logprobs(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        return token_logprobs(self.logits(hidden), targets, temperatures)


class _TokenLogprobs(torch.autograd.Function):
    """Log-softmax at one index per row; backward fills one buffer where autograd would make five of the logits' size."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
        scaled = scale_logits(logits, temperatures)
        normaliser = scaled.logsumexp(-1)
        ctx.save_for_backward(scaled, normaliser, tokens, temperatures)
        ctx.dtype = logits.dtype
        return scaled.gather(-1, tokens[:, None])[:, 0] - normaliser

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        scaled, normaliser, tokens, temperatures = ctx.saved_tensors
        weight = (grad / temperatures)[:, None]
        gradient = (scaled - normaliser[:, None]).exp_().mul_(-weight)
        return gradient.scatter_add_(-1, tokens[:, None], weight).to(ctx.dtype), None, None


def token_logprobs(logits: Tensor, tokens: Tensor, temperatures: Tensor) -> Tensor:
    """Log-probs [N] of ``tokens`` [N] under softmax(logits [N, V] / temperatures [N]), in fp32."""
    return _TokenLogprobs.apply(logits, tokens, temperatures)


def scale_logits(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Logits [N, V] divided by each row's temperature, in fp32."""
    return logits.float() / temperatures[:, None]
