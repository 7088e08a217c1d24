"""The samples and requests of the rollout loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areno.engine.rollout.drafts import DraftIndex
from areno.engine.rollout.logit_edits import LogitEdits
from areno.errors import EngineError, GrammarError
from areno.text.stop import StopChecker
from areno.types import FinishReason, GeneratedToken, Request, RolloutResult, RolloutSequence, SamplingParams
from areno.types.routing import RoutingRecord

Listener = Callable[[int, GeneratedToken], None]


@dataclass(slots=True, eq=False)
class SampleGroup:
    """The samples of one request. All samples have the same prompt, and ``future`` returns their results."""

    prompt: list[int]
    sampling: SamplingParams
    stop_ids: frozenset[int]
    future: Future[RolloutResult]
    listener: Listener | None = None
    members: list[Sequence] = field(default_factory=list)
    unfinished: int = 0
    closing: Callable[[Sequence], None] | None = None  # called with a finished sample before its listener

    @classmethod
    def of(
        cls,
        request: Request,
        eos_ids: frozenset[int],
        tokenizer: Any,
        closing: Callable[[Sequence], None] | None = None,
    ) -> SampleGroup:
        """Create the samples of a request. ``tokenizer`` is used for stop strings and grammars."""
        sampling = request.sampling
        stop_ids = frozenset(sampling.stop_token_ids or ()) | (frozenset() if sampling.ignore_eos else eos_ids)
        group = cls(request.prompt_tokens, sampling, stop_ids, Future(), request.listener, closing=closing)
        for index, seed in enumerate(request.seeds):
            watcher = StopChecker(tokenizer, sampling.stop, sampling.skip_special_tokens) if sampling.stop else None
            constraint = request.constraint(tokenizer) if request.constraint is not None else None
            edited = constraint is not None or sampling.edits_logits
            edits = LogitEdits(sampling, request.prompt_tokens, constraint, stop_ids) if edited else None
            group.members.append(Sequence(group, seed, index, watcher, edits))
        group.unfinished = len(group.members)
        group.future.set_running_or_notify_cancel()  # the caller can no longer cancel it; only the loop resolves it
        return group


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """The prefill of a context for one or more samples.

    The cache slots of these samples hold the same keys and values for the first ``length`` tokens.
    """

    length: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample, with its current output. ``slot`` is the sample's cache slot; -1 means no slot."""

    group: SampleGroup
    seed: int
    index: int = 0
    stop_text: StopChecker | None = None
    edits: LogitEdits | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    cut_mass: float = 0.0
    finish: FinishReason | None = None
    slot: int = -1
    prefill: Prefill | None = None
    drafts: DraftIndex | None = None
    routed: list[RoutingRecord] = field(default_factory=list)  # recorded expert choices, to be concatenated

    @property
    def length(self) -> int:
        """Number of prompt and output tokens."""
        return len(self.group.prompt) + len(self.output)

    @property
    def context(self) -> list[int]:
        """The prompt and output tokens."""
        return self.group.prompt + self.output

    @property
    def last_token(self) -> int:
        """The token that the next decode step feeds to the model."""
        return self.output[-1] if self.output else self.group.prompt[-1]

    def push(
        self, token: int, logprob: float, cut_mass: float, version: int, top: list[tuple[int, float]] | None = None
    ) -> bool:
        """Append a sampled token. Return whether the token ends the sample."""
        self.output.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if (edits := self.edits) is not None:
            edits.push(token)
            cut_mass = 1.0 - (1.0 - edits.cut_mass) * (1.0 - cut_mass)
        self.cut_mass += cut_mass
        if top is not None:
            self.top.append(top)
        stopped_by_text = self.stop_text is not None and self.stop_text.push(token)
        done_by_grammar = edits is not None and edits.finished
        if stopped_by_text or token in self.group.stop_ids or done_by_grammar:
            self.finish = "stop"
        elif len(self.output) >= self.group.sampling.max_new_tokens:
            self.finish = "length"
        if self.finish is not None and self.group.closing is not None:
            self.group.closing(self)
        if self.group.listener is not None:
            routed = self.routed_experts() if self.finish is not None else None
            forced = edits is not None and edits.forced
            event = GeneratedToken(token, logprob, top or [], version, self.finish, forced, cut_mass, routed)
            self.group.listener(self.index, event)
        return self.finish is not None

    def routed_experts(self) -> RoutingRecord | None:
        """Return the recorded expert choices of the sample's tokens; None if no choices are recorded."""
        return np.concatenate(self.routed) if self.routed else None

    def answer(self) -> RolloutSequence:
        """Return the sample as an entry of the request's :class:`RolloutResult`."""
        return RolloutSequence(
            resp_tokens=self.output,
            resp_logprobs=self.logprobs,
            finish_reason=self.finish or "abort",
            text=self.stop_text.text if self.stop_text is not None else "",
            versions=self.versions,
            cut_mass=self.cut_mass / max(len(self.output), 1),
            top_logprobs=self.top,
            temperature=self.group.sampling.logprob_temperature,
            routed_experts=self.routed_experts(),
        )


@dataclass(slots=True)
class LoopCommands:
    """Commands that the loop applies at the start of its next iteration.

    If ``pause`` is true, the loop pauses until the weights have changed. ``prefix_tokens`` and ``max_running`` are new limits
    (see :meth:`RolloutLoop.set_limits`); None keeps a limit.
    """

    arrived: list[SampleGroup] = field(default_factory=list)
    cancel_all: bool = False
    cancelled: list[SampleGroup] = field(default_factory=list)
    pause: bool = False
    prefix_tokens: int | None = None
    max_running: int | None = None

    def __bool__(self) -> bool:
        return self != LoopCommands()


@dataclass(slots=True)
class DecodeOutcome:
    """The outcome of a decode step: the finished samples, and the failed requests with their errors."""

    done: list[Sequence] = field(default_factory=list)
    failed: dict[SampleGroup, EngineError] = field(default_factory=dict)
    finite: bool = True  # whether all logits were finite

    def continues(self, sequence: Sequence) -> bool:
        """Return whether a sample has neither finished nor failed."""
        return sequence.finish is None and sequence.group not in self.failed


def grammar_errors(sequences: list[Sequence]) -> dict[SampleGroup, GrammarError]:
    """Return the requests whose grammar has raised an exception, and the error of each request."""
    causes = {s.group: s.edits.error for s in sequences if s.edits is not None and s.edits.error is not None}
    errors = {}
    for group, error in causes.items():
        errors[group] = GrammarError(f"the grammar of a request failed: {type(error).__name__}: {error}")
        errors[group].__cause__ = error
    return errors
