"""The inside of an agent's process: one run after another, each with the session's variables in its environment.

Loads neither torch nor a model; only what the agent itself imports.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
import traceback
from typing import Any

import cloudpickle

from areno.frames import Frames
from areno.rewards.supervisor import supervised

ANSWER_BYTES = 16 << 20  # most that an answer may have
_MAX_ERROR_CHARS = 20_000


def main(settings: dict[str, Any]) -> None:
    """Run agents until the parent closes the connection; ``connection`` and ``lifeline`` are file descriptors."""
    supervised(settings["lifeline"], settings["connection"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what the agent prints belongs to the log
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    frames = Frames.join(settings["connection"])
    while True:
        try:
            sent = frames.receive()
        except EOFError:
            return
        frames.send(json.dumps(_run(sent)).encode())


def _run(sent: bytes) -> list[Any]:
    """``["value", returned]`` or ``["error", text]``; JSON, because what an agent says is data and never code."""
    try:
        job = pickle.loads(sent)
        os.environ.update(job["environment"])
        agent = cloudpickle.loads(job["agent"])
        return ["value", returned_value(asyncio.run(agent.run(job["data"], **job["extra"])))]
    except BaseException:
        return ["error", traceback.format_exc()[-_MAX_ERROR_CHARS:]]


def returned_value(returned: Any) -> float | dict[str, float] | None:
    """What an agent has returned: one reward, rewards by the ids of answers, or None where it has set them itself."""
    if returned is None:
        return None
    if isinstance(returned, dict):
        return {str(name): float(reward) for name, reward in returned.items()}
    try:
        return float(returned)
    except (TypeError, ValueError):
        raise TypeError(
            f"the agent's run returned {type(returned).__name__} {returned!r:.80}; return a reward (float), or rewards by the "
            "ids of answers (dict)"
        ) from None
