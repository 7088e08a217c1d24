"""What a decode step has to know of its rows beside their tokens; it changes when samples join or leave, not per token."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from areno.engine.rollout.sampler import SamplingTable
from areno.engine.rollout.sequence import Prefill, Sequence


class SharedPrefixes:
    """For each row the first row that holds the same first columns, and how many these are.

    A slot has its own copy of them, so samples come and go as they like; who reads may read any of the copies.

    Args:
        prefills: what filled the first columns of each row; None shares nothing.
    """

    def __init__(self, prefills: Seq[Prefill | None]) -> None:
        first: dict[Prefill, int] = {}
        self.leaders = [row if p is None else first.setdefault(p, row) for row, p in enumerate(prefills)]
        self.lengths = [0 if p is None else p.length for p in prefills]
        self._padded: tuple[Tensor, Tensor] | None = None

    def padded(self, rows: int) -> tuple[Tensor, Tensor]:
        """Leaders and lengths [rows] int64, with rows of padding that share nothing behind the own ones."""
        if self._padded is None or len(self._padded[0]) != rows:
            more = range(len(self.leaders), rows)
            self._padded = torch.tensor([*self.leaders, *more]), torch.tensor([*self.lengths, *(0 for _ in more)])
        return self._padded


@dataclass(frozen=True, slots=True)
class Rows:
    """The running samples, in the order of their slots.

    Attributes:
        table: how each is sampled.
        prefixes: what they share.
    """

    table: SamplingTable
    prefixes: SharedPrefixes

    @classmethod
    def of(cls, sequences: Seq[Sequence], device: torch.device | str) -> Rows:
        """Those of some samples."""
        return cls(sampling_table(sequences, device), SharedPrefixes([s.prefill for s in sequences]))

    def __len__(self) -> int:
        return len(self.table.seeds)


def sampling_table(sequences: Seq[Sequence], device: torch.device | str) -> SamplingTable:
    """How some samples, a row each, are sampled."""
    return SamplingTable(
        [s.group.sampling for s in sequences], [s.seed for s in sequences], device, [s.edits for s in sequences]
    )


def name_prefills(shared: Seq[Seq[Sequence]]) -> None:
    """Note that the samples of each list have just been prefilled together, with the context that they share."""
    for members in shared:
        prefill = Prefill(members[0].length)
        for member in members:
            member.prefill = prefill
