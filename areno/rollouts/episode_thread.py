"""Runs the event loop of episodes in a separate thread, so that training and episodes do not block each other."""

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_WORKFLOW_CLOSE_S = 30.0
_CLOSE_GRACE_S = 10.0


class EpisodeLoop:
    """An event loop that runs in its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="areno-episodes", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine. May be called from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, workflows: Iterable[Any] = ()) -> None:
        """Close workflows, cancel all coroutines, wait briefly for their cleanup, and stop the thread."""
        if not self._thread.is_alive():
            return
        for workflow in workflows:
            if hasattr(workflow, "aclose"):
                self._close_workflow(workflow)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_GRACE_S * 2)
        if self._thread.is_alive():
            logger.warning("an episode blocks the event loop, so the thread of the event loop cannot be stopped")

    def _close_workflow(self, workflow: Any) -> None:
        try:
            self.start(workflow.aclose()).result(_WORKFLOW_CLOSE_S)
        except TimeoutError:
            pass  # if an episode blocks the loop, closing the loop reports it
        except Exception as error:
            logger.warning("a workflow could not be closed: %s: %s", type(error).__name__, error, exc_info=error)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.wait(left, timeout=_CLOSE_GRACE_S))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
