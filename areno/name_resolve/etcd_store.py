"""Stores names in etcd, through its HTTP gateway. Each value with a time to live has a separate lease.

An etcd lease lasts a whole number of seconds, at least two. etcd deletes a value up to half a second after its lease has
expired. After a restart, an etcd server still has its values, and renews all leases.
"""

import base64
import json
import math
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from areno.config.packages import install_command
from areno.errors import ArenoError, UsageError
from areno.name_resolve.stores import is_under

T = TypeVar("T")

_PREFIX = "/areno/names/"
_CALL_S = 5.0
# Seconds for which a call is retried while the server is unreachable, and between two attempts.
_RETRY_S, _PAUSE_S = 30.0, 0.2


class EtcdStore:
    """See :class:`NameStore`.

    Raises:
        UsageError: ``address`` is not ``HOST:PORT``, the server does not respond, or the package ``etcd3gw`` is missing.
    """

    def __init__(self, address: str) -> None:
        try:
            import etcd3gw
            from etcd3gw import exceptions
        except ImportError as error:
            raise UsageError(f"name_resolve.type=etcd3 needs etcd3gw; install it: {install_command('etcd')}") from error
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(
                f"name_resolve.etcd3_addr={address} is not an address; write HOST:PORT, such as localhost:2379"
            )
        self.address = address
        self._away: tuple[type[Exception], ...] = (
            exceptions.ConnectionFailedError,
            exceptions.ConnectionTimeoutError,
        )
        self._refused: type[Exception] = exceptions.Etcd3Exception
        self._client: Any = etcd3gw.client(host=host, port=int(port), timeout=_CALL_S, api_path="/v3/")
        self._leases: dict[str, tuple[Any, str]] = {}  # lease, if any, and text of this process's values
        try:
            self._client.status()
        except (*self._away, self._refused) as error:
            raise UsageError(
                f"name_resolve.etcd3_addr={address}: no etcd server responds at this address ({error}); start a server, or "
                "correct the address"
            ) from error

    def write(self, name: str, value: str, ttl: float | None, replace: bool) -> bool:
        """See :class:`NameStore`."""
        # The mark identifies a value that this process has written, if the acknowledgment was lost.
        text = json.dumps({"value": value, "mark": uuid.uuid4().hex})
        return self._write(name, text, ttl, replace)

    def read(self, name: str) -> str | None:
        """See :class:`NameStore`."""
        text = self._text(name)
        return None if text is None else str(json.loads(text)["value"])

    def remove(self, name: str, own: bool = False) -> bool:
        """See :class:`NameStore`."""
        _, text = self._leases.pop(name, (None, ""))
        if own:
            return self._remove_own(name, text)
        return bool(self._call(lambda: self._client.delete(_PREFIX + name)))

    def _remove_own(self, name: str, text: str) -> bool:
        key, value = (base64.b64encode(part.encode()).decode() for part in (_PREFIX + name, text))
        unchanged = {"key": key, "result": "EQUAL", "target": "VALUE", "value": value}
        request = {"compare": [unchanged], "success": [{"request_delete_range": {"key": key}}], "failure": []}
        return bool(self._call(lambda: self._client.transaction(request)).get("succeeded", False))

    def under(self, root: str) -> list[str]:
        """See :class:`NameStore`."""
        entries = self._call(lambda: self._client.get_prefix(_PREFIX + root))
        names = [_plain(metadata["key"]).removeprefix(_PREFIX) for _, metadata in entries]
        return [name for name in names if is_under(name, root)]

    def touch(self, name: str, ttl: float) -> bool:
        """See :class:`NameStore`. If the value has expired while etcd was unreachable, write the value again."""
        lease, text = self._leases.get(name, (None, ""))
        if lease is None:
            return False
        runs, stored = self._call(lease.refresh) > 0, self._text(name)
        if runs or stored not in (None, text):  # deleted, or written by another process
            return stored == text
        return self._write(name, text, ttl, replace=True)

    def _write(self, name: str, text: str, ttl: float | None, replace: bool) -> bool:
        lease = None if ttl is None else self._call(lambda: self._client.lease(max(math.ceil(ttl), 1)))

        def attempt() -> bool:
            if replace:
                return bool(self._client.put(_PREFIX + name, text, lease=lease))
            return bool(self._client.create(_PREFIX + name, text, lease=lease)) or self._text(name) == text

        written = self._call(attempt)
        if lease is not None and not written:
            self._call(lease.revoke)
        elif written:
            self._leases[name] = (lease, text)
        return written

    def _text(self, name: str) -> str | None:
        stored = self._call(lambda: self._client.get(_PREFIX + name))
        return _plain(stored[0]) if stored else None

    def _call(self, call: Callable[[], T]) -> T:
        """Make a call, and retry while the server is unreachable. Raises ArenoError on a timeout or a server error."""
        deadline = time.monotonic() + _RETRY_S
        while True:
            try:
                return call()
            except self._away as error:
                if time.monotonic() > deadline:
                    raise ArenoError(
                        f"the etcd server at {self.address} has not responded for {_RETRY_S:g} s: {error}"
                    ) from error
                time.sleep(_PAUSE_S)
            except self._refused as error:
                raise ArenoError(f"the etcd server at {self.address} returned an error: {error}") from error


def _plain(text: Any) -> str:
    return text.decode() if isinstance(text, bytes) else str(text)
