"""The client of a name store. The client adds, reads and deletes names, and renews values before they expire."""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from areno.errors import ArenoError, UsageError
from areno.name_resolve.stores import NameStore

logger = logging.getLogger(__name__)


class NameEntryExists(ArenoError):  # noqa: N818 - the documented name
    """The name to add already has a value."""


class NameEntryNotFound(ArenoError):  # noqa: N818 - the documented name
    """The name to read or delete has no value."""


class Repository:
    """Adds, reads and deletes names and their values in a store.

    If a process adds a value with a time to live, a thread of this process renews the value regularly. The value expires soon
    after the process exits, even if the process was killed.
    """

    def __init__(self, store: NameStore) -> None:
        self.store = store
        self._own: set[str] = set()
        self._alive: dict[str, threading.Event] = {}  # set to stop renewing a value

    def add(
        self,
        name: str,
        value: str,
        delete_on_exit: bool = True,
        keepalive_ttl: float | None = None,
        replace: bool = False,
    ) -> None:
        """Set the value of a name, which is a path of words separated by slashes.

        Args:
            delete_on_exit: whether :meth:`reset` deletes the value.
            keepalive_ttl: seconds until the value expires after this process has died. If None, the value does not
                expire.
            replace: whether to overwrite an existing value. If False, an existing value raises NameEntryExists.
        """
        name = _normal(name)
        if keepalive_ttl is not None and keepalive_ttl <= 0:
            raise UsageError(f"keepalive_ttl={keepalive_ttl} is not a positive number; use a number above 0, or None")
        if not self.store.write(name, str(value), keepalive_ttl, replace):
            raise NameEntryExists(f"the name {name} already has a value; use replace=True to overwrite it")
        self._forget(name)
        if delete_on_exit:
            self._own.add(name)
        if keepalive_ttl is not None:
            ended = self._alive[name] = threading.Event()
            arguments = (self.store, name, keepalive_ttl, ended)
            threading.Thread(target=_keep_alive, args=arguments, name="areno-names", daemon=True).start()

    def add_subentry(
        self, name: str, value: str, delete_on_exit: bool = True, keepalive_ttl: float | None = None
    ) -> str:
        """Set the value of a new, unique name below ``name``, and return the new name."""
        entry = f"{_normal(name)}/{uuid.uuid4().hex[:12]}"
        self.add(entry, value, delete_on_exit, keepalive_ttl)
        return entry

    def delete(self, name: str) -> None:
        """Delete the value of a name. Raises NameEntryNotFound if the name has no value."""
        name = _normal(name)
        self._forget(name)
        if not self.store.remove(name):
            raise NameEntryNotFound(f"the name {name} has no value")

    def get(self, name: str) -> str:
        """Return the value of a name. Raises NameEntryNotFound if the name has no value."""
        value = self.store.read(_normal(name))
        if value is None:
            raise NameEntryNotFound(f"the name {name} has no value")
        return value

    def get_subtree(self, name_root: str) -> list[str]:
        """Return the values of the names that :meth:`find_subtree` returns, in the same order."""
        values = (self.store.read(name) for name in self.find_subtree(name_root))
        return [value for value in values if value is not None]

    def find_subtree(self, name_root: str) -> list[str]:
        """Return the sorted names that have a value, among ``name_root`` and all names below ``name_root``."""
        return sorted(self.store.under(_normal(name_root)))

    def wait(self, name: str, timeout: float | None = None, poll_frequency: float = 0.1) -> str:
        """Wait until a name has a value, and return the value. Raises TimeoutError after ``timeout`` seconds."""
        name, start = _normal(name), time.monotonic()
        while (value := self.store.read(name)) is None:
            if timeout is not None and time.monotonic() - start >= timeout:
                raise TimeoutError(f"the name {name} has no value after {timeout:g} s")
            time.sleep(poll_frequency)
        return value

    def watch_names(
        self,
        names: str | Sequence[str],
        call_back: Callable[[], None],
        poll_frequency: float = 1.0,
        wait_timeout: float = 60.0,
    ) -> None:
        """Call ``call_back`` once, in a thread, when one of the names loses its value.

        If a name gets no value within ``wait_timeout`` seconds, ``call_back`` is also called. This timeout restarts whenever
        the store is unreachable.
        """
        watched = [_normal(name) for name in ([names] if isinstance(names, str) else names)]

        def all_alive(*names: str) -> bool | None:
            try:
                return all(self.store.read(name) is not None for name in names)
            except (ArenoError, OSError) as error:  # an unreachable store does not mean that a value is lost
                logger.warning("cannot read the names %s: %s; trying again", ", ".join(names), error)
                return None

        def watch() -> None:
            for name in watched:
                end = time.monotonic() + wait_timeout
                while not (alive := all_alive(name)):
                    if alive is None:
                        end = time.monotonic() + wait_timeout
                    elif time.monotonic() >= end:
                        logger.warning("the name %s has no value after %g s", name, wait_timeout)
                        call_back()
                        return
                    time.sleep(poll_frequency)
            while all_alive(*watched) is not False:
                time.sleep(poll_frequency)
            call_back()

        threading.Thread(target=watch, name="areno-names-watch", daemon=True).start()

    def clear_subtree(self, name_root: str) -> None:
        """Delete the values of ``name_root`` and of all names below ``name_root``."""
        for name in self.find_subtree(name_root):
            self._forget(name)
            self.store.remove(name)

    def reset(self) -> None:
        """Delete the values that this process added with ``delete_on_exit``, and stop renewing values with a time to live.

        A value that another process has replaced is not deleted.
        """
        names = list(self._own)
        for name in {*names, *self._alive}:
            self._forget(name)
        for name in names:
            self.store.remove(name, own=True)

    def _forget(self, name: str) -> None:
        self._own.discard(name)
        if (ended := self._alive.pop(name, None)) is not None:
            ended.set()


def _keep_alive(store: NameStore, name: str, ttl: float, ended: threading.Event) -> None:
    while not ended.wait(min(ttl / 4, 1.0)):
        try:
            if not store.touch(name, ttl):
                return
        except (ArenoError, OSError) as error:  # the store may be reachable again before the value expires
            logger.warning("cannot renew the time to live of the name %s: %s; trying again", name, error)


def _normal(name: str) -> str:
    """Strip the slashes at both ends. Raises UsageError if the name is invalid."""
    words = name.strip("/").split("/")
    if any(not word or word.startswith(".") or "\0" in word for word in words):
        raise UsageError(
            f"{name!r} is not a valid name; write words that are separated by single slashes and do not start with a dot, such "
            "as experiment/trial/key"
        )
    return "/".join(words)
