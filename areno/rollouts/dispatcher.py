"""Runs episodes concurrently with training, and assembles their trajectories into batches.

Data rows wait in a queue. When :mod:`staleness` allows another episode, the episode of the first waiting row starts in
:mod:`episode_thread`. A batch is formed as soon as enough episodes have finished. If more than enough have finished, the batch
gets those that started first. This choice reduces the bias towards short answers. The trajectories of a batch are in random
order. While a caller waits and the episodes make no progress, the dispatcher logs their state. It raises an error if a batch
cannot be completed, or if too many consecutive episodes fail or are rejected.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import DataError, EngineError, UsageError
from areno.observability import tracing
from areno.rollouts.dump import TrajectoryDump
from areno.rollouts.engine_client import EPISODE, EngineClient, Episode
from areno.rollouts.episode_thread import EpisodeLoop
from areno.rollouts.staleness import StalenessManager, too_old
from areno.rollouts.tasks import Accept, Batch, EpisodePlan, EpisodeTask, OnStale, Rejected, Rejection, Watchdog
from areno.rollouts.trajectory import Trajectory
from areno.rollouts.workflows.base import as_trajectory

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Listener = Callable[[int, str, str], None]
"""Function ``(task id, status, reason)``. The status is one of ``running, accepted, rejected, failed, dropped``."""

_COUNTERS: dict[Rejection, str] = {
    "raised an error": "failed",
    "returned None": "empty",
    "rejected by the filter": "filtered",
}
STALL_TIMEOUT_S = 3600.0
_POLL_S = 0.5
_QUEUE_PER_ROLLOUT = 16


class BatchDispatcher:
    """Runs episodes and forms batches. A dispatcher must be closed with :meth:`close`, or used as a context manager.

    Args:
        client: gives episodes access to the engine.
        staleness: limits the number of running episodes. Its ``batch_size`` is the number of episodes in a batch.
        seed: seed of the shuffling.
        dynamic_bs: count rejected episodes towards the batch size; requires ``replaces_rejected=False`` in ``staleness``.
        queue_size: maximum number of data rows that wait for the start of their episodes; None: 16 times the maximum number of
            running episodes. If ``staleness.pending_limit`` is lower, this lower limit applies.
        max_staleness: maximum age of a token at training time, in weight versions; None: only ``staleness`` limits the age.
        on_stale: ``regenerate`` reruns an episode whose trajectory exceeds ``max_staleness``; ``drop`` discards the trajectory.
        max_errors_in_a_row: the run ends after this many consecutive failed episodes; None: max(8, 2 * batch size).
        max_rejections_in_a_row: the same for consecutive failed or rejected episodes; None: max(128, 16 * batch size).
        stall_report_s: a method that waits for episodes logs their state after this many seconds without progress.
        stall_timeout_s: a method that waits for episodes raises an error after this many seconds without progress.
        check_trajectory_format: check the keys, shapes and values of every trajectory.
        listener: function that is called at every status change of an episode, from any thread.
        stops_on: types of errors that end the run at once if an episode raises them.
        on_wait: called repeatedly while a method waits. An error in ``on_wait`` ends the wait and is raised; episodes continue.

    Raises UsageError: a value is invalid, or options contradict each other.
    """

    def __init__(
        self,
        client: EngineClient,
        staleness: StalenessManager,
        *,
        seed: int = 0,
        dynamic_bs: bool = False,
        queue_size: int | None = None,
        max_staleness: int | None = None,
        on_stale: OnStale = "regenerate",
        max_errors_in_a_row: int | None = None,
        max_rejections_in_a_row: int | None = None,
        stall_report_s: float = 60.0,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        check_trajectory_format: bool = False,
        dump: TrajectoryDump | None = None,
        listener: Listener | None = None,
        stops_on: tuple[type[BaseException], ...] = (),
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        if on_stale not in ("regenerate", "drop"):
            raise UsageError(f"on_stale {on_stale!r} is unknown; use regenerate or drop")
        if dynamic_bs == staleness.replaces_rejected:
            raise UsageError(f"dynamic_bs={dynamic_bs} requires StalenessManager(replaces_rejected={not dynamic_bs})")
        if queue_size is not None and queue_size < 1:
            raise UsageError(f"rollout.queue_size must be at least 1, got {queue_size}")
        self.client, self.staleness, size = client, staleness, staleness.batch_size
        self._seed, self._dynamic, self._max_staleness, self._on_stale = seed, dynamic_bs, max_staleness, on_stale
        self._ahead = min(queue_size or _QUEUE_PER_ROLLOUT * staleness.max_concurrent, staleness.pending_limit)
        self._watchdog = Watchdog(
            max(2 * size, 8) if max_errors_in_a_row is None else max_errors_in_a_row,
            max(16 * size, 128) if max_rejections_in_a_row is None else max_rejections_in_a_row,
            stops_on,
        )
        self._report_s, self._timeout_s = stall_report_s, stall_timeout_s
        self._check, self._dump, self._listener, self._on_wait = check_trajectory_format, dump, listener, on_wait
        self._changed = threading.Condition(threading.RLock())
        self._plan: EpisodePlan | None = None
        self._pending: deque[EpisodeTask] = deque()
        self._running: dict[int, EpisodeTask] = {}
        self._finished: list[EpisodeTask] = []
        self._version = self._next_id = self._begun = self._ended = self._batches = 0
        self._paused = self._closed = False
        self._failure: BaseException | None = None
        self._counts = {"failed": 0, "filtered": 0, "empty": 0, "restarted": 0}
        self._workflows: list[Any] = []
        self._loop = EpisodeLoop()

    # -- public interface ------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Current weight version."""
        return self._version

    def set_version(self, version: int) -> None:
        """Set the weight version after an update, and start the waiting episodes that the staleness limit now allows."""
        with self._changed:
            self._version = version
            self._pump()

    def pause(self) -> None:
        """Start no further episodes until :meth:`resume` is called. Running episodes continue."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """End the pause (see :meth:`pause`), and let waiting episodes start."""
        with self._changed:
            self._paused = False
            self._pump()

    def statistics(self) -> dict[str, int]:
        """Return the counts of :class:`RolloutStat` (without ``claimed``); the rejections by reason: ``failed``, ``filtered``
        and ``empty``; and ``restarted``, the number of rows that ran again with another workflow or filter."""
        stat = self.staleness.stat
        names = ("enqueued", "running", "accepted", "rejected", "stale")
        return {**{name: getattr(stat, name) for name in names}, **self._counts}

    def prepare_batch(
        self, rows: Iterator[dict[str, Any]], workflow: Any, should_accept_fn: Accept | None = None
    ) -> Batch:
        """Wait for the next training batch and return it. Also reads rows for later batches.

        All trajectories of the batch use the workflow and the filter (``should_accept_fn``) of this call. Rows started
        with another workflow or filter are run again, and count as ``restarted``. Only the caller's thread reads ``rows``.

        Raises:
            DataError: the rows end before the batch is complete.
            EngineError: there was no progress for ``stall_timeout_s``, no episode can start, or the dispatcher is closed.
            RolloutStoppedError: too many consecutive episodes failed or were rejected, or one raised an error of a
                type in ``stops_on``.
        """
        self._adopt(EpisodePlan(workflow, should_accept_fn))
        more = partial(self._read_ahead, rows)
        batch = self._wait(f"batch {self._batches} (weights of version {self._version})", self._take_batch, more)
        more()
        return batch

    def rollout_batch(
        self, rows: Sequence[dict[str, Any]], workflow: Any, should_accept_fn: Accept | None = None
    ) -> list[Trajectory]:
        """Run one episode per row, and return accepted trajectories in row order. Raises the errors of :meth:`run_rows`."""
        return self.run_rows(rows, EpisodePlan(workflow, should_accept_fn)).trajectories

    def run_rows(self, rows: Sequence[dict[str, Any]], plan: EpisodePlan, repeats: bool = False) -> Batch:
        """Run one episode per row, and return accepted trajectories in row order. Raises the errors of :meth:`prepare_batch`.
        Seeds are derived from task ids, which number the rows consecutively across calls. With ``repeats``, a task id is
        instead the index in ``rows``, so that a later call with the same rows uses the same seeds.
        Raises UsageError if rows from :meth:`prepare_batch` or :meth:`load_state` are still waiting in the queue, or if
        :meth:`prepare_batch` has not been called since :meth:`load_state` restored trajectories."""
        with self._changed:
            if self._pending or any(task.plan is None for task in self._finished):
                raise UsageError(
                    "rollout_batch cannot run yet, because the dispatcher still holds rows from prepare_batch or "
                    "load_state; use a separate dispatcher for rollout_batch"
                )
            self._use(plan)
            if repeats:
                self._next_id = 0
            tasks = [self._enqueue(data, plan) for data in rows]
            self._pump()
        ids = {task.id for task in tasks}

        def results() -> Batch | None:
            for task in [task for task in self._finished if task.id in ids]:
                self._finished.remove(task)
                self._discard(task, stale=False, claimed=False)  # no batch uses the task, so it frees capacity
            self._pump()
            if ids & ({task.id for task in self._pending} | self._running.keys()):
                return None
            return Batch.of(tasks, self._version)

        return self._wait(f"the episodes of {len(tasks)} rows", results, lambda: False)

    def close(self) -> None:
        """Cancel running episodes, and close the workflows and the event loop. Further calls do nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            workflows, self._workflows = self._workflows, []
        for task in list(self._running.values()):
            task.cancel()
        self._loop.close(workflows)

    def __enter__(self) -> BatchDispatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- recovery --------------------------------------------------------------------------------------------------

    def export_state(self) -> dict[str, Any]:
        """Return the state for recovery: waiting and running rows, unused trajectories, and counters.

        Must be called between two batches. Running rows are saved as waiting rows, and restart in their original order. With
        this state and the position in the data, a resumed run skips no row, and uses no row in two batches."""
        with self._changed:
            running = sorted(self._running.values(), key=lambda task: task.order)
            finished = sorted(self._finished, key=lambda task: task.order)
            begun = [*running, *finished, *(task for task in self._pending if task.order >= 0)]
            orders = {task.id: order for order, task in enumerate(sorted(begun, key=lambda task: task.order))}

            def saved(task: EpisodeTask) -> dict[str, Any]:
                return {"id": task.id, "data": task.data, "order": orders.get(task.id, -1)}

            return {
                "version": self._version,
                "batches": self._batches,
                "next_id": self._next_id,
                "waiting": [saved(task) for task in (*running, *self._pending)],
                "finished": [saved(task) | {"trajectory": task.trajectory} for task in finished],
                "counts": dict(self._counts),
            }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`export_state` returned. Raises UsageError if the dispatcher has already read rows."""
        with self._changed:
            if self._next_id:
                raise UsageError("rows were already read; call load_state before the first batch")
            self._version, self._batches, self._next_id = state["version"], state["batches"], state["next_id"]
            # Rows that were running keep their order.
            waiting, finished = state["waiting"], state["finished"]
            self._pending = deque(EpisodeTask(row["id"], row["data"], order=row.get("order", -1)) for row in waiting)
            self._finished = [
                EpisodeTask(row["id"], row["data"], order=row.get("order", order), trajectory=row["trajectory"])
                for order, row in enumerate(finished)
            ]
            self._begun = 1 + max((task.order for task in (*self._pending, *self._finished)), default=-1)
            self._counts = dict(state["counts"])
            unused = sum(task.trajectory is not None for task in self._finished)
            self.staleness.recover(self._version, unused, len(self._finished) - unused)
            self.staleness.enqueue(len(self._pending))

    # -- rows ------------------------------------------------------------------------------------------------------

    def _enqueue(self, data: dict[str, Any], plan: EpisodePlan | None) -> EpisodeTask:
        task = EpisodeTask(self._next_id, data, plan)
        self._next_id += 1
        self._pending.append(task)
        self.staleness.enqueue()
        return task

    def _read_ahead(self, rows: Iterator[dict[str, Any]]) -> bool:
        """Fill the queue from ``rows``, and return whether more rows may follow. Reads ``rows`` without holding the lock."""
        while self.staleness.stat.enqueued < self._ahead:
            try:
                data = next(rows)
            except StopIteration:
                return False
            with self._changed:
                self._enqueue(data, self._plan)
                self._pump()
        return True

    def _use(self, plan: EpisodePlan) -> None:
        self._plan = plan
        if not any(workflow is plan.workflow for workflow in self._workflows):
            self._workflows.append(plan.workflow)

    def _adopt(self, plan: EpisodePlan) -> None:
        with self._changed:
            self._use(plan)
            again = []
            for task in [task for task in self._running.values() if task.plan != plan]:
                del self._running[task.id]
                self.staleness.withdraw()
                task.cancel()
                again.append(task)
            for task in [task for task in self._finished if task.plan is not None and task.plan != plan]:
                self._finished.remove(task)
                self._discard(task, stale=False, claimed=False)
                again.append(task)
            if again:
                logger.warning("running %d rows again because the workflow or the filter changed", len(again))
                self._counts["restarted"] += len(again)
            self._requeue(again)
            for task in (*self._pending, *self._finished):
                task.plan = plan
            self._pump()

    def _requeue(self, tasks: list[EpisodeTask]) -> None:
        for task in sorted(tasks, key=lambda task: task.order, reverse=True):
            self._pending.appendleft(EpisodeTask(task.id, task.data, self._plan))
            self.staleness.enqueue()

    def _discard(self, task: EpisodeTask, *, stale: bool, claimed: bool) -> None:
        if task.trajectory is None:  # rejected, and counted by a dynamic batch
            self.staleness.unclaim()
        else:
            self.staleness.discard(stale=stale, claimed=claimed)

    # -- episodes --------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start the tasks that are waiting, as long as there is capacity. The caller must hold the lock."""
        while self._may_begin():
            task = self._pending.popleft()
            task.began_s = time.monotonic()
            if task.order < 0:
                task.order = self._begun
                self._begun += 1
            self.staleness.begin()
            self._running[task.id] = task
            self._notify(task, "running", "")
            task.future = self._loop.start(self._run(task))
            task.future.add_done_callback(partial(self._end, task))
        self._changed.notify_all()

    def _may_begin(self) -> bool:
        if not self._pending or self._paused or self._closed or self._failure is not None:
            return False
        return self._pending[0].plan is not None and self.staleness.capacity(self._version) > 0

    async def _run(self, task: EpisodeTask) -> Trajectory:
        EPISODE.set(Episode(task.id))
        accepts = task.plan.should_accept_fn if task.plan is not None else None
        with tracing.session_context(task.id):
            trajectory = as_trajectory(await task.run(self.client), self._check)
        if trajectory is None:
            raise Rejected("returned None")
        if self._dump is not None:
            self._dump.write(task.id, trajectory)
        if accepts is not None and not accepts(trajectory):
            raise Rejected("rejected by the filter")
        return trajectory

    def _end(self, task: EpisodeTask, future: Future[Trajectory]) -> None:
        """Handle the end of an episode. Called in any thread."""
        with self._changed:
            if self._running.get(task.id) is not task:
                return  # the task was withdrawn
            del self._running[task.id]
            if future.cancelled():
                self.staleness.withdraw()
            elif (error := future.exception()) is not None:
                self._reject(task, error)
            else:
                task.trajectory = future.result()
                self.staleness.accept()
                self._watchdog.accepted()
                self._finished.append(task)
                self._notify(task, "accepted", "")
            self._ended += 1
            self._pump()

    def _reject(self, task: EpisodeTask, error: BaseException) -> None:
        why: Rejection = error.args[0] if isinstance(error, Rejected) else "raised an error"
        self.staleness.reject()
        if self._dynamic:
            self._finished.append(task)
        self._counts[_COUNTERS[why]] += 1
        if why != "raised an error":
            self._notify(task, "rejected", why)
            stopped = self._watchdog.rejected(why)
        else:
            self._notify(task, "failed", repr(error))
            first = self._counts["failed"] == 1
            shown = "\n" + "".join(traceback.format_exception(error)) if first else f" {type(error).__name__}: {error}"
            logger.warning("episode %d failed and is dropped:%s", task.id, shown)
            stopped = self._watchdog.rejected(why, error)
        self._failure = self._failure or stopped

    def _notify(self, task: EpisodeTask, status: str, reason: str) -> None:
        if self._listener is not None:
            self._listener(task.id, status, reason)

    # -- batches ---------------------------------------------------------------------------------------------------

    def _take_batch(self) -> Batch | None:
        self._drop_stale()
        size = self.staleness.batch_size
        if len(self._finished) < size:
            return None
        self._finished.sort(key=lambda task: task.order)
        taken, self._finished = self._finished[:size], self._finished[size:]
        random.Random(derive_seed(self._seed, self._batches)).shuffle(taken)
        self._batches += 1
        return Batch.of(taken, self._version)

    def _drop_stale(self) -> None:
        if self._max_staleness is None:
            return
        again = []
        claimed = self._dynamic and self._on_stale == "drop"
        for task in list(self._finished):
            if task.trajectory is None or not too_old(task.trajectory, self._version, self._max_staleness):
                continue
            self._discard(task, stale=True, claimed=claimed)
            self._notify(task, "dropped", "became too old")
            if claimed:
                task.trajectory = None
                continue
            self._finished.remove(task)
            again.append(task)
        self._requeue(again if self._on_stale == "regenerate" else [])
        self._pump()

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _wait(self, name: str, ready: Callable[[], Result | None], more: Callable[[], bool]) -> Result:
        """Call ``more`` and ``ready`` in turn, until ``ready`` returns a result. ``more`` may read data rows, and
        returns whether the data may contain more rows."""
        began = quiet_since = reported = looked = time.monotonic()
        seen: tuple[int, int] | None = None
        while True:
            self._on_wait()
            may_come = more()
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if self._closed:
                    raise EngineError(f"cannot wait for {name}: the dispatcher is closed")
                self._pump()
                if (result := ready()) is not None:
                    return result
                self._refuse_hopeless(name, may_come)
                self._changed.wait(_POLL_S)
            now = time.monotonic()
            if now - looked < _POLL_S:
                continue  # woken by an episode; querying the engine each time would delay batches
            looked, progress = now, (self._ended, self.client.engine.load().generated_total)
            if progress != seen:
                seen, quiet_since, reported = progress, now, now
            if now - reported >= self._report_s:
                reported = now
                logger.warning("still waiting for %s after %.0f s: %s", name, now - began, self.describe())
            if now - quiet_since >= self._timeout_s:
                raise EngineError(
                    f"waiting for {name}: there was no progress for {self._timeout_s:g} s ({self.describe()})"
                )

    def _refuse_hopeless(self, name: str, may_come: bool) -> None:
        if self._running or self._paused:
            return
        if self._pending and self.staleness.capacity(self._version) <= 0:
            raise EngineError(
                f"waiting for {name}: the staleness limit allows no further episodes at weight version {self._version} "
                f"({self.describe()}); call set_version after each update, and request one batch per weight version"
            )
        if not self._pending and not may_come:
            raise DataError(
                f"waiting for {name}: no rows are left, but only {len(self._finished)} of {self.staleness.batch_size} episodes "
                "are ready; provide more rows, or use a smaller batch size"
            )

    def describe(self) -> str:
        """Describe the state of the episodes in one line."""
        with self._changed:
            stat = self.staleness.stat
            parts = [
                f"{len(self._finished)} of {self.staleness.batch_size} episodes ready",
                f"{stat.running} running, {stat.enqueued} waiting",
                f"capacity for more episodes at weight version {self._version}: {self.staleness.capacity(self._version)}",
                f"so far {stat.accepted} accepted, {stat.rejected} rejected, {stat.stale} too old",
            ]
            oldest = min(self._running.values(), key=lambda task: task.order, default=None)
            if oldest is not None:
                running_s = time.monotonic() - oldest.began_s
                parts.append(f"the oldest running episode ({oldest.id}) started {running_s:.0f} s ago")
            load = self.client.engine.load()
            paused = "paused; " * self._paused
            return "; ".join([*parts, f"{paused}engine: {load.running} samples running, {load.waiting} waiting"])
