"""Names and their values in a store, as one process uses them."""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from areno.errors import ArenoError, UsageError
from areno.name_resolve.stores import NameStore

logger = logging.getLogger(__name__)


class NameEntryExists(ArenoError):  # noqa: N818 - the documented name
    """The name has a value already."""


class NameEntryNotFound(ArenoError):  # noqa: N818 - the documented name
    """The name has no value."""


class Repository:
    """Names and their values in a store.

    A value that was added with a time to live is kept alive by a thread of the process that has added it, and is gone soon
    after that process, whatever ends it.
    """

    def __init__(self, store: NameStore) -> None:
        self.store = store
        self._own: set[str] = set()
        self._alive: dict[str, threading.Event] = {}  # set where a value is no longer to be kept alive

    def add(
        self,
        name: str,
        value: str,
        delete_on_exit: bool = True,
        keepalive_ttl: float | None = None,
        replace: bool = False,
    ) -> None:
        """Give a name, words with slashes between them, a value.

        Args:
            delete_on_exit: :meth:`reset` deletes it.
            keepalive_ttl: seconds after which it is gone if this process has died; None never.
            replace: a name that has a value gets this one; else it is a NameEntryExists.
        """
        name = _normal(name)
        if keepalive_ttl is not None and keepalive_ttl <= 0:
            raise UsageError(f"keepalive_ttl={keepalive_ttl}: give seconds above 0, or None")
        if not self.store.write(name, str(value), keepalive_ttl, replace):
            raise NameEntryExists(f"the name {name} has a value already; replace=True would replace it")
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
        """Give a new name below ``name`` a value; returns that name."""
        entry = f"{_normal(name)}/{uuid.uuid4().hex[:12]}"
        self.add(entry, value, delete_on_exit, keepalive_ttl)
        return entry

    def delete(self, name: str) -> None:
        """Delete a value; raises :class:`NameEntryNotFound` if there is none."""
        name = _normal(name)
        self._forget(name)
        if not self.store.remove(name):
            raise NameEntryNotFound(f"the name {name} has no value")

    def get(self, name: str) -> str:
        """Value of a name; raises :class:`NameEntryNotFound` if it has none."""
        value = self.store.read(_normal(name))
        if value is None:
            raise NameEntryNotFound(f"the name {name} has no value")
        return value

    def get_subtree(self, name_root: str) -> list[str]:
        """Values of a name and of all below it, in the order of :meth:`find_subtree`."""
        values = (self.store.read(name) for name in self.find_subtree(name_root))
        return [value for value in values if value is not None]

    def find_subtree(self, name_root: str) -> list[str]:
        """Names with a value: the name itself and all below it, sorted."""
        return sorted(self.store.under(_normal(name_root)))

    def wait(self, name: str, timeout: float | None = None, poll_frequency: float = 0.1) -> str:
        """Value of a name as soon as it has one; TimeoutError after so many seconds, which None does not bound."""
        name, began = _normal(name), time.monotonic()
        while (value := self.store.read(name)) is None:
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
    ) -> None:
        """Call back once, in a thread, as soon as one of some names has no value any more.

        A name that has none yet is waited for as long as ``wait_timeout``, in seconds; then it counts as gone.
        """
        watched = [_normal(name) for name in ([names] if isinstance(names, str) else names)]

        def watch() -> None:
            with contextlib.suppress(TimeoutError):
                for name in watched:
                    self.wait(name, wait_timeout, poll_frequency)
                while all(self.store.read(name) is not None for name in watched):
                    time.sleep(poll_frequency)
            call_back()

        threading.Thread(target=watch, name="areno-names-watch", daemon=True).start()

    def clear_subtree(self, name_root: str) -> None:
        """Delete the value of a name and all below it."""
        for name in self.find_subtree(name_root):
            self._forget(name)
            self.store.remove(name)

    def reset(self) -> None:
        """Delete what this process has added with ``delete_on_exit``, and keep nothing alive any more."""
        own = list(self._own)
        for name in {*own, *self._alive}:
            self._forget(name)
        for name in own:
            self.store.remove(name)

    def _forget(self, name: str) -> None:
        self._own.discard(name)
        if (ended := self._alive.pop(name, None)) is not None:
            ended.set()


def _keep_alive(store: NameStore, name: str, ttl: float, ended: threading.Event) -> None:
    while not ended.wait(min(ttl / 4, 1.0)):
        try:
            if not store.touch(name, ttl):
                return
        except ArenoError as error:  # the server may be back before the value is gone
            logger.warning("the name %s could not be kept alive, trying again: %s", name, error)


def _normal(name: str) -> str:
    """A name without slashes at its ends."""
    words = name.strip("/").split("/")
    if any(word in ("", ".", "..") or "\0" in word for word in words):
        raise UsageError(f"{name!r} is no name: give words with one slash between them, such as experiment/trial/key")
    return "/".join(words)
