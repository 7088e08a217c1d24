"""Agents in processes of their own: what they block, crash or leave running costs one episode.

A process runs one agent after another, each with the session's variables in its environment. It loads neither torch nor a
model; only what the agent itself imports.
"""

import asyncio
import json
import os
import pickle
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import cloudpickle

from areno.errors import AgentError
from areno.frames import FrameError
from areno.rewards.supervisor import supervised
from areno.rewards.worker_pool import WorkerProcess

ANSWER_BYTES = 16 << 20  # most that an answer may have
_MAX_ERROR_CHARS = 20_000


class AgentProcesses:
    """A pool of processes, started when first needed; each runs one agent at a time."""

    def __init__(self, workers: int) -> None:
        self._slots = asyncio.Semaphore(workers)
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._threads = ThreadPoolExecutor(workers, "areno-agent-process")

    async def run(
        self, agent: bytes, data: dict[str, Any], extra: dict[str, Any], environment: dict[str, str], timeout_s: float
    ) -> float | dict[str, float] | None:
        """Run a pickled agent; the process is killed, with all that it has started, when it is late or nobody waits any more.

        ``timeout_s`` counts from when a process is free. AgentError: it raised, was late, died, or returned what is no reward.
        """
        job = pickle.dumps({"agent": agent, "data": data, "extra": extra, "environment": environment})
        async with self._slots:
            worker = self._idle.pop() if self._idle else WorkerProcess(__name__, {}, ANSWER_BYTES)
            self._busy.add(worker)
            asked = self._threads.submit(_ask, worker, job)
            try:
                async with asyncio.timeout(timeout_s):
                    kind, value = await asyncio.wrap_future(asked)
            except TimeoutError as error:
                raise AgentError(
                    f"the agent did not end within {timeout_s:g} s (agent.session_timeout_seconds)"
                ) from error
            finally:
                self._give_back(worker, asked)
        if kind == "value":
            return value
        raise AgentError(f"the agent's process failed: {value}")

    def _give_back(self, worker: WorkerProcess, asked: Future[list[Any]]) -> None:
        """Keep a process that has answered, and kill any other."""
        self._busy.discard(worker)
        if asked.done() and not asked.cancelled() and asked.result()[0] != "died":
            self._idle.append(worker)
            return
        worker.stop()
        asked.add_done_callback(lambda _: worker.close())

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        for worker in self._busy:
            worker.stop()  # whoever waits for it closes it
        for worker in self._idle:
            worker.kill()
        self._idle = []
        self._threads.shutdown(wait=False, cancel_futures=True)


def _ask(worker: WorkerProcess, job: bytes) -> list[Any]:
    """What the agent's process says; with ``died``, what became of it instead."""
    try:
        worker.frames.send(job)
        kind, value = json.loads(worker.frames.receive())
        if kind == "error" and isinstance(value, str):
            return [kind, value]
        if kind == "value":
            return [kind, returned_value(value)]
    except (EOFError, OSError):
        return ["died", worker.exit_reason()]
    except (FrameError, ValueError, TypeError, RecursionError) as error:
        return ["died", f"it was stopped, because it does not follow the protocol: {error}"]
    return ["died", f"it was stopped, because it answered with {kind!r:.80}"]


def main(settings: dict[str, Any]) -> None:
    """Run agents until the parent closes the connection; ``connection`` and ``lifeline`` are file descriptors."""
    frames = supervised(settings["lifeline"], settings["connection"])
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
