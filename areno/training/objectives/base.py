"""An objective that needs no generation, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from areno.loss_fns.pack import LossFn
from areno.loss_fns.units import Names, with_names
from areno.training.row_checks import Needs
from areno.types import TrainSequence

Example = list[TrainSequence]


class Examples(Sequence[Example]):
    """Rows as examples of equally many neighbours: the two sides of a pair, or one row each.

    Args:
        rows: all sequences, end to end.
        size: sequences of an example.
    """

    def __init__(self, rows: Sequence[TrainSequence], size: int) -> None:
        self.rows, self.size = rows, size

    def __len__(self) -> int:
        return len(self.rows) // self.size

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        first = range(len(self))[index] * self.size
        return [self.rows[first + i] for i in range(self.size)]


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
        flat = list(built) if self.sequences == 1 else [row for example in built for row in example]
        return Examples(flat, self.sequences), dropped

    def experiment_loss(self, **options: Any) -> LossFn:
        """The loss with the statistics of experiments; ``options`` are those of the loss."""
        return with_names(self.loss_fn, self.names, **options)
