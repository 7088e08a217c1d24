"""How many replicas a run has, changed from outside while it goes on: the two ends of ``areno scale``.

A running fleet keeps ``replicas.json`` in its run directory, which says how many there are and what it is doing about a
request. A request is ``replicas.wanted.json``, one at a time.
"""

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from areno.errors import ArenoError, EngineError, UsageError

logger = logging.getLogger(__name__)

_STATE, _WANTED = "replicas.json", "replicas.wanted.json"
_POLL_S, _ANSWER_S, _JOIN_S = 0.5, 60.0, 10.0  # a mounted folder may show changes half a minute late


class Resizable(Protocol):
    """A fleet as it is seen here."""

    def resize(self, replicas: int, addresses: Sequence[str] = ()) -> None:
        """See :meth:`RolloutFleet.resize`."""

    def size(self) -> int:
        """Replicas that it has."""


class ReplicaControl:
    """Follows the requests that are made in a run directory, until it is closed."""

    def __init__(self, fleet: Resizable, folder: Path) -> None:
        self._fleet, self._folder = fleet, folder
        self._ended = threading.Event()
        (folder / _WANTED).unlink(missing_ok=True)  # of a run that was killed
        self._say()
        self._threads = [
            threading.Thread(target=run, name="areno-scale", daemon=True) for run in (self._watch, self._beat)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Follow no more requests."""
        self._ended.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
        for name in (_STATE, _WANTED):
            (self._folder / name).unlink(missing_ok=True)

    def _say(self, **more: str) -> None:
        if not self._ended.is_set():
            _write(self._folder / _STATE, {"replicas": self._fleet.size(), **more})

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            with suppress(OSError):  # a full disk; whoever has asked sees that nobody answers
                self._look()

    def _beat(self) -> None:
        """Show that the run is alive, also while a request is worked on."""
        while not self._ended.wait(_POLL_S):
            with suppress(OSError):
                os.utime(self._folder / _STATE)

    def _look(self) -> None:
        path = self._folder / _WANTED
        wanted = _read(path)
        if wanted is None:
            return
        if path.stat().st_uid != os.getuid():
            logger.warning("%s belongs to another user; it is not followed", path)
            return
        path.unlink()
        self._say(begun=wanted["id"])
        before, problem = self._fleet.size(), ""
        try:
            added = wanted["addresses"]
            self._fleet.resize(before + len(added) if wanted["replicas"] is None else wanted["replicas"], added)
            logger.info("rollout replicas: %d, before %d", self._fleet.size(), before)
        except Exception as error:
            problem = str(error) if isinstance(error, ArenoError) else f"{type(error).__name__}: {error}"
            logger.warning("the number of rollout replicas stays %d: %s", self._fleet.size(), problem)
        self._say(begun=wanted["id"], done=wanted["id"], problem=problem)


def replicas_of(folder: Path) -> int:
    """Replicas of a running experiment. Raises UsageError: none is running there that could have another number."""
    state = _read(folder / _STATE)
    if state is None:
        raise UsageError(
            f"{folder} has no rollout replicas: the run has ended, or its trainer generates as well "
            "(rollout.backend of an experiment, --rollout-replicas)"
        )
    return int(state["replicas"])


def request(
    folder: Path, replicas: int | None, addresses: Sequence[str], timeout_s: float, say: Callable[[str], None]
) -> int:
    """Ask a running experiment for another number of replicas, and wait for it; returns how many it has then.

    Raises EngineError: the run does not answer, cannot have so many, or has not within the time (it goes on trying).
    """
    before = replicas_of(folder)
    wanted = {"id": uuid.uuid4().hex, "replicas": replicas, "addresses": list(addresses)}
    _write(folder / _WANTED, wanted)
    began, told = time.monotonic(), False
    last, alive = _beat_of(folder), began
    while True:
        state = _read(folder / _STATE) or {}
        if state.get("done") == wanted["id"]:
            if state["problem"]:
                raise EngineError(state["problem"])
            return int(state["replicas"])
        if not told and state.get("begun") == wanted["id"]:
            told = True
            say(f"the run has {before} and follows; a new replica loads the model, a leaving one finishes its samples")
        now, beat = time.monotonic(), _beat_of(folder)
        if beat != last:  # clocks of machines differ, so that only a change counts
            last, alive = beat, now
        if now - alive > _ANSWER_S:
            (folder / _WANTED).unlink(missing_ok=True)
            raise EngineError(f"the run in {folder} does not answer within {_ANSWER_S:g} s; is it still going?")
        if now - began > timeout_s:
            raise EngineError(f"not done within {timeout_s:g} s; the run goes on with it, and its log says how it ends")
        time.sleep(_POLL_S)


def _beat_of(folder: Path) -> float:
    with suppress(OSError):
        return (folder / _STATE).stat().st_mtime
    return 0.0


def _write(path: Path, values: dict[str, Any]) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(values), encoding="utf-8")
    os.replace(partial, path)


def _read(path: Path) -> dict[str, Any] | None:
    with suppress(FileNotFoundError):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    return None
