"""The rows of a data set in the order in which an experiment visits them, with a position that can be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from areno.api.datasets import load_training_dataset
from areno.config.experiment.experiments import BaseExperimentConfig
from areno.config.experiment.idle_checks import LOADER
from areno.config.experiment.run_sections import TrainDatasetConfig
from areno.config.hooks import named_object
from areno.engine.rollout.counter_rng import epoch_order
from areno.errors import DataError, UsageError
from areno.training.row_checks import Needs, row_problem


def load_dataset(section: TrainDatasetConfig, name: str) -> Sequence[Mapping[str, Any]]:
    """Rows of a ``train_dataset`` or ``valid_dataset`` section.

    A function named by ``dataset_kwargs.loader`` is called as ``loader(path, split=..., **further kwargs)``; without it the
    path is a file, or a folder or a hub reference of which ``split`` is taken.

    Raises:
        UsageError: there are no rows, or the loader is not what it should be.
    """
    more = dict(section.dataset_kwargs)
    loader = more.pop(LOADER, None)
    if loader is None:
        if more:
            raise UsageError(
                f"{name}.dataset_kwargs {', '.join(more)}: there is no loader to take them; give {LOADER} too"
            )
        return load_training_dataset(section.path, option=f"{name}.path", split=section.split)
    function = named_object(loader, option=f"{name}.dataset_kwargs.{LOADER}")
    rows = function(section.path, split=section.split, **more)
    if not hasattr(rows, "__len__") or not len(rows):
        raise UsageError(f"{name}.dataset_kwargs.{LOADER} {loader}: it gave no rows")
    return rows  # type: ignore[no-any-return]


def check_first_row(config: BaseExperimentConfig, name: str, rows: Sequence[Any], needs: Needs | None) -> None:
    """Look at the first row of a data set.

    Args:
        config: of the experiment.
        name: ``train_dataset`` or ``valid_dataset``.
        rows: of it.
        needs: what a row must have; None looks at nothing.

    Raises:
        DataError: it lacks what the experiment needs.
    """
    section = getattr(config, name) or config.train_dataset
    loader = f"{name}.dataset_kwargs.{LOADER}"
    if needs is not None and (problem := row_problem(needs, rows[0], f"{name} {section.path}", loader)):
        raise DataError(problem)


class RowSource:
    """Endless rows, epoch after epoch; the same for the same seed, whatever else draws random numbers.

    Args:
        rows: anything with ``len()`` and integer indexing.
        batch_size: rows of a step, which decides how many steps an epoch has.
        seed: of the order.
        shuffle: a new random order in each epoch.
        drop_last: leave the rows out that fill no whole batch; else the last batch of an epoch is filled from the next.
    """

    def __init__(
        self, rows: Sequence[Any], *, batch_size: int, seed: int, shuffle: bool = True, drop_last: bool = True
    ) -> None:
        self.rows, self.batch_size, self._seed, self._shuffle = rows, batch_size, seed, shuffle
        whole = len(rows) - len(rows) % batch_size if drop_last else len(rows)
        if not whole:
            raise DataError(
                f"train_dataset has {len(rows)} rows, which is less than train_dataset.batch_size={batch_size}; lower "
                "it, or set drop_last=false"
            )
        self._used = whole
        self.epoch, self.position = 0, 0
        self._order = self._draw()

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which an epoch is gone through."""
        return -(-self._used // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.position == self._used:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._draw()
        row = self.rows[self._order[self.position]]
        self.position += 1
        return row

    def batch(self, rows_in_it: int | None = None) -> list[Any]:
        """The next rows; a batch ends with its epoch."""
        wanted = min(rows_in_it or self.batch_size, self._used - self.position or self.batch_size)
        return [next(self) for _ in range(wanted)]

    def _draw(self) -> list[int]:
        return epoch_order(len(self.rows), epoch=self.epoch, seed=self._seed, shuffle=self._shuffle)

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"epoch": self.epoch, "position": self.position, "rows": len(self.rows)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a position; raises :class:`UsageError` if it belongs to another number of rows."""
        if state["rows"] != len(self.rows):
            raise UsageError(
                f"train_dataset has {len(self.rows)} rows, the recovery point was made with {state['rows']}; use the same "
                "data, or recover.mode=disabled"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._draw()


def without_long(
    rows: Sequence[Any], length_of: Callable[[Any], int], longest: int | None
) -> tuple[Sequence[Any], int]:
    """Rows that are not too long, and how many are.

    Args:
        rows: of a data set.
        length_of: tokens of a row.
        longest: ``max_length``; None keeps all.

    Raises:
        DataError: none is left.
    """
    if longest is None:
        return rows, 0
    kept = [row for row in (rows[index] for index in range(len(rows))) if length_of(row) <= longest]
    if not kept:
        raise DataError(f"all {len(rows)} rows have more than max_length={longest} tokens; raise it")
    return kept, len(rows) - len(kept)
