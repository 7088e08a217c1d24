"""Changes the number of replicas of a running experiment, for ``areno scale``.

A running fleet writes the number of replicas to ``replicas.json`` in its run directory. ``areno scale`` writes a request to
``replicas.wanted.json``. The fleet handles the request, and writes the result to ``replicas.json``. The fleet handles one
request at a time. Further calls of ``areno scale`` wait.
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
_POLL_S, _ANSWER_S, _JOIN_S = 0.5, 60.0, 10.0  # on network file systems changes may become visible half a minute late


class Resizable(Protocol):
    """A fleet that can be resized."""

    def resize(self, replicas: int, addresses: Sequence[str] = ()) -> None:
        """See :meth:`RolloutFleet.resize`."""

    def size(self) -> int:
        """Return the number of replicas."""


class ReplicaControl:
    """Resizes a fleet whenever ``areno scale`` writes a request to the fleet's run directory, until :meth:`close` is called."""

    def __init__(self, fleet: Resizable, folder: Path) -> None:
        self._fleet, self._folder = fleet, folder
        self._ended = threading.Event()
        self._results: dict[str, str] = {}  # the problem of each request by id; empty if it has succeeded
        (folder / _WANTED).unlink(missing_ok=True)  # left by a killed run
        self._write_state()
        self._threads = [
            threading.Thread(target=run, name="areno-scale", daemon=True) for run in (self._watch, self._heartbeat)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop handling requests."""
        self._ended.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
        for name in (_STATE, _WANTED):
            (self._folder / name).unlink(missing_ok=True)

    def _write_state(self, begun: str = "") -> None:
        if not self._ended.is_set():
            state = {"replicas": self._fleet.size(), "begun": begun, "results": self._results}
            _partial(self._folder / _STATE, state).replace(self._folder / _STATE)

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            try:
                self._handle_request()
            except OSError:  # such as a full disk; the requester then times out
                continue
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("ignoring an invalid request in %s: %r", self._folder / _WANTED, error)
                (self._folder / _WANTED).unlink(missing_ok=True)

    def _heartbeat(self) -> None:
        """Update the modification time of the state file regularly, even while a request is handled."""
        while not self._ended.wait(_POLL_S):
            with suppress(OSError):
                os.utime(self._folder / _STATE)

    def _handle_request(self) -> None:
        path = self._folder / _WANTED
        if not path.exists():
            return
        if path.stat().st_uid != os.getuid():
            path.unlink()
            logger.warning("removed the request %s, because the file belonged to another user", path)
            return
        request = _read(path)
        if request is None:
            return
        path.unlink()
        self._write_state(request["id"])
        before, problem = self._fleet.size(), ""
        try:
            added = request["addresses"]
            self._fleet.resize(before + len(added) if request["replicas"] is None else request["replicas"], added)
            logger.info("the number of rollout replicas is now %d (before: %d)", self._fleet.size(), before)
        except Exception as error:
            problem = str(error) if isinstance(error, ArenoError) else f"{type(error).__name__}: {error}"
            logger.warning("the number of rollout replicas stays %d: %s", self._fleet.size(), problem)
        self._results[request["id"]] = problem
        self._write_state(request["id"])


def replicas_of(folder: Path) -> int:
    """Wait for a heartbeat of the experiment in ``folder``, and return the experiment's number of replicas.

    Raises:
        UsageError: the run has ended or has no replicas.
        EngineError: the run does not respond.
    """
    began, last = time.monotonic(), _last_heartbeat(folder)
    while last and _last_heartbeat(folder) == last:
        if time.monotonic() - began > _ANSWER_S:
            raise _silent(folder)
        time.sleep(_POLL_S / 5)
    state = _read(folder / _STATE)
    if state is None:
        raise UsageError(
            f"{folder} has no rollout replicas: the run has ended, or it generates answers with the training engine; to use "
            "replicas, set rollout.backend (areno run) or --rollout-replicas (areno train)"
        )
    return int(state["replicas"])


def request(
    folder: Path, replicas: int | None, addresses: Sequence[str], timeout_s: float, say: Callable[[str], None]
) -> int:
    """Ask a running experiment to change its number of replicas, wait, and return the new number.

    Raises:
        UsageError: the run has ended, has no replicas, or belongs to another user.
        EngineError: the run does not respond, cannot be resized, or needs more than ``timeout_s`` seconds. If the time
            runs out before the run has begun to resize, the request is withdrawn. If the time runs out later, the run
            continues to resize.
    """
    before = replicas_of(folder)
    if (owner := (folder / _STATE).stat().st_uid) != os.getuid():
        raise UsageError(
            f"the run in {folder} belongs to the user with id {owner}, but your id is {os.getuid()}; run `areno scale` as the "
            "owner of the run"
        )
    wanted = {"id": uuid.uuid4().hex, "replicas": replicas, "addresses": list(addresses)}
    began, placed, accepted = time.monotonic(), False, False
    last, alive = _last_heartbeat(folder), began
    while True:
        placed = placed or _place(folder / _WANTED, wanted)
        state = _read(folder / _STATE) or {}
        problem = state.get("results", {}).get(wanted["id"])
        if problem:
            raise EngineError(problem)
        if problem is not None:
            return int(state["replicas"])
        if not accepted and state.get("begun") == wanted["id"]:
            accepted = True
            say(
                f"the run has begun to resize (from {before} replicas): new replicas load the model, and "
                "removed replicas finish their samples"
            )
        now, beat = time.monotonic(), _last_heartbeat(folder)
        if beat != last:  # compare the time only with itself, because the clocks of machines differ
            last, alive = beat, now
        silent, late = now - alive > _ANSWER_S, now - began > timeout_s
        if (silent or late) and placed and not accepted:
            (folder / _WANTED).unlink(missing_ok=True)
        if silent:
            raise _silent(folder)
        if late and not accepted:
            raise EngineError(
                f"the run in {folder} did not begin to resize within {timeout_s:g} s, so the request was withdrawn; "
                "see the run's log"
            )
        if late:
            raise EngineError(
                f"the run did not finish resizing within {timeout_s:g} s, but continues to resize; see the run's log"
            )
        time.sleep(_POLL_S)


def _silent(folder: Path) -> EngineError:
    return EngineError(f"the run in {folder} did not respond within {_ANSWER_S:g} s; check that it is still running")


def _last_heartbeat(folder: Path) -> float:
    with suppress(OSError):
        return (folder / _STATE).stat().st_mtime
    return 0.0


def _place(path: Path, values: dict[str, Any]) -> bool:
    """Write a file if it does not exist. Return whether the file was written."""
    partial = _partial(path, values)
    try:
        os.link(partial, path)
    except FileExistsError:
        return False
    finally:
        partial.unlink()
    return True


def _partial(path: Path, values: dict[str, Any]) -> Path:
    partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")
    partial.write_text(json.dumps(values), encoding="utf-8")
    return partial


def _read(path: Path) -> dict[str, Any] | None:
    with suppress(FileNotFoundError):
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return values
    return None
