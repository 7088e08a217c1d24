"""Loads the rows of a dataset, and iterates over the rows in epochs. Checkpoints contain the position in the data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from areno.api.datasets import first_row, load_training_dataset
from areno.config.experiment.run_sections import LOADER, TrainDatasetConfig
from areno.config.hooks import named_function
from areno.engine.rollout.counter_rng import epoch_order
from areno.errors import ArenoError, DataError, UsageError
from areno.rewards.worker import describe_error, source_file


def load_dataset(section: TrainDatasetConfig, name: str) -> Sequence[Mapping[str, Any]]:
    """Load the rows of a ``train_dataset`` or ``valid_dataset`` section.

    If ``dataset_kwargs.loader`` names a function, the function is called as ``loader(path, split=..., **further
    kwargs)``. Otherwise ``path`` is a file, a folder or a Hugging Face Hub dataset. ``split`` does not apply to a file.
    """
    more = dict(section.dataset_kwargs)
    loader = more.pop(LOADER, None)
    if loader is None:
        if more:
            raise UsageError(
                f"{name}.dataset_kwargs contains arguments for a dataset loader ({', '.join(more)}), but no loader is set; set "
                f"{name}.dataset_kwargs.{LOADER}, or remove the arguments"
            )
        return load_training_dataset(section.path, option=f"{name}.path", split=section.split)
    option, keywords = f"{name}.dataset_kwargs.{LOADER}", {"split": section.split, **more}
    function, origin = named_function(loader, option=option), f"{option} {loader}"
    try:
        rows = function(section.path, **keywords)
    except ArenoError:
        raise
    except Exception as error:
        call = ", ".join([repr(section.path), *(f"{key}={value!r}" for key, value in keywords.items())])
        cause = describe_error(error, source_file(function))
        raise UsageError(
            f"{origin}: the call of the loader with ({call}) failed: {cause}; correct the loader"
        ) from error
    first_row(rows, origin, section.path)
    return rows  # type: ignore[no-any-return]


class RowSource:
    """Endless iterator over rows, epoch after epoch. With ``shuffle``, seed and epoch determine the order of the rows.

    With ``drop_last``, each epoch skips the rows of an incomplete last batch.
    """

    def __init__(self, rows: Sequence[Any], section: TrainDatasetConfig, seed: int) -> None:
        self.rows, self.batch_size, self._shuffle, self._seed = rows, section.batch_size, section.shuffle, seed
        self._used = len(rows) - len(rows) % self.batch_size if section.drop_last else len(rows)
        if not self._used:
            raise DataError(
                f"train_dataset has {len(rows)} rows, which is less than train_dataset.batch_size={self.batch_size}; lower the "
                "batch size, or set train_dataset.drop_last=false"
            )
        self.epoch, self.position = 0, 0
        self._order = self._draw()

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch."""
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

    def batch(self) -> list[Any]:
        """Return the next ``batch_size`` rows; fewer at the end of an epoch."""
        size = min(self.batch_size, self._used - self.position or self.batch_size)
        return [next(self) for _ in range(size)]

    def _draw(self) -> list[int]:
        return epoch_order(len(self.rows), epoch=self.epoch, seed=self._seed, shuffle=self._shuffle)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, the position in the epoch, and the number of rows of the dataset."""
        return {"epoch": self.epoch, "position": self.position, "rows": len(self.rows)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a position. Raises UsageError if the number of rows has changed."""
        if state["rows"] != len(self.rows):
            raise UsageError(
                f"train_dataset has {len(self.rows)} rows, but had {state['rows']} rows when the recovery checkpoint was "
                "written; use the earlier data, or set recover.mode=disabled"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._draw()


def without_long(
    rows: Sequence[Any], length_of: Callable[[Any], int], longest: int | None
) -> tuple[Sequence[Any], int]:
    """Return the rows of at most ``longest`` tokens, and the number of dropped rows. If ``longest`` is None, keep all rows.

    Raises:
        DataError: no row is left.
    """
    if longest is None:
        return rows, 0
    short = [row for row in (rows[index] for index in range(len(rows))) if length_of(row) <= longest]
    if not short:
        raise DataError(
            f"all {len(rows)} rows have more than {longest} tokens; raise max_length, or use a model with a longer context"
        )
    return short, len(rows) - len(short)
