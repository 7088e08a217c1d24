"""Inputs and outputs of agents: batches of tasks, and turns that hold the server's responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areno.types import Logprobs, PromptBatch

METADATA = "areno"  # key of a response's token metadata


@dataclass(frozen=True, slots=True)
class AgentItem:
    """One task of an agent. The agent gets ``n_samples`` tasks per prompt, and each task yields one sample."""

    record: dict[str, Any]  # the source data row
    prompt: str
    input_tokens: list[int]  # prompt tokens
    prompt_index: int  # index of the prompt in the batch
    sample_index: int  # index among the samples of the prompt

    @property
    def place(self) -> tuple[int, int]:
        """Prompt index and sample index."""
        return self.prompt_index, self.sample_index


@dataclass(frozen=True, slots=True)
class AgentBatch:
    """The prompts of one step. The agent gets each prompt ``n_samples`` times, as separate tasks. Each task yields one sample.

    ``len()`` is the number of tasks.

    Raises ValueError if ``records``, ``prompts`` and ``input_tokens`` differ in length, or if ``n_samples`` is below 1.
    """

    records: list[dict[str, Any]]  # source data rows
    prompts: list[str]
    input_tokens: list[list[int]]  # token ids of each prompt
    n_samples: int  # tasks per prompt

    def __post_init__(self) -> None:
        if not len(self.records) == len(self.prompts) == len(self.input_tokens):
            raise ValueError(
                f"AgentBatch has {len(self.records)} records, {len(self.prompts)} prompts and {len(self.input_tokens)} "
                "token lists; the numbers must be equal"
            )
        if self.n_samples < 1:
            raise ValueError(f"AgentBatch.n_samples must be at least 1, got {self.n_samples}")

    @classmethod
    def from_prompt_batch(cls, prompt_batch: PromptBatch, n_samples: int) -> AgentBatch:
        """Create a batch from the prompts of :meth:`areno.Trainer.load_prompt_batches`."""
        items = prompt_batch.items
        return cls([i.record for i in items], [i.prompt for i in items], [i.input_tokens for i in items], n_samples)

    def __len__(self) -> int:
        return len(self.prompts) * self.n_samples

    def iter_samples(self) -> Iterator[AgentItem]:
        """Yield all tasks (one per sample), grouped by prompt."""
        for index, prompt in enumerate(zip(self.records, self.prompts, self.input_tokens, strict=True)):
            for sample in range(self.n_samples):
                yield AgentItem(*prompt, index, sample)

    def only(self, items: Sequence[AgentItem]) -> AgentBatch:
        """Return a batch with only the tasks in ``items``. The tasks keep their ``prompt_index`` and ``sample_index``."""
        return _TaskSubset(items)


class _TaskSubset(AgentBatch):
    """Some tasks of another batch. A prompt with several tasks occurs several times in ``prompts``, and ``n_samples`` is 1."""

    __slots__ = ("_items",)
    _items: tuple[AgentItem, ...]

    def __init__(self, items: Sequence[AgentItem]) -> None:
        super().__init__([i.record for i in items], [i.prompt for i in items], [i.input_tokens for i in items], 1)
        object.__setattr__(self, "_items", tuple(items))

    def iter_samples(self) -> Iterator[AgentItem]:
        return iter(self._items)


@dataclass(slots=True)
class AgentTrajectoryTurn:
    """One answer of the model, with its request.

    If the field ``response`` is set, ``response_tokens``, ``response_logprobs`` and ``parsed_tool_calls`` are taken from it.

    Raises ValueError if the numbers of tokens and log-probs differ, or if ``response`` has no token metadata. Only
    responses from a rollout session have token metadata.
    """

    item: AgentItem  # task of the turn
    messages: list[dict[str, Any]]  # request messages, in OpenAI's format
    response: Any = None  # the server's response or the last chunk of a stream, as an object of the client or a mapping
    response_tokens: list[int] = field(default_factory=list)  # sampled token ids
    response_logprobs: list[float] = field(default_factory=list)
    parsed_tool_calls: list[Any] = field(default_factory=list)  # tool calls of the response, in OpenAI's format
    model: str = "policy"
    tools: list[dict[str, Any]] = field(default_factory=list)  # tools of the request
    tool_choice: Any = None  # tool choice of the request
    reward: float | None = None  # the environment's reward for this turn; see `--turn-discount`

    def __post_init__(self) -> None:
        if self.response is not None:
            metadata = _metadata_of(self.response)
            self.response_tokens = list(metadata["response_tokens"])
            self.response_logprobs = list(metadata["response_logprobs"])
            if "temperature" in metadata:
                self.response_logprobs = Logprobs(self.response_logprobs, metadata["temperature"])
            choices = _get(self.response, "choices") or [None]
            self.parsed_tool_calls = list(_get(_get(choices[0], "message"), "tool_calls") or [])
        if len(self.response_tokens) != len(self.response_logprobs):
            raise ValueError(
                f"AgentTrajectoryTurn has {len(self.response_tokens)} response tokens and {len(self.response_logprobs)} "
                "log-probs; the numbers must be equal"
            )

    @property
    def turn_id(self) -> str | None:
        """Id of the recorded turn; None if ``response`` is not set."""
        return None if self.response is None else str(_metadata_of(self.response).get("turn"))


@dataclass(slots=True)
class AgentTrajectory:
    """Turns of one or more tasks. Each turn contains its task (``item``)."""

    turns: list[AgentTrajectoryTurn] = field(default_factory=list)


def _metadata_of(response: Any) -> Mapping[str, Any]:
    metadata = _get(response, METADATA)
    if not isinstance(metadata, Mapping) or "response_tokens" not in metadata or "response_logprobs" not in metadata:
        raise ValueError(
            f"the response ({type(response).__name__}) does not include Areno trajectory metadata (key {METADATA!r}): "
            "send requests to ctx.get_base_url() with ctx.api_key, and return the responses unchanged"
        )
    return metadata


def _get(value: Any, name: str) -> Any:
    """Return the field ``name`` of ``value``, or None if ``value`` has no such field.

    ``value`` is a mapping or an object of the OpenAI client. Fields that the client's class does not declare are also found.
    """
    if isinstance(value, Mapping):
        return value.get(name)
    return (getattr(value, "model_extra", None) or {}).get(name, getattr(value, name, None))
