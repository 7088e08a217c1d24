"""Saved states of optimizers."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from areno.engine.parallel.rank_context import RankContext
from areno.engine.train.state_files import SavedState, save_state

_SCRATCH = tempfile.TemporaryDirectory()
_NUMBERS = itertools.count()


def saved(optimizer, folder=None, peers=None):
    """Save an optimizer's state, by default in a new folder; returns the folder."""
    folder = Path(_SCRATCH.name) / str(next(_NUMBERS)) if folder is None else folder
    save_state(folder, optimizer.state_head(), optimizer.state_parts(), peers or RankContext())
    return folder


def contents(folder):
    """Everything in a folder: the head as ``head``, and full tensors by their names."""
    state = SavedState(folder)
    return {"head": state.head} | {key: state.read_full(key) for key in state.tensor_names()}
