"""Sets up logging for the command line.

Only the command line and the trainers of experiments attach handlers to the logger ``areno``. Programs that use areno as a
library keep their own logging setup. The log file of a run gets every record. The console gets the records of level
``ARENO_LOG_LEVEL`` and above. While a live display uses the terminal, other output would corrupt the display, so the display
itself prints the console lines (``route_console``).
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import ClassVar, TextIO

from areno.errors import UsageError
from areno.storage.run_dir import RunDirectory

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """Writes log records to the console.

    While a live display is active, records of ``live_level`` and above go to the display, and other records are dropped.
    """

    writer: ClassVar[Callable[[str], None] | None] = None

    def __init__(self, stream: TextIO, live_level: int) -> None:
        super().__init__(stream)
        self.live_level = live_level

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record. The method does not raise: ``logging`` handles a failure of the stream."""
        writer = ConsoleHandler.writer
        if writer is None:
            super().emit(record)
        elif record.levelno >= self.live_level:
            try:
                writer(self.format(record))
            except Exception:  # the contract of logging.Handler.emit
                self.handleError(record)


class LoggingSetup:
    """The handlers that ``setup_logging`` has installed on the logger ``areno``. At most one setup is active.

    ``shows_lines`` says whether the console shows log lines of each step instead of a live display.
    """

    active: ClassVar[LoggingSetup | None] = None

    def __init__(self, handlers: list[logging.Handler], level: int, *, shows_lines: bool = False) -> None:
        self.shows_lines = shows_lines
        if LoggingSetup.active is not None:
            LoggingSetup.active.close()
        logger = logging.getLogger("areno")
        self._handlers = handlers
        self._previous_level = logger.level
        for handler in handlers:
            handler.setFormatter(logging.Formatter(LOG_FORMAT))
            logger.addHandler(handler)
        logger.setLevel(level)
        files = [h.stream for h in handlers if isinstance(h, logging.FileHandler) and h.stream is not None]
        self._dumps_stacks = bool(files)
        if self._dumps_stacks:  # kill -USR1 shows where a run hangs
            faulthandler.register(signal.SIGUSR1, file=files[0].fileno(), all_threads=True)
        LoggingSetup.active = self

    def close(self) -> None:
        """Remove and close the handlers. Does nothing if they are closed already, or if a later setup has replaced them."""
        if LoggingSetup.active is not self:
            return
        LoggingSetup.active = None
        if self._dumps_stacks:
            faulthandler.unregister(signal.SIGUSR1)
        logger = logging.getLogger("areno")
        for handler in self._handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(self._previous_level)

    def __enter__(self) -> LoggingSetup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def log_level(value: str | None = None) -> int:
    """Convert the name of a log level, in upper or lower case, to the number that ``logging`` uses.

    None means the level in ``ARENO_LOG_LEVEL`` (default INFO).
    Raises UsageError if the level is unknown.
    """
    name = value if value is not None else os.environ.get("ARENO_LOG_LEVEL") or "INFO"
    if name.upper() not in LEVELS:
        source = "" if value is not None else " of the environment variable ARENO_LOG_LEVEL"
        raise UsageError(f"log level {name!r}{source} is unknown; use one of {', '.join(LEVELS)}")
    return int(getattr(logging, name.upper()))


def setup_logging(
    run_dir: RunDirectory | None, *, level: str | None = None, stream: TextIO | None = None
) -> LoggingSetup:
    """Install the command line's handlers on the logger ``areno``, and remove the handlers of an earlier setup.

    With a run directory, the log file gets every record, and a live display shows only warnings and errors. To choose
    a different minimum level for the display, set ``level`` or the environment variable ``ARENO_LOG_LEVEL``. Raises UsageError
    if the level is unknown, or if the run directory or its log file cannot be created.
    """
    console_level = log_level(level)
    explicit = level is not None or bool(os.environ.get("ARENO_LOG_LEVEL"))
    quiet = run_dir is not None and not explicit
    console = ConsoleHandler(stream or sys.stderr, max(console_level, logging.WARNING) if quiet else console_level)
    console.setLevel(console_level)
    handlers: list[logging.Handler] = [console]
    if run_dir is not None:
        path = run_dir.create().log_path
        try:
            handlers.append(logging.FileHandler(path, encoding="utf-8"))
        except OSError as error:
            raise UsageError(
                f"log file {path} cannot be written: {error.strerror or error}; make the file writable, or choose another run "
                "directory"
            ) from error
    shows_lines = explicit and console_level <= logging.INFO
    return LoggingSetup(handlers, logging.DEBUG if run_dir is not None else console_level, shows_lines=shows_lines)


def shows_lines() -> bool:
    """Return True if the user set the log level to INFO or DEBUG: the console then shows log lines, not a live display."""
    return LoggingSetup.active is not None and LoggingSetup.active.shows_lines


def route_console(writer: Callable[[str], None] | None) -> None:
    """Send console lines to ``writer`` (a live display). If ``writer`` is None, send console lines to the console's stream.

    The console's stream is stderr by default.
    """
    ConsoleHandler.writer = writer
