"""What can go wrong with worker processes."""

from __future__ import annotations

from areno.errors import ArenoError


class SchedulerError(ArenoError):
    """Base of the errors of a scheduler."""


class WorkerCreationError(SchedulerError):
    """A worker could not be started; the message ends with the last lines of its log."""


class WorkerFailedError(SchedulerError):
    """A worker has failed more often than it may be started again; the message ends with the last lines of its log."""


class WorkerNotFoundError(SchedulerError):
    """There are no workers of this role."""


class WorkerTimeoutError(SchedulerError):
    """Workers were not ready in time."""
