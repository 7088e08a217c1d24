"""Runs agents in separate processes. An agent that blocks or crashes affects only its own episode.

A process runs one agent at a time. Environment variables contain the server address and the API key of the agent's session. A
process imports torch or model code only if the agent imports them.
"""

import asyncio
import json
import math
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

ANSWER_BYTES = 16 << 20  # maximum size of an answer in bytes
_MAX_ERROR_CHARS = 20_000


class AgentProcesses:
    """A pool of processes that are started on demand."""

    def __init__(self, workers: int) -> None:
        self._slots = asyncio.Semaphore(workers)
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._closed = False
        self._threads = ThreadPoolExecutor(workers, "areno-agent-process")

    async def run(
        self, agent: bytes, data: dict[str, Any], extra: dict[str, Any], environment: dict[str, str], timeout_s: float
    ) -> float | dict[str, float] | None:
        """Run a pickled agent, and return its rewards. On a timeout or cancellation, the agent's process and all child
        processes are killed.

        The time limit of ``timeout_s`` seconds starts when the pool has a free process.

        Raises:
            AgentError: the agent raised an error, timed out, died, or returned something other than rewards.
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
        raise AgentError(f"the agent failed: {value}")

    def _give_back(self, worker: WorkerProcess, asked: Future[list[Any]]) -> None:
        self._busy.discard(worker)
        if not self._closed and asked.done() and not asked.cancelled() and asked.result()[0] != "died":
            self._idle.append(worker)
            return
        worker.stop()
        asked.add_done_callback(lambda _: worker.close())

    def close(self) -> None:
        """Kill all processes, including busy processes."""
        self._closed = True
        for worker in self._busy:
            worker.stop()  # the call of `run` that waits for the worker closes it
        for worker in self._idle:
            worker.kill()
        self._idle = []
        self._threads.shutdown(wait=False, cancel_futures=True)


def _ask(worker: WorkerProcess, job: bytes) -> list[Any]:
    """Let a process run the agent of a pickled job. Return a list of two items.

    The list is ``["value", REWARDS]`` if the agent succeeded, and ``["error", TRACEBACK]`` if the agent failed. If the process
    died or sent an invalid message, the list is ``["died", REASON]``.
    """
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
        return ["died", f"the agent's process sent an invalid message and was stopped: {error}"]
    return ["died", f"the agent's process sent an invalid message of kind {kind!r:.80} and was stopped"]


def main(settings: dict[str, Any]) -> None:
    """Run agents until the parent closes the connection.

    ``settings`` has the file descriptors ``connection`` and ``lifeline``. Jobs arrive through ``connection``. When the parent
    exits or closes the other end of ``lifeline``, this process is killed.
    """
    frames = supervised(settings["lifeline"], settings["connection"])
    while True:
        try:
            sent = frames.receive()
        except EOFError:
            return
        frames.send(json.dumps(_run(sent)).encode())


def _run(sent: bytes) -> list[Any]:
    """Run the agent of a pickled job.

    Return ``["value", VALUE]``, where VALUE is the agent's return value. If the agent fails, return ``["error", TRACEBACK]``.
    The list is sent as JSON, so that the trainer unpickles nothing.
    """
    try:
        job = pickle.loads(sent)
        os.environ.update(job["environment"])
        agent = cloudpickle.loads(job["agent"])
        return ["value", returned_value(asyncio.run(agent.run(job["data"], **job["extra"])))]
    except BaseException:
        return ["error", traceback.format_exc()[-_MAX_ERROR_CHARS:]]


def returned_value(returned: Any) -> float | dict[str, float] | None:
    """Validate an agent's return value, which is a reward or a dictionary of rewards by response id.

    None means that the agent has set its rewards itself.
    """
    if returned is None:
        return None
    if isinstance(returned, dict):
        return {str(name): _finite(float(reward)) for name, reward in returned.items()}
    try:
        reward = float(returned)
    except (TypeError, ValueError):
        raise TypeError(
            f"the agent's method `run` returned {type(returned).__name__} {returned!r:.80}; return a reward (float), or "
            "rewards by response id (dict)"
        ) from None
    return _finite(reward)


def _finite(reward: float) -> float:
    if not math.isfinite(reward):
        raise ValueError(f"the agent's method `run` returned the reward {reward}; return finite numbers")
    return reward
