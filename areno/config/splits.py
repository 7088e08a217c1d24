"""Splits of a dataset, determined without reading any rows."""

import json
import re
from pathlib import Path

from areno.config.paths import DATA_SUFFIXES
from areno.errors import UsageError

TRAIN, TEST = "train", "test"
"""Names of the split for training and of the default split for evaluation."""

_NAMES = {TRAIN: r"train(ing)?", "validation": r"valid(ation)?|val|dev", TEST: r"test(ing)?|eval(uation)?"}


def split_files(folder: Path, split: str, option: str) -> list[Path]:
    """Return the data files of a split in a folder.

    A file belongs to a split if the file's name starts with the split's name, as in ``test.jsonl`` or
    ``test-00000-of-00002.parquet``. The names ``valid``, ``val`` and ``dev`` mean ``validation``, and ``eval`` means
    ``test``. If no file name starts with ``train``, the training data are the files whose names start with no split name. If
    no file name starts with a split name, all files belong to every split.

    Raises UsageError if the split has no files, or if its files have different formats.
    """
    files = _data_files(folder)
    members = [file for file in files if _belongs(file, split)]
    unnamed = [file for file in files if not _split_named_by(file)]
    if not members and (_canonical(split) == TRAIN or len(unnamed) == len(files)):
        members = unnamed
    if not members:
        splits = sorted({_split_named_by(file) or TRAIN for file in files})
        present = f"it has files of the split{'s' if len(splits) > 1 else ''} {', '.join(splits)}"
        has = present if splits else f"it has no data files ({', '.join(DATA_SUFFIXES)})"
        raise UsageError(f"{option} {folder} has no files of the split {split}; {has}; pass a single file instead")
    formats = sorted({file.suffix.lower() for file in members})
    if len(formats) > 1:
        raise UsageError(
            f"{option} {folder} has files of several formats ({', '.join(formats)}); pass a single file instead"
        )
    return members


def saved_splits(folder: Path) -> list[str] | None:
    """Return the splits of a ``save_to_disk`` folder: [] if the dataset has no splits, None for any other folder."""
    listing = folder / "dataset_dict.json"
    if listing.is_file():
        try:
            return [str(name) for name in json.loads(listing.read_text(encoding="utf-8"))["splits"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{listing} is not readable: {error}; save the dataset again") from error
    return [] if (folder / "state.json").is_file() else None


def split_problem(reference: str, split: str, option: str) -> str:
    """Return an error message if ``reference`` is a folder that cannot provide the split; otherwise empty. No rows are read."""
    path = Path(reference).expanduser()
    try:
        if path.is_dir() and any(path.iterdir()):
            saved = saved_splits(path)
            if saved is None:
                split_files(path, split, option)
            elif saved and split not in saved:
                has = f"has no split {split} (its splits: {', '.join(saved)})"
                return f"{option} {reference} {has}; add this split to the dataset, and save the dataset again"
    except (UsageError, OSError) as error:
        return str(error)
    return ""


def has_splits(reference: str) -> bool:
    """Whether the rows of a data reference depend on the split.

    False for a file, for a folder without splits, and for a hub reference ``name:config:split``.
    """
    path = Path(reference).expanduser()
    if path.is_file():
        return False
    if path.is_dir():
        saved = saved_splits(path)
        return bool(saved) if saved is not None else any(map(_split_named_by, _data_files(path)))
    return explicit_split(reference) is None


def explicit_split(reference: str) -> str | None:
    """Return the split in a hub reference ``name:config:split``; None for other references."""
    parts = reference.split(":")
    return parts[2] if len(parts) == 3 and not Path(reference).expanduser().exists() else None


def row_sources(reference: str, split: str) -> frozenset[str]:
    """Return the sources of a dataset's rows: the paths of its files, or one string with the dataset's name and split.

    ``reference`` is a path or a hub reference. Two datasets with a common source share rows.
    """
    path = Path(reference).expanduser()
    if not path.exists():
        name, config, explicit = (*reference.split(":"), "", "")[:3]
        return frozenset({f"{name}:{config}:{explicit or split}"})
    saved = saved_splits(path) if path.is_dir() else []
    if saved is None:
        return frozenset(str(file.resolve()) for file in split_files(path, split, ""))
    return frozenset({f"{path.resolve()}:{split}" if saved else str(path.resolve())})


def _data_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.iterdir()
        if file.suffix.lower() in DATA_SUFFIXES and file.is_file() and not file.name.startswith(".")
    )


def _split_named_by(file: Path) -> str:
    return next((split for split in _NAMES if _belongs(file, split)), "")


def _belongs(file: Path, split: str) -> bool:
    name = _canonical(split)
    pattern = _NAMES[name] if name else re.escape(split)
    return re.match(rf"({pattern})([-_.]|$)", file.name, re.IGNORECASE) is not None


def _canonical(split: str) -> str:
    return next((name for name, pattern in _NAMES.items() if re.fullmatch(pattern, split, re.IGNORECASE)), "")
