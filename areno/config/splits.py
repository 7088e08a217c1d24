"""Splits of a data set: which files of a folder belong to one, and which rows a data reference names. Reads no rows."""

import json
import re
from pathlib import Path

from areno.config.paths import DATA_SUFFIXES
from areno.errors import UsageError

TRAIN, TEST = "train", "test"
"""The split that is trained on, and the one that an evaluation takes unless another is named."""

_NAMES = {TRAIN: r"train(ing)?", "validation": r"valid(ation)?|val|dev", TEST: r"test(ing)?|eval(uation)?"}


def split_files(folder: Path, split: str, option: str) -> list[Path]:
    """The data files of a split in a folder, of one kind; ``valid``, ``val``, ``dev`` are ``validation``, ``eval`` is ``test``.

    A file belongs to the split that its name begins with (``test.jsonl``, ``test-00000-of-00002.parquet``). Files that
    name no split are training data; a folder whose files all name none has no splits, and is taken whole.
    """
    files = _data_files(folder)
    found = [file for file in files if _belongs(file, split)]
    unnamed = [file for file in files if not _split_named_by(file)]
    if not found and (_known(split) == TRAIN or len(unnamed) == len(files)):
        found = unnamed
    if not found:
        there = sorted({_split_named_by(file) or TRAIN for file in files})
        has = f"it has {', '.join(there)}" if there else f"it has no data files ({', '.join(DATA_SUFFIXES)})"
        raise UsageError(f"{option} {folder}: no files of the split {split}; {has}; name one file instead")
    kinds = sorted({file.suffix.lower() for file in found})
    if len(kinds) > 1:
        raise UsageError(f"{option} {folder}: files of several kinds ({', '.join(kinds)}); name one file instead")
    return found


def saved_splits(folder: Path) -> list[str] | None:
    """The splits that ``save_to_disk`` wrote into a folder; [] for a data set without splits, None for another folder."""
    listing = folder / "dataset_dict.json"
    if listing.is_file():
        try:
            return [str(name) for name in json.loads(listing.read_text(encoding="utf-8"))["splits"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{listing} is not readable: {error}; save the data set again") from error
    return [] if (folder / "state.json").is_file() else None


def split_problem(reference: str, split: str, option: str) -> str:
    """Say why a data reference cannot give the rows of a split, as far as names tell; empty if it may."""
    path = Path(reference).expanduser()
    try:
        if path.is_dir() and any(path.iterdir()):
            saved = saved_splits(path)
            if saved is None:
                split_files(path, split, option)
            elif saved and split not in saved:
                return f"{option} {reference}: there is no split {split}; it has {', '.join(saved)}"
    except (UsageError, OSError) as error:
        return str(error)
    return ""


def has_splits(reference: str) -> bool:
    """Whether the rows depend on the split: not for one file, nor for a folder whose files name no split."""
    path = Path(reference).expanduser()
    if path.is_file():
        return False
    if path.is_dir():
        saved = saved_splits(path)
        return bool(saved) if saved is not None else any(map(_split_named_by, _data_files(path)))
    return own_split(reference) is None


def own_split(reference: str) -> str | None:
    """The split that a hub reference ``name:config:split`` names itself; None for everything else."""
    parts = reference.split(":")
    return parts[2] if len(parts) == 3 and not Path(reference).expanduser().exists() else None


def rows_named(reference: str, split: str) -> frozenset[str]:
    """Names of what a reference and a split give: two references with a name in common share rows."""
    path = Path(reference).expanduser()
    if not path.exists():
        name, config, own = (*reference.split(":"), "", "")[:3]
        return frozenset({f"{name}:{config}:{own or split}"})
    place = path.resolve()
    saved = saved_splits(path) if path.is_dir() else []
    if saved is None:
        return frozenset(str(file.resolve()) for file in split_files(path, split, ""))
    return frozenset({f"{place}:{split}" if saved else str(place)})


def _data_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.iterdir()
        if file.suffix.lower() in DATA_SUFFIXES and file.is_file() and not file.name.startswith(".")
    )


def _split_named_by(file: Path) -> str:
    return next((split for split in _NAMES if _belongs(file, split)), "")


def _belongs(file: Path, split: str) -> bool:
    known = _known(split)
    pattern = _NAMES[known] if known else re.escape(split)
    return re.match(rf"({pattern})([-_.]|$)", file.name, re.IGNORECASE) is not None


def _known(split: str) -> str:
    return next((name for name, pattern in _NAMES.items() if re.fullmatch(pattern, split, re.IGNORECASE)), "")
