"""Agents in processes of their own: what they block, crash or leave running costs one episode."""

from __future__ import annotations

import asyncio
import json
import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from areno.errors import AgentError
from areno.frames import FrameError
from areno.rewards.lanes import WorkerProcess
from areno.rollouts.workflows.agent_worker import ANSWER_BYTES, returned_value


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

        ``timeout_s`` counts from when a process is free.

        Raises:
            AgentError: it raised, was late, died, or returned what is no reward.
        """
        job = pickle.dumps({"agent": agent, "data": data, "extra": extra, "environment": environment})
        async with self._slots:
            worker = self._idle.pop() if self._idle else WorkerProcess(f"{__package__}.agent_worker", {}, ANSWER_BYTES)
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
        return ["died", worker.death()]
    except (FrameError, ValueError, TypeError, RecursionError) as error:
        return ["died", f"it was stopped, because it does not follow the protocol: {error}"]
    return ["died", f"it was stopped, because it answered with {kind!r:.80}"]
