"""Typed errors. Each message names the value, and says what to do next."""

import re
import sys

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_MEMORY_HINT = (
    "memory ran out: lower --mini-bs first (the result stays the same), then --max-new-tokens or --kv-cache-tokens; in an "
    "experiment, actor.mb_spec.max_tokens_per_mb or rollout.max_concurrent_rollouts. `areno plan` shows what takes memory"
)


class ArenoError(Exception):
    """Base of every error that areno raises on purpose; the command line prints its message without a traceback."""


class UsageError(ArenoError, ValueError):
    """The user's input cannot work: an option, a file or a hook. Exit code 2."""


class DataError(UsageError):
    """A data row is unusable; the message names file, row number and key."""


class UnsupportedModelError(UsageError):
    """The checkpoint's architecture cannot be run by the engine; the message names what is missing."""


class RewardError(ArenoError):
    """A reward function raised, hung or returned something that is not a finite number; the message names the record."""


class AgentError(ArenoError):
    """An agent failed, or returned something that is no trajectory; the message says what, and where."""


class CheckpointError(ArenoError):
    """A checkpoint could not be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint was read, and is not what was written."""


class EngineError(ArenoError, RuntimeError):
    """The engine was used out of order, or its loop died; the message carries the cause."""


def exit_code(error: BaseException) -> int:
    """Say in one line on stderr what has ended a program, and return its exit code.

    Codes are 2 for what the user can correct, 130 for Ctrl-C, that of a ``SystemExit``, which says nothing, and else 1.
    """
    if isinstance(error, SystemExit):
        return int(error.code or 0)
    interrupted = isinstance(error, KeyboardInterrupt)
    sys.stderr.write("interrupted\n" if interrupted else f"error: {str(error) or type(error).__name__}\n")
    if ran_out_of_memory(error):
        sys.stderr.write(f"{_MEMORY_HINT}\n")
    return 130 if interrupted else 2 if isinstance(error, UsageError) else 1


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, here or in what caused the error, on a CPU or a GPU."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))):
            return True
        error = error.__cause__
    return False
