"""An objective that needs no generation, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import Tensor

from areno.loss_fns.pack import LossFn
from areno.loss_fns.units import Names, with_names
from areno.training.row_checks import Needs
from areno.types import TrainSequence

Example = list[TrainSequence]


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
        needs: what a row must have.
        build: ``build(rows, tokenizer, eos_token_ids=..., **bounds)`` gives the sequences of each example that can be used,
            and how many rows were dropped.
        loss_fn: made by :func:`areno.loss_fns.units.mean_loss`.
        names: its statistics in an experiment, without the section.
        held_out: what ``areno train`` reports of held-out rows, beside ``loss``: statistics of the loss by short name.
        sequences: of an example, which lie side by side and are never parted.
    """

    needs: Needs
    build: Callable[..., tuple[Sequence[Any], int]]
    loss_fn: LossFn
    names: Names
    held_out: Mapping[str, str]
    sequences: int = 1

    def encode(
        self, rows: Sequence[Mapping[str, Any]], tokenizer: Any, eos_token_ids: frozenset[int], **bounds: Any
    ) -> tuple[Examples, int]:
        """Tokenize rows of a data set.

        Args:
            rows: anything with ``len()`` and integer indexing.
            tokenizer: a ``transformers`` tokenizer.
            eos_token_ids: ids that end an answer.
            bounds: bounds of the lengths, and what errors call data and settings; see :func:`build_sft_rows`.

        Returns:
            What can be used, in order, and how many rows cannot.

        Raises:
            DataError: a row is malformed, or none can be used.
        """
        built, dropped = self.build(rows, tokenizer, eos_token_ids=eos_token_ids, **bounds)
        return Examples(list(built) if self.sequences == 1 else sequences(built), self.sequences), dropped

    @property
    def unit(self) -> str:
        """What examples are called in log lines."""
        return "rows" if self.sequences == 1 else "pairs"

    def experiment_loss(self, **options: Any) -> LossFn:
        """The loss with the statistics of experiments; ``options`` are those of the loss."""
        return with_names(self.loss_fn, self.names, **options)
