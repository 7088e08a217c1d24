"""The policy: a ``transformers`` causal LM, split into a body and a head.

``body`` computes hidden states from packed tokens. ``logits`` applies the output head to selected hidden states. The head is a
shallow copy of the model in which the identity replaces the body. The logits are computed by the model's own ``forward`` on
this copy. They are therefore also soft-capped or rescaled if the architecture requires it (Gemma, Granite, Cohere). Rollout and
training use the same body and head. With the same weights, the results of rollout and training differ only by rounding errors.
"""

import copy
import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from areno.engine.model.chunked_head import rows_of_chunk, run_chunks
from areno.engine.model.packed_model import PackedModel
from areno.engine.model.token_logprobs import VocabularyShare, logit_bounds, token_logprobs

# On a CPU: 32 MiB of fp32 logits, enough for efficient matrix products, and little compared with any model that needs chunks.
# If logits are kept for backward, larger chunks save passes over the gradient of the head.
CHUNK_ELEMENTS = 8 * 1024 * 1024
KEPT_CHUNK_ELEMENTS = 8 * CHUNK_ELEMENTS


class _HiddenOnly:
    """The output of a base model, reduced to the hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _PassThrough(nn.Module):
    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _HiddenOnly:
        return _HiddenOnly(inputs_embeds)


class CausalLM(PackedModel):
    """A causal LM with separate methods for hidden states (``body``) and logits (``logits``)."""

    computes_on: str | None = None  # device type that decides the chunk size of logits; None: the model's
    keeps_logits = False  # on a CPU, keep logits for the backward pass instead of recomputing them

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._head = copy.copy(module)
        self._head._modules = {**module._modules, self._prefix: _PassThrough()}
        self._share: VocabularyShare | None = None
        if (getattr(module, "_tp_size", None) or 1) > 1:
            from areno.engine.parallel.sharding import vocabulary_share  # slow import (1 s), rarely needed

            self._share = vocabulary_share(module)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, V] of hidden states [N, C]. If the vocabulary is sharded, the logits have no gradient."""
        logits = self.own_logits(hidden)
        return logits if self._share is None else self._share.whole(logits)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, V] of hidden states [N, C]. If the vocabulary is sharded, V is the size of this rank's slice."""
        # Not through __call__: the head is a copy that shares the module's hooks, which are meant for full passes.
        return self._head.forward(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def logprobs(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        """Return the log-probs [N] of the tokens ``targets`` [N], given hidden states [N, C].

        The logits are computed in chunks of rows. If there are several chunks, the backward pass recomputes the logits of each
        chunk. The memory for logits therefore does not grow with N. However, if the model runs on a CPU and ``keeps_logits`` is
        set, all logits are kept for the backward pass instead of being recomputed.
        """
        return self.logprobs_and_entropy(hidden, targets, temperatures, entropy=False)[0]

    def logprobs_and_entropy(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, entropy: bool = True, bounds: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs [N] as in :meth:`logprobs`, entropies [N], and the minimum and maximum logit of each row [N, 2].

        Only the log-probs have a gradient. Without ``entropy``, the entropies are empty. Without ``bounds``, the minimum and
        maximum logits are empty.
        """
        kind = self.computes_on or self.device.type
        keeps = self.keeps_logits and kind == "cpu" and torch.is_grad_enabled()
        vocab = self.vocab_size if self._share is None else self._share.longest
        rows = rows_of_chunk(vocab, KEPT_CHUNK_ELEMENTS if keeps else CHUNK_ELEMENTS, kind)
        run = functools.partial(self._chunk, entropy=entropy, bounds=bounds)
        if len(targets) <= rows:
            return run(hidden, targets, temperatures)
        if torch.is_grad_enabled() and kind == "cuda" and self._share is None and self.weights.dtype is None:
            weights = [parameter for parameter in self._head.parameters() if parameter.requires_grad]
            return run_chunks(run, (hidden, targets, temperatures), rows, weights)
        chunks = zip(hidden.split(rows), targets.split(rows), temperatures.split(rows), strict=True)
        if torch.is_grad_enabled() and not keeps:
            parts = [cast(Any, checkpoint(run, *chunk, use_reentrant=False)) for chunk in chunks]
        else:
            parts = [run(*chunk) for chunk in chunks]
        logprobs, spreads, extremes = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(spreads), torch.cat(extremes)

    def _chunk(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, entropy: bool, bounds: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.own_logits(hidden)
        extremes = logit_bounds(logits, self._share) if bounds else logits.new_zeros(0)
        return *token_logprobs(logits, targets, temperatures, entropy, self._share), extremes
