"""Error types. An error message should name the cause, such as an invalid value, and say how to fix the error."""

import re
import sys

OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
"""Pattern of library messages about a failed allocation."""
MEMORY_HINT = (
    "out of memory: lower --mini-bs first (the microbatch size, which does not change results), then --max-new-tokens or "
    "--kv-cache-tokens; in an experiment, lower actor.mb_spec.max_tokens_per_mb or "
    "rollout.max_concurrent_rollouts. `areno plan` shows the memory use"
)
"""Advice for an out-of-memory error."""


class ArenoError(Exception):
    """Base of areno's error types; the command line prints the message without a traceback."""


class UsageError(ArenoError, ValueError):
    """Invalid user input, such as an option, a file or a user-defined function. Exit code 2."""


class DataError(UsageError):
    """The data is invalid; the message about an invalid row names the row's source and number."""


class UnsupportedModelError(UsageError):
    """The engine does not support the checkpoint's architecture; the message names what is missing."""


class RewardError(ArenoError):
    """A reward function raised an exception, timed out, returned an invalid value, or could not be imported."""


class AgentError(ArenoError):
    """An agent failed, or did not return a trajectory."""


class CheckpointError(ArenoError):
    """A checkpoint could not be written or read."""


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint differ from the files that were written."""


class EngineError(ArenoError, RuntimeError):
    """The engine or the cluster failed, or methods of the engine were called in the wrong order.

    The message includes the cause.
    """


class GrammarError(EngineError):
    """The grammar that constrains the response to a request raised an exception during generation."""


def exit_code(error: BaseException) -> int:
    """Print an error on stderr, and return the program's exit code. If the process ran out of memory, also print advice.

    The code is 2 for a `UsageError`, 130 for Ctrl-C, and 1 for other errors. For a ``SystemExit`` whose code is a
    number or None, nothing is printed, and the result is this number or 0. A ``SystemExit`` with a text, such as
    ``sys.exit("stop")`` in a user's function, is treated like other errors.
    """
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return error.code or 0
    interrupted = isinstance(error, KeyboardInterrupt)
    sys.stderr.write("interrupted\n" if interrupted else f"error: {str(error) or type(error).__name__}\n")
    if ran_out_of_memory(error):
        sys.stderr.write(f"{MEMORY_HINT}\n")
    return 130 if interrupted else 2 if isinstance(error, UsageError) else 1


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message. Without a message, return the name of the error's class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error or one of its causes is a failed allocation on a CPU or a GPU."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error))):
            return True
        error = error.__cause__
    return False
