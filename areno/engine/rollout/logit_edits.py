"""Edit the logits of a sample before sampling: penalties, biases, minimum lengths and grammars."""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from areno.types import SamplingParams, TokenConstraint


class LogitEdits:
    """Logit edits of one sample.

    The grammar (``constraint``) may be third-party code. If this code raises an exception, ``error`` holds the exception, and
    only the sample's request fails. Prompt tokens count towards the repetition penalty. The tokens ``stop_ids`` are forbidden
    until the sample has its minimum length, unless the grammar allows no other tokens.

    Attributes:
        forced: whether the text of the last sampled token was the only text that the grammar allowed.
        cut_mass: total probability of the tokens that the grammar excluded at the last step, under the temperature-scaled
            policy.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        constraint: TokenConstraint | None,
        stop_ids: Collection[int] = (),
    ) -> None:
        self.constraint = constraint
        self.forced, self.cut_mass = False, 0.0
        self.error: Exception | None = None
        self._params = params
        self._prompt = list(prompt)
        self._stop_ids, self._length = sorted(stop_ids), 0
        self._state: tuple[Tensor, Tensor, Tensor] | None = None  # per token: times sampled, whether seen, bias

    def push(self, token: int) -> None:
        """Record a sampled token."""
        self._length += 1
        if self._state is not None:
            counts, seen, _ = self._state
            counts[token] += 1
            seen[token] = True
        self.forced = False
        if self.constraint is not None and self.error is None:
            try:
                self.forced = self.constraint.forces(token)
                self.constraint.push(token)
            except Exception as error:
                self.error = error

    def apply(self, logits: Tensor) -> Tensor:
        """Return the edited logits [V] in fp32."""
        edited = logits.float()
        if self._params.edits_logits:
            edited = self._penalized(edited)
        allowed = self._allowed()
        if self._length < self._params.min_new_tokens:
            stops = [token for token in self._stop_ids if token < len(edited)]
            if allowed is None or np.delete(allowed, [token for token in stops if token < len(allowed)]).any():
                forbidden = torch.tensor(stops, device=edited.device, dtype=torch.int64)
                edited = edited.index_fill(0, forbidden, float("-inf"))
        self.cut_mass = 0.0
        if allowed is not None:
            mask = torch.from_numpy(allowed).to(logits.device)[: logits.shape[0]]
            mask = torch.nn.functional.pad(mask, (0, len(logits) - len(mask)))
            allowed_mass = (logits.float() / self._params.logprob_temperature).softmax(-1)[mask].sum()
            self.cut_mass = max(1.0 - float(allowed_mass), 0.0)
            edited = edited.masked_fill(~mask, float("-inf"))
        return edited

    @property
    def finished(self) -> bool:
        """Whether the grammar allows only the end of text."""
        return self.constraint is not None and self.error is None and self.constraint.finished

    def _allowed(self) -> np.ndarray | None:
        if self.constraint is None or self.error is not None:
            return None
        try:
            return self.constraint.allowed()
        except Exception as error:
            self.error = error
            return None

    def _penalized(self, logits: Tensor) -> Tensor:
        params = self._params
        if self._state is None:
            self._state = self._start(logits)
        counts, seen, bias = self._state
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        penalty = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        return logits - penalty + bias

    def _start(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counts, bias = torch.zeros_like(logits), torch.zeros_like(logits)
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        seen[torch.tensor(self._prompt, device=logits.device)] = True
        if biases := self._params.logit_bias:
            biased_ids = torch.tensor([int(token) for token in biases], device=logits.device)
            bias[biased_ids] = torch.tensor(list(biases.values()), device=logits.device, dtype=logits.dtype)
        return counts, seen, bias
