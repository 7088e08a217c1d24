"""The policy: a ``transformers`` causal LM, called in two halves.

``body`` turns packed tokens into hidden states; ``logits`` applies the output head to the few rows that somebody reads.
The head is the model class's own ``forward`` with the body replaced by a pass-through, so soft-capped or rescaled logits
(gemma, granite, cohere) need no knowledge here. Rollout and training use both halves; what they disagree on can
therefore only be rounding.
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

# On a CPU: 32 MiB of fp32 logits, large enough for efficient matrix products, small beside any model that needs chunks. Where
# they are kept, larger chunks save passes over the gradient of the head.
CHUNK_ELEMENTS = 8 * 1024 * 1024
KEPT_CHUNK_ELEMENTS = 8 * CHUNK_ELEMENTS


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


class CausalLM(PackedModel):
    """A causal LM behind the two calls that the engine needs."""

    computes_on: str | None = None  # type of the device whose chunks of logits it makes; None is where its weights are
    keeps_logits = False  # on a CPU, what comes from logits waits for the backward pass instead of being computed again

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._head = copy.copy(module)
        self._head._modules = {**module._modules, self._prefix: _PassThrough()}
        self._share: VocabularyShare | None = None
        if (getattr(module, "_tp_size", None) or 1) > 1:
            from areno.engine.parallel.sharding import vocabulary_share  # costs a second to import, and few need it

            self._share = vocabulary_share(module)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, C], in the model's dtype; without gradient where ranks share the vocabulary."""
        logits = self.own_logits(hidden)
        return logits if self._share is None else self._share.whole(logits)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """The logits [N, V of this rank] of hidden states [N, C]: all, unless ranks share the vocabulary."""
        # Not through __call__: hooks of the module are for whole passes, and the copy has them too.
        return self._head.forward(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def logprobs(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        """Log-probs [N] of ``targets`` [N] after hidden [N, C]; never holds more than a chunk of logits.

        With several chunks, backward recomputes each chunk's logits, so memory does not grow with N, unless they are kept.
        """
        return self.logprobs_and_entropy(hidden, targets, temperatures, entropy=False)[0]

    def logprobs_and_entropy(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor, entropy: bool = True, bounds: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`logprobs`; the entropy [N] of each distribution; the least and greatest logit [N, 2] of the whole vocabulary.

        The latter two are without gradient, and empty if they are not wanted.
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
