"""How one request is sampled, and what a request and its answer carry through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class SamplingParams:
    """Generation controls of one rollout request.

    Args:
        greedy: take the most likely token; overrides ``temperature``.
        top_p: nucleus threshold in (0, 1]; 1.0 keeps the whole distribution.
        top_k: keep the k most likely tokens; -1 keeps all.
        max_new_tokens: most tokens to generate, at least 1.
        max_context_len: cap on prompt plus all generated turns, in tokens; None is the model's own limit.
        temperature: softmax temperature, above 0.
        stop: strings that end generation as soon as they appear in the decoded text, also across token borders.
        stop_token_ids: token ids that end generation, besides the model's EOS ids.
        ignore_eos: do not end at the model's EOS ids (``stop`` and ``stop_token_ids`` still end).
        skip_special_tokens: leave special tokens out of the decoded text.
        max_prompt_len: refuse prompts longer than this, in tokens.
        seed: makes this request reproducible on its own; None derives a seed from the engine's.

    Raises:
        ValueError: a value is outside its documented range.
    """

    greedy: bool = False
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 16
    max_context_len: int | None = None
    temperature: float = 1.0
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    max_prompt_len: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(
                f"temperature must be above 0, got {self.temperature}; for the most likely token use greedy=True"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k must be positive, or -1 for no limit, got {self.top_k}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.stop and any(not text for text in self.stop):
            raise ValueError("stop strings must not be empty")


@dataclass(slots=True)
class Request:
    """One prompt to be continued ``n`` times; the prompt is prefilled once for all of them.

    ``seeds`` has one entry per sample; sample i draws from ``seeds[i]`` alone, whatever else is in the batch.
    """

    prompt_tokens: list[int]
    sampling: SamplingParams
    seeds: list[int] = field(default_factory=lambda: [0])

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.seeds)


@dataclass(slots=True)
class RolloutSequence:
    """One generated response.

    Attributes:
        resp_tokens: sampled token ids; a stop token, where one ended the response, is the last of them.
        resp_logprobs: natural log-probability of each token under the temperature-scaled policy (not filtered by top-k/top-p).
        finish_reason: ``stop`` (EOS, stop token or stop string), ``length`` (token limit) or ``abort`` (cancelled).
        text: decoded response, cut before a stop string.
        versions: weight version that made each token.
        cut_mass: mean probability that top-k and top-p removed, per token.
    """

    resp_tokens: list[int]
    resp_logprobs: list[float]
    finish_reason: FinishReason = "stop"
    text: str = ""
    versions: list[int] = field(default_factory=list)
    cut_mass: float = 0.0


@dataclass(slots=True)
class RolloutResult:
    """All samples of one prompt."""

    sequences: list[RolloutSequence]
