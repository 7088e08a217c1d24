"""An objective that needs no generation, as data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from torch import Tensor

from areno.errors import DataError
from areno.loss_fns.pack import LossFn
from areno.loss_fns.units import Names, with_names
from areno.text.data_rows import LOADER_OPTION, answer_of, named_row, pair_row, response_of, sft_row, text_or_messages
from areno.types import TrainSequence

Needs = Literal["prompt", "response", "pair"]
Example = list[TrainSequence]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBounds:
    """Which rows of a data set can be used, and what errors call the data and its settings."""

    max_prompt_tokens: int  # longest accepted prompt, in tokens
    max_new_tokens: int  # longest accepted answer, in tokens, EOS included
    eos_token_ids: frozenset[int]  # ids that end an answer; the tokenizer's own one, if any, is appended
    context_limit: int | None = None  # most tokens of prompt and answer together
    source: str = ""  # what error messages call the data
    disable_thinking: bool = False  # see :func:`areno.text.chat.render_generation_prompt`
    loader: str = LOADER_OPTION  # setting that names a loader
    limits: str = ""  # settings that bound a row; empty names the options of ``areno train``

    def none_left(self, rows: int, shortest: str, flags_note: str = "") -> DataError:
        """The error where none of so many rows can be used."""
        flags = f"--max-prompt-tokens {self.max_prompt_tokens} and --max-new-tokens {self.max_new_tokens}{flags_note}"
        if self.context_limit is not None:
            flags += f" in a context of {self.context_limit} tokens (the model's, or --max-context-len)"
        used = f"none of {rows} rows can be used with {self.limits or flags}"
        return DataError(f"{named_row(self.source)}{used}: {shortest}")


class Examples(Sequence[Example]):
    """Rows as examples of equally many neighbours: the two sides of a pair, or one row each.

    Args:
        rows: all sequences, end to end, without ``ref_logprobs``.
        size: sequences of an example.
        ref_logprobs: of each trained token of all rows, in order [trained tokens]; a row gets its own when it is taken, and
            until then a token costs four bytes. None gives them none.
    """

    def __init__(self, rows: Sequence[TrainSequence], size: int, ref_logprobs: Tensor | None = None) -> None:
        self.rows, self.size, self._ref_logprobs = rows, size, ref_logprobs
        counted = [] if ref_logprobs is None else rows
        self._starts = [0, *accumulate(sum(row.trainable()) for row in counted)]

    def __len__(self) -> int:
        return len(self.rows) // self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        first = range(len(self))[index] * self.size
        return [self._row(i) for i in range(first, first + self.size)]

    def _row(self, index: int) -> TrainSequence:
        row = self.rows[index]
        if self._ref_logprobs is None:
            return row
        own = iter(self._ref_logprobs[self._starts[index] : self._starts[index + 1]].tolist())
        return replace(row, ref_logprobs=[next(own) if trained else 0.0 for trained in row.trainable()])


def sequences(examples: Iterable[Sequence[TrainSequence]]) -> list[TrainSequence]:
    """The rows of examples, end to end."""
    return [row for example in examples for row in example]


@dataclass(frozen=True, slots=True)
class Objective:
    """What is learnt from the rows of a data set.

    Attributes:
        build: gives the sequences of each example that can be used, and how many rows were dropped.
        held_out: what ``areno train`` reports of held-out rows, beside ``loss``: statistics of the loss by short name.
    """

    needs: Needs  # what a row must have
    build: Callable[[Sequence[Mapping[str, Any]], Any, RowBounds], tuple[Sequence[Any], int]]
    loss_fn: LossFn  # made by :func:`areno.loss_fns.units.mean_loss`
    names: Names  # its statistics in an experiment, without the section
    held_out: Mapping[str, str]
    sequences: int = 1  # of an example, which lie side by side and are never parted

    def encode(self, rows: Sequence[Mapping[str, Any]], tokenizer: Any, bounds: RowBounds) -> tuple[Examples, int]:
        """The usable rows, tokenized, in order, and the number of others; :class:`DataError` for a malformed one."""
        built, dropped = self.build(rows, tokenizer, bounds)
        return Examples(list(built) if self.sequences == 1 else sequences(built), self.sequences), dropped

    @property
    def unit(self) -> str:
        """What examples are called in log lines."""
        return "rows" if self.sequences == 1 else "pairs"

    def experiment_loss(self, **options: Any) -> LossFn:
        """The loss with the statistics of experiments; ``options`` are those of the loss."""
        return with_names(self.loss_fn, self.names, **options)


def row_problem(needs: Needs, row: Mapping[str, Any], source: str, loader: str = LOADER_OPTION) -> str:
    """Say what the first row of ``source`` lacks, if anything; ``loader`` is the option that brings rows into shape."""
    try:
        if needs == "pair":
            row = pair_row(row, with_template=True)
            answers = [answer_of(row, key, source, 0, loader) for key in ("chosen", "rejected")]
            if any(isinstance(answer, str) for answer in answers):
                text_or_messages(row, "prompt", source, 0, loader)
            return ""
        row = sft_row(row) if needs == "response" else row
        text_or_messages(row, "prompt", source, 0, loader)
        if needs == "response":
            response_of(row, source, 0, loader)
    except DataError as error:
        return str(error)
    return ""
