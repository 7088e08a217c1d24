"""Penalties, biases and grammars: what changes the logits of single samples before they are drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from areno.types import SamplingParams, TokenConstraint


class LogitEdits:
    """State of one sample.

    Args:
        params: penalties and biases.
        prompt: its token ids; they count for the repetition penalty.
        constraint: grammar of this sample.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], constraint: TokenConstraint | None) -> None:
        self.constraint = constraint
        self._params = params
        self._prompt = list(prompt)
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        self._bias: Tensor | None = None

    def push(self, token: int) -> None:
        """A token was sampled."""
        if self._counts is not None and self._seen is not None:
            self._counts[token] += 1
            self._seen[token] = True
        if self.constraint is not None:
            self.constraint.push(token)

    def apply(self, logits: Tensor) -> Tensor:
        """Edited copy of logits [V], in fp32."""
        edited = logits.float()
        if self._params.edits_logits:
            edited = self._penalised(edited)
        allowed = self.constraint.allowed() if self.constraint is not None else None
        if allowed is not None:
            mask = torch.from_numpy(allowed).to(logits.device)[: logits.shape[0]]
            edited = edited.masked_fill(~torch.nn.functional.pad(mask, (0, len(logits) - len(mask))), float("-inf"))
        return edited

    def _penalised(self, logits: Tensor) -> Tensor:
        params = self._params
        if self._bias is None:
            self._start(logits)
        assert self._counts is not None
        assert self._seen is not None
        assert self._bias is not None
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            logits = torch.where(self._seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        penalty = params.frequency_penalty * self._counts + params.presence_penalty * (self._counts > 0)
        return logits - penalty + self._bias

    def _start(self, logits: Tensor) -> None:
        self._counts = torch.zeros_like(logits)
        self._seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        self._seen[torch.tensor(self._prompt, device=logits.device)] = True
        self._bias = torch.zeros_like(logits)
        for token, bias in (self._params.logit_bias or {}).items():
            self._bias[int(token)] = bias
