"""What every repository of names does, on top of four operations of its own."""

from __future__ import annotations

import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from areno.errors import ArenoError, UsageError


class NameEntryExists(ArenoError):  # noqa: N818 - the documented name
    """The name has a value already."""


class NameEntryNotFound(ArenoError):  # noqa: N818 - the documented name
    """The name has no value."""


class Repository(ABC):
    """Names and their values.

    A value that was added with a time to live is kept alive by a thread of the process that has added it, and is gone soon
    after that process, whatever ends it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: set[str] = set()
        self._alive: dict[str, float] = {}
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None

    # -- what differs ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _write(self, name: str, value: str, ttl: float | None, replace: bool) -> bool:
        """Set a value; False if there is one and it is not to be replaced."""

    @abstractmethod
    def _read(self, name: str) -> str | None:
        """Value of a name; None if there is none, or if it has outlived its time."""

    @abstractmethod
    def _remove(self, name: str) -> bool:
        """Delete a value; whether there was one."""

    @abstractmethod
    def _under(self, root: str) -> list[str]:
        """Names of live values that are ``root`` or begin with its words, sorted."""

    @abstractmethod
    def _touch(self, name: str, ttl: float) -> bool:
        """Prolong the life of a value; whether it is still there."""

    # -- what is common --------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        value: str,
        delete_on_exit: bool = True,
        keepalive_ttl: float | None = None,
        replace: bool = False,
    ) -> None:
        """Give a name a value.

        Args:
            name: words with slashes between them.
            value: written as text.
            delete_on_exit: :meth:`reset` deletes it.
            keepalive_ttl: seconds after which it is gone if this process has died; None never.
            replace: a name that has a value gets this one.

        Raises:
            NameEntryExists: the name has a value, and it is not to be replaced.
            UsageError: it is no name.
        """
        name = normal(name)
        if keepalive_ttl is not None and keepalive_ttl <= 0:
            raise UsageError(f"keepalive_ttl={keepalive_ttl}: give seconds above 0, or None")
        if not self._write(name, str(value), keepalive_ttl, replace):
            raise NameEntryExists(f"the name {name} has a value already; replace=True would replace it")
        with self._lock:
            (self._own.add if delete_on_exit else self._own.discard)(name)
            self._alive.pop(name, None)
            if keepalive_ttl is not None:
                self._alive[name] = keepalive_ttl
                self._keep()

    def add_subentry(
        self, name: str, value: str, delete_on_exit: bool = True, keepalive_ttl: float | None = None
    ) -> str:
        """Give a new name below ``name`` a value; returns that name."""
        entry = f"{normal(name)}/{uuid.uuid4().hex[:12]}"
        self.add(entry, value, delete_on_exit, keepalive_ttl)
        return entry

    def delete(self, name: str) -> None:
        """Delete a value.

        Raises:
            NameEntryNotFound: there is none.
        """
        name = normal(name)
        self._forget(name)
        if not self._remove(name):
            raise NameEntryNotFound(f"the name {name} has no value")

    def get(self, name: str) -> str:
        """Value of a name.

        Raises:
            NameEntryNotFound: it has none.
        """
        value = self._read(normal(name))
        if value is None:
            raise NameEntryNotFound(f"the name {name} has no value")
        return value

    def get_subtree(self, name_root: str) -> list[str]:
        """Values of a name and of all below it, in the order of :meth:`find_subtree`."""
        values = (self._read(name) for name in self._under(normal(name_root)))
        return [value for value in values if value is not None]

    def find_subtree(self, name_root: str) -> list[str]:
        """Names with a value: the name itself and all below it, sorted."""
        return self._under(normal(name_root))

    def wait(self, name: str, timeout: float | None = None, poll_frequency: float = 0.1) -> str:
        """Value of a name as soon as it has one.

        Args:
            name: to look up.
            timeout: seconds; None waits for ever.
            poll_frequency: seconds between two looks.

        Raises:
            TimeoutError: it has none by then.
        """
        name, began = normal(name), time.monotonic()
        while (value := self._read(name)) is None:
            if timeout is not None and time.monotonic() - began >= timeout:
                raise TimeoutError(f"the name {name} has got no value within {timeout:g} s")
            time.sleep(poll_frequency)
        return value

    def watch_names(
        self,
        names: str | Sequence[str],
        call_back: Callable[[], None],
        poll_frequency: float = 1.0,
        wait_timeout: float = 60.0,
    ) -> threading.Thread:
        """Call back once as soon as one of some names has no value any more, in a thread that is returned.

        A name that has none yet is waited for as long as ``wait_timeout``, in seconds; then it counts as gone.
        """
        watched = [normal(name) for name in ([names] if isinstance(names, str) else names)]

        def watch() -> None:
            try:
                for name in watched:
                    self.wait(name, wait_timeout, poll_frequency)
                while all(self._read(name) is not None for name in watched):
                    time.sleep(poll_frequency)
            except TimeoutError:
                pass
            call_back()

        thread = threading.Thread(target=watch, name="areno-names-watch", daemon=True)
        thread.start()
        return thread

    def clear_subtree(self, name_root: str) -> None:
        """Delete the value of a name and all below it."""
        for name in self._under(normal(name_root)):
            self._forget(name)
            self._remove(name)

    def reset(self) -> None:
        """Delete what this process has added with ``delete_on_exit``, and keep nothing alive any more."""
        with self._lock:
            own, self._own, self._alive = self._own, set(), {}
            self._stop.set()
        for name in own:
            self._remove(name)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._own.discard(name)
            self._alive.pop(name, None)

    def _keep(self) -> None:
        """Keep values alive from now on; the lock is held."""
        if self._keeper is None or not self._keeper.is_alive() or self._stop.is_set():
            self._stop = threading.Event()
            self._keeper = threading.Thread(target=self._prolong, args=[self._stop], name="areno-names", daemon=True)
            self._keeper.start()

    def _prolong(self, stop: threading.Event) -> None:
        pause = 0.0
        while not stop.wait(pause):
            with self._lock:
                alive = dict(self._alive)
            for name, ttl in alive.items():
                if not self._touch(name, ttl):
                    with self._lock:
                        self._alive.pop(name, None)
            pause = min([ttl / 4 for ttl in alive.values()], default=0.25)
            pause = min(pause, 1.0)


def normal(name: str) -> str:
    """A name without slashes at its ends.

    Raises:
        UsageError: it has no words, or words that mean folders.
    """
    words = name.strip("/").split("/")
    if any(word in ("", ".", "..") or "\0" in word for word in words):
        raise UsageError(f"{name!r} is no name: give words with one slash between them, such as experiment/trial/key")
    return "/".join(words)
