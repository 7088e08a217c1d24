"""Stores names in an actor of a Ray cluster."""

import logging
import os
import socket
import threading
import time
import traceback
import uuid
from collections import OrderedDict
from typing import Any

from areno.config.packages import install_command
from areno.errors import ArenoError, UsageError, first_line
from areno.name_resolve.stores import MemoryStore

NAMESPACE = "areno"
_CALL_S, _PAUSE_S, _DIAL_S = 30.0, 0.2, 10.0
_KEPT_RESULTS = 1000  # far more than the calls of all processes within _CALL_S


def connect(setting: str) -> Any:
    """Connect this process to the Ray cluster at ``RAY_ADDRESS``, or to the cluster of this machine. Return the module ``ray``.

    Raises:
        UsageError: Ray is not installed, there is no cluster, or authentication fails. The message contains
            ``setting``, the name of the setting that requires Ray.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError(f"{setting} needs Ray; install it: {install_command('ray')}") from error
    if ray.is_initialized():
        return ray
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if host and port.isdigit():  # Ray itself would retry for minutes
            socket.create_connection((host, int(port)), timeout=_DIAL_S).close()
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        if "AuthenticationError" in "".join(traceback.format_exception(error)):  # it may be quoted in another error
            raise UsageError(
                f"{setting}: the Ray cluster at {address} requires a token; set RAY_AUTH_MODE=token, and either set "
                "RAY_AUTH_TOKEN or copy the file ~/.ray/auth_token from the cluster's first machine"
            ) from error
        raise UsageError(
            f"{setting}: there is no Ray cluster at {address} ({first_line(error)}); set RAY_ADDRESS=HOST:PORT, or start a "
            "cluster with 'ray start --head' and, on further machines, 'ray start --address=HOST:PORT'"
        ) from error
    return ray


class _StoreActor(MemoryStore):
    """A memory store that executes each call only once. If a call is retried, the first result is returned."""

    def __init__(self) -> None:
        super().__init__()
        self._results: OrderedDict[str, Any] = OrderedDict()

    def run(self, call_id: str, method: str, *arguments: Any) -> Any:
        if call_id not in self._results:
            self._results[call_id] = getattr(self, method)(*arguments)
            if len(self._results) > _KEPT_RESULTS:
                self._results.popitem(last=False)
        return self._results[call_id]


class RayStore:
    """See :class:`NameStore`. Raises UsageError if there is no Ray cluster.

    The names are stored in a Ray actor, which outlives the processes that use the store. If Ray restarts the actor, the
    store is empty at first. Each process then writes its values again at its next :meth:`touch`.
    """

    def __init__(self, actor_name: str) -> None:
        ray = connect("name_resolve.type=ray")
        self._ray: Any = ray
        options = {"name": actor_name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        made: Any = ray.remote(_StoreActor)
        self._actor = made.options(num_cpus=0, max_restarts=-1, **options).remote()
        self._own: dict[str, tuple[str, float | None]] = {}
        self._owner = uuid.uuid4().hex
        self._identity, self._renewing = self._call("identity"), threading.Lock()

    def write(self, name: str, value: str, ttl: float | None, replace: bool) -> bool:
        """See :class:`NameStore`."""
        written = bool(self._call("write", name, value, ttl, replace, self._owner))
        if written:
            self._own[name] = (value, ttl)
        return written

    def read(self, name: str) -> str | None:
        """See :class:`NameStore`."""
        value: str | None = self._call("read", name)
        return value

    def remove(self, name: str, own: bool = False) -> bool:
        """See :class:`NameStore`."""
        self._own.pop(name, None)
        return bool(self._call("remove", name, own, self._owner))

    def under(self, root: str) -> list[str]:
        """See :class:`NameStore`."""
        return list(self._call("under", root))

    def touch(self, name: str, ttl: float) -> bool:
        """See :class:`NameStore`."""
        if self._call("touch", name, ttl, self._owner):
            return True
        with self._renewing:
            identity = self._call("identity")
            if identity != self._identity:
                for own, (value, kept) in list(self._own.items()):
                    self._call("write", own, value, kept, False, self._owner)
                self._identity = identity
        touched = bool(self._call("touch", name, ttl, self._owner))
        if not touched:
            self._own.pop(name, None)
        return touched

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store in the actor. Retry while the actor restarts or is unreachable."""
        deadline, call_id = time.monotonic() + _CALL_S, uuid.uuid4().hex
        while True:
            if not self._ray.is_initialized():  # Ray would start a cluster of its own
                raise ArenoError("this process is no longer connected to the Ray cluster of the name store")
            try:
                return self._ray.get(self._actor.run.remote(call_id, method, *arguments), timeout=_CALL_S)
            except self._ray.exceptions.ActorUnavailableError as error:
                if time.monotonic() > deadline:
                    raise ArenoError(f"the Ray actor of the name store is unavailable: {error}") from error
                time.sleep(_PAUSE_S)
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                raise ArenoError(
                    f"the Ray actor of the name store does not respond: {type(error).__name__}: {error}"
                ) from error
