"""Batches of agent tasks: every prompt once per sample, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from areno.types import PromptBatch


@dataclass(frozen=True, slots=True)
class AgentItem:
    """One task: a prompt and which of its samples this is.

    Attributes:
        record: the source data row.
        prompt: prompt text.
        input_tokens: prompt token ids.
        prompt_index: index of the prompt in the batch.
        sample_index: index of the sample among those of the prompt.
    """

    record: dict[str, Any]
    prompt: str
    input_tokens: list[int]
    prompt_index: int
    sample_index: int


@dataclass(frozen=True, slots=True)
class AgentBatch:
    """Prompts of one step, to be run ``n_samples`` times each; ``len()`` counts tasks.

    Args:
        records: source data rows.
        prompts: prompt texts.
        input_tokens: prompt token ids.
        n_samples: tasks per prompt.

    Raises:
        ValueError: the lists differ in length, or ``n_samples`` is below 1.
    """

    records: list[dict[str, Any]]
    prompts: list[str]
    input_tokens: list[list[int]]
    n_samples: int

    def __post_init__(self) -> None:
        if not len(self.records) == len(self.prompts) == len(self.input_tokens):
            raise ValueError(
                f"AgentBatch has {len(self.records)} records, {len(self.prompts)} prompts and {len(self.input_tokens)} "
                "token lists; they must be equally many"
            )
        if self.n_samples < 1:
            raise ValueError(f"AgentBatch.n_samples must be at least 1, got {self.n_samples}")

    @classmethod
    def from_prompt_batch(cls, prompt_batch: PromptBatch, n_samples: int) -> AgentBatch:
        """Take the prompts of :meth:`areno.Trainer.load_prompt_batches`."""
        items = prompt_batch.items
        return cls([i.record for i in items], [i.prompt for i in items], [i.input_tokens for i in items], n_samples)

    def __len__(self) -> int:
        return len(self.prompts) * self.n_samples

    def iter_samples(self) -> Iterator[AgentItem]:
        """All tasks, the samples of a prompt next to each other."""
        for index, (record, prompt, tokens) in enumerate(
            zip(self.records, self.prompts, self.input_tokens, strict=True)
        ):
            for sample in range(self.n_samples):
                yield AgentItem(record, prompt, tokens, index, sample)

    def only(self, items: Sequence[AgentItem]) -> AgentBatch:
        """A batch of some of the tasks, which keep their indices."""
        return _SomeItems(items)


class _SomeItems(AgentBatch):
    """Single tasks of a batch, to be run again; every one counts as a prompt."""

    __slots__ = ("_items",)
    _items: tuple[AgentItem, ...]

    def __init__(self, items: Sequence[AgentItem]) -> None:
        super().__init__([i.record for i in items], [i.prompt for i in items], [i.input_tokens for i in items], 1)
        object.__setattr__(self, "_items", tuple(items))

    def iter_samples(self) -> Iterator[AgentItem]:
        """The tasks."""
        return iter(self._items)
