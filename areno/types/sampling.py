"""Sampling parameters, and the requests and results of generation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np

    from areno.types.routing import RoutingRecord

MAX_TOP_LOGPROBS = 20

_OPTIONAL = ("max_context_len", "max_prompt_len", "seed")
_KINDS: tuple[tuple[tuple[str, ...], type, str], ...] = (
    (("greedy", "ignore_eos", "skip_special_tokens"), bool, "True or False"),
    (("top_k", "max_new_tokens", "top_logprobs", "min_new_tokens", *_OPTIONAL), Integral, "an integer"),
    (
        ("top_p", "temperature", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        Real,
        "a number",
    ),
)

FinishReason = Literal["stop", "length", "abort"]


def tightest(*limits: int | None) -> int | None:
    """Return the smallest of the limits that are not None; None if there is no such limit."""
    return min((limit for limit in limits if limit is not None), default=None)


class Logprobs(list[float]):
    """A list of log-probs (natural logarithms). ``temperature`` is the temperature of the softmax that gave these log-probs.

    A slice keeps the temperature. A concatenation with another list also keeps the temperature. Exception: if the other list
    is a ``Logprobs`` with a different temperature, the result is a plain list.
    """

    __slots__ = ("temperature",)

    def __init__(self, values: Iterable[float] = (), temperature: float = 1.0) -> None:
        super().__init__(values)
        self.temperature = temperature

    def __add__(self, other: list[Any]) -> list[Any]:
        return self._joined(list(self), other)

    def __radd__(self, other: list[Any]) -> list[Any]:
        return self._joined(other, list(self))

    def _joined(self, first: list[Any], second: list[Any]) -> list[Any]:
        joined = list.__add__(list(first), list(second))
        temperatures = {part.temperature for part in (first, second) if isinstance(part, Logprobs)} | {self.temperature}
        return Logprobs(joined, self.temperature) if len(temperatures) == 1 else joined

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        return Logprobs(item, self.temperature) if isinstance(index, slice) else item

    def copy(self) -> Logprobs:
        """Return a copy with the same temperature."""
        return Logprobs(self, self.temperature)


@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of one rollout request.

    Args:
        greedy: whether to take the most likely token at each position. If true, ``temperature`` has no effect.
        top_p: nucleus threshold, above 0 and at most 1. 1.0 keeps the whole distribution.
        top_k: number of most likely tokens to sample from. -1 means all tokens.
        max_new_tokens: maximum number of tokens to generate, at least 1.
        max_context_len: maximum number of tokens of the prompt and all generated turns together. None: the model's limit.
        temperature: softmax temperature, above 0.
        stop: strings that end generation when they appear in the decoded text, even across token boundaries.
        stop_token_ids: token ids that end generation, in addition to the model's EOS ids.
        ignore_eos: whether to continue after the model's EOS ids. ``stop`` and ``stop_token_ids`` still apply.
        skip_special_tokens: whether to remove special tokens from the decoded text.
        max_prompt_len: maximum prompt length in tokens. Longer prompts are rejected.
        seed: base seed of this request. None: seeds are derived from the trainer's seed.
        min_p: minimum probability of a token, as a fraction of the highest probability. Less likely tokens are dropped.
        presence_penalty: number subtracted from the logits of tokens that are already in the response.
        frequency_penalty: number subtracted from a token's logit for each occurrence in the response.
        repetition_penalty: factor for the logits of tokens in the prompt or response. Positive logits are divided by the
            factor, and negative logits are multiplied by it.
        logit_bias: numbers added to the logits of individual tokens, by token id.
        top_logprobs: number of most likely tokens to return at each position with their log-probs, at most 20.
        min_new_tokens: minimum number of tokens to generate. Until this number is reached, EOS and ``stop_token_ids`` are not
            sampled unless a grammar allows no other token. ``stop`` strings still apply.

    Raises:
        ValueError: a value is outside its documented range.
        TypeError: a value has the wrong type.
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
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    top_logprobs: int = 0
    min_new_tokens: int = 0

    @property
    def logprob_temperature(self) -> float:
        """Temperature of the log-probs, which is 1 for greedy decoding."""
        return 1.0 if self.greedy else self.temperature

    @property
    def edits_logits(self) -> bool:
        """Whether penalties, biases or a minimum length change the sampling distribution."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalties or self.logit_bias or self.min_new_tokens)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self._check_types()
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature must be above 0 and finite, got {self.temperature}; for greedy decoding, use greedy=True"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k must be positive, or -1 for no limit, got {self.top_k}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be from 0 to max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}"
            )
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 to 1, got {self.min_p}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}; 1 means no penalty")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, got {self.top_logprobs}")
        for name, least in (("max_context_len", 2), ("max_prompt_len", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.stop and any(not text for text in self.stop):
            raise ValueError("stop strings must not be empty")

    def _check_types(self) -> None:
        for names, kind, wanted in _KINDS:
            for name in names:
                value: Any = getattr(self, name)
                if value is None and name in _OPTIONAL:
                    continue
                if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                    raise TypeError(f"{name} must be {wanted}, got {value!r}")
                if not math.isfinite(getattr(self, name)):
                    raise ValueError(f"{name} must be finite, got {value}")
        for name, element, wanted in (("stop", str, "strings"), ("stop_token_ids", Integral, "token ids")):
            values = getattr(self, name)
            if values is not None and not (
                isinstance(values, list | tuple) and all(isinstance(value, element) for value in values)
            ):
                raise TypeError(f"{name} must be a list of {wanted}, got {values!r:.80}")
        bias = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, dict) or not all(
            isinstance(token, Integral) and isinstance(value, Real) for token, value in bias.items()
        ):
            raise TypeError(f"logit_bias must be a dict from token ids to numbers, got {bias!r:.80}")
        if not all(map(math.isfinite, bias.values())):
            raise ValueError(f"logit_bias must have finite numbers, got {bias!r:.80}; use -100 to exclude a token")


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One sampled token, as passed to the listener of a request."""

    token: int  # token id
    logprob: float  # natural log-prob under the temperature-scaled policy
    top: list[tuple[int, float]]  # the most likely tokens with their log-probs, if requested
    version: int  # version of the weights that sampled the token
    finish: FinishReason | None  # why the sample ends with this token; None if it continues
    forced: bool = False  # whether a grammar allowed no other token
    cut_mass: float = 0.0  # probability of the tokens removed by top-k, top-p, min-p and a grammar
    # record of the whole sample, set only for its last token
    routed_experts: RoutingRecord | None = field(default=None, compare=False)


class TokenConstraint(Protocol):
    """State of the grammar that constrains one sample."""

    def allowed(self) -> np.ndarray | None:
        """Return which tokens are allowed next, as a boolean array over the vocabulary; None if all tokens are allowed."""
        ...

    def forces(self, token: int) -> bool:
        """Return whether the text of ``token`` must come next. ``token`` must be an allowed token.

        Other tokens may still be allowed, because the same text can be split into tokens in several ways.
        """
        ...

    def push(self, token: int) -> None:
        """Update the state after ``token`` was sampled."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the grammar allows no further text, so that the response must end."""
        ...


@dataclass(slots=True)
class Request:
    """A request for ``n`` samples of a prompt. The prompt is prefilled once.

    Args:
        seeds: one seed per sample. The random numbers of sample i depend only on ``seeds[i]``, not on other requests.
        listener: function that is called in the engine's thread with the index of a sample and each new token of the sample.
            The function must return quickly.
        on_restart: function that is called if the request restarts on another replica, which makes all tokens passed to
            ``listener`` invalid. If None, the request does not restart after its first token was passed to ``listener``.
        constraint: function that takes the engine's tokenizer, and creates the grammar state of one sample. None allows all
            text. If the engine runs in other processes, this function is pickled.
    """

    prompt_tokens: list[int]
    sampling: SamplingParams
    seeds: list[int] = field(default_factory=lambda: [0])
    listener: Callable[[int, GeneratedToken], None] | None = None
    constraint: Callable[[Any], TokenConstraint] | None = None
    on_restart: Callable[[], None] | None = None

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.seeds)

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of the prompt and all samples together."""
        return len(self.prompt_tokens) + self.n * self.sampling.max_new_tokens


@dataclass(slots=True)
class RolloutSequence:
    """One generated response.

    Attributes:
        resp_tokens: sampled token ids. A stop token that ended the response is included.
        resp_logprobs: natural log-prob of each token under the temperature-scaled policy, before top-k and top-p. Stored
            as a :class:`Logprobs`, a list with a temperature, so that :class:`areno.TrainSequence` can read the temperature.
        finish_reason: ``stop`` (EOS, stop token, stop string or end of the grammar), ``length`` (token limit) or ``abort``
            (cancelled).
        text: decoded response, cut before a stop string.
        versions: version of the weights that sampled each token.
        cut_mass: probability mass that top-k, top-p, min-p and a grammar removed together, averaged over the tokens.
        top_logprobs: the most likely tokens at each position, with their log-probs. Empty if not requested.
        temperature: temperature of the log-probs, which is 1 for greedy decoding.
        routed_experts: experts that the routers chose for each token of prompt and response (see :mod:`areno.types.routing`).
            The last token has no entry, because it was not fed to the model. None if expert choices are not recorded.
    """

    resp_tokens: list[int]
    resp_logprobs: list[float]
    finish_reason: FinishReason = "stop"
    text: str = ""
    versions: list[int] = field(default_factory=list)
    cut_mass: float = 0.0
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    temperature: float = 1.0
    routed_experts: RoutingRecord | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.resp_logprobs = Logprobs(self.resp_logprobs, self.temperature)


@dataclass(slots=True)
class RolloutResult:
    """All samples of one prompt."""

    sequences: list[RolloutSequence]
