"""Supervised objectives, which need no generation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from torch import Tensor

from areno.errors import DataError
from areno.loss_fns.loss_interface import LossFn
from areno.loss_fns.units import Names, with_names
from areno.text.data_rows import LOADER_OPTION, answer_of, named_row, pair_row, response_of, sft_row, text_or_messages
from areno.types import TrainSequence

Needs = Literal["prompt", "response", "pair"]
Example = list[TrainSequence]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBounds:
    """Settings for converting dataset rows to training rows: length limits, and texts for error messages."""

    max_prompt_tokens: int  # maximum prompt length in tokens
    max_new_tokens: int  # maximum answer length in tokens, including EOS
    eos_token_ids: frozenset[int]  # ids that end an answer; an answer that ends with none of them gets an EOS token
    context_limit: int | None = None  # maximum tokens of prompt and answer together
    source: str = ""  # name of the data in error messages
    disable_thinking: bool = False  # see :func:`areno.text.chat.render_generation_prompt`
    loader: str = LOADER_OPTION  # name of the option for a loader
    limits: str = ""  # description of the limits; if empty, the options of ``areno train`` are named

    def none_left(self, rows: int, shortest: str, flags_note: str = "") -> DataError:
        """Return the error for a dataset without usable rows."""
        flags = f"--max-prompt-tokens {self.max_prompt_tokens} and --max-new-tokens {self.max_new_tokens}{flags_note}"
        if self.context_limit is not None:
            flags += f" in a context of {self.context_limit} tokens (limit of the model or of --max-context-len)"
        used = f"none of {rows} rows can be used with {self.limits or flags}"
        return DataError(f"{named_row(self.source)}{used}: {shortest}")


class Examples(Sequence[Example]):
    """Rows grouped into examples of ``size`` adjacent rows. An example is a single row or the two rows of a pair.

    Args:
        rows: the sequences of all examples, without ``ref_logprobs``.
        size: number of sequences per example.
        ref_logprobs: reference log-probs of the trained tokens of all rows, in order; None without a reference. To save
            memory, a row's log-probs become a list only when the row is accessed.
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
        logprobs = iter(self._ref_logprobs[self._starts[index] : self._starts[index + 1]].tolist())
        return replace(row, ref_logprobs=[next(logprobs) if trained else 0.0 for trained in row.trainable()])


def sequences(examples: Iterable[Sequence[TrainSequence]]) -> list[TrainSequence]:
    """Return the rows of all examples as one list."""
    return [row for example in examples for row in example]


@dataclass(frozen=True, slots=True)
class Objective:
    """A supervised objective: how dataset rows become training sequences, and the loss on these sequences.

    Each usable dataset row becomes one example. An example is one sequence, or the two sequences of a pair.

    Attributes:
        build: function that returns the sequences of each example, and the number of dropped rows.
        held_out: statistics that ``areno train`` reports for held-out rows, in addition to the loss. Maps the reported name of
            each statistic to the name under which the loss function returns it.
    """

    needs: Needs  # what a row must have: a prompt, a prompt with a response, or a pair
    build: Callable[[Sequence[Mapping[str, Any]], Any, RowBounds], tuple[Sequence[Any], int]]
    loss_fn: LossFn  # made by :func:`areno.loss_fns.units.mean_loss`
    names: Names  # names of the loss statistics in an experiment, without the section
    held_out: Mapping[str, str]
    sequences: int = 1  # number of sequences per example, which are adjacent and never split

    def encode(self, rows: Sequence[Mapping[str, Any]], tokenizer: Any, bounds: RowBounds) -> tuple[Examples, int]:
        """Tokenize the usable rows, in order, and count the dropped rows. Raises DataError for a malformed row."""
        built, dropped = self.build(rows, tokenizer, bounds)
        return Examples(list(built) if self.sequences == 1 else sequences(built), self.sequences), dropped

    @property
    def unit(self) -> str:
        """The noun for examples in log lines: ``rows`` or ``pairs``."""
        return "rows" if self.sequences == 1 else "pairs"

    def experiment_loss(self, **options: Any) -> LossFn:
        """Return the loss function for ``areno run``. Its statistics have the metric names that ``areno run`` reports.

        ``options`` are passed to the loss function.
        """
        return with_names(self.loss_fn, self.names, **options)


def row_problem(needs: Needs, row: Mapping[str, Any], source: str, loader: str = LOADER_OPTION) -> str:
    """Return an error message if ``row``, the first row of ``source``, is invalid; otherwise, return an empty string.

    ``loader`` is the option that sets a dataset loader; the message may suggest this option.
    """
    try:
        if needs == "pair":
            row = pair_row(row, with_template=True)
            answers = [answer_of(row, key, source, 0, loader) for key in ("chosen", "rejected")]
            if any(isinstance(answer, str) for answer in answers):
                text_or_messages(row, "prompt", source, 0, loader)
            return ""
        row = sft_row(row, source, 0, loader) if needs == "response" else row
        text_or_messages(row, "prompt", source, 0, loader)
        if needs == "response":
            response_of(row, source, 0, loader)
    except DataError as error:
        return str(error)
    return ""
