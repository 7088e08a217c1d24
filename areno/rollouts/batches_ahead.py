"""Generates the batches of ``areno train`` up to ``--max-staleness`` steps before training uses them.

Generation of the batch of step s starts as soon as the weights have version ``s - max_staleness``. Training uses the batches in
data order. After generation of a batch has started, the weights are therefore updated at most ``max_staleness`` times before
training uses the batch, so no token is older than this number of versions.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any

from areno.training.loop import PlannedStep
from areno.types import RolloutResult


class BatchesAhead:
    """Starts generating batches before training needs them.

    Args:
        begin: function ``(step, items)`` that starts generating the batch of a step, and returns one future per item. An item
            is a data row prepared for generation (:class:`areno.types.PromptItem`). The keys of ``items`` are
            the indices of the items in the batch. Items whose results were restored from a checkpoint are omitted.
        max_staleness: maximum number of steps that generation may be ahead of training.
    """

    def __init__(self, begin: Callable[[int, dict[int, Any]], Sequence[Future[Any]]], max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self._begin = begin
        self._begun: dict[int, list[Future[Any]]] = {}
        self._restored: dict[int, dict[int, Any]] = {}

    def steps(self, planned: Iterator[PlannedStep]) -> Iterator[PlannedStep]:
        """Yield the planned steps. Before step s, start generating all batches up to step ``s + max_staleness``."""
        ahead: deque[PlannedStep] = deque()
        while True:
            for step in islice(planned, self.max_staleness + 1 - len(ahead)):
                self.begin(step.at.global_step, step.batch.items)
                ahead.append(step)
            if not ahead:
                return
            yield ahead.popleft()

    def begin(self, step: int, parts: Sequence[Any]) -> None:
        """Start generating the batch of a step. Results that were restored from a checkpoint are not generated again."""
        begun: dict[int, Future[Any]] = {}
        for index, result in self._restored.pop(step, {}).items():
            begun[index] = Future()
            begun[index].set_result(result)
        missing = {index: part for index, part in enumerate(parts) if index not in begun}
        begun |= zip(missing, self._begin(step, missing), strict=True)
        self._begun[step] = [begun[index] for index in range(len(parts))]

    def take(self, step: int) -> list[Future[Any]]:
        """Return the futures of a step's batch. The batch is kept until :meth:`complete` is called."""
        return self._begun[step]

    def complete(self, step: int) -> None:
        """Discard the batch of a step after training on it."""
        self._begun.pop(step, None)

    def export_state(self) -> dict[int, dict[int, Any]]:
        """Return the finished results that training has not used yet: ``{step: {index in the step's batch: result}}``.
        A resumed run generates only the missing results."""
        done = {
            step: {index: future.result() for index, future in enumerate(futures) if _succeeded(future)}
            for step, futures in self._begun.items()
        }
        return {step: parts for step, parts in done.items() if parts}

    def load_state(self, state: dict[int, dict[int, Any]]) -> None:
        """Restore the results that :meth:`export_state` returned. These results are not generated again."""
        self._restored = dict(state)


def _succeeded(future: Future[Any]) -> bool:
    """Whether a future has a complete result. The result of an aborted request is incomplete."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        return False
    result = future.result()
    return not (isinstance(result, RolloutResult) and any(s.finish_reason == "abort" for s in result.sequences))
