"""Broadcasts weights from a trainer to vLLM servers.

Uses vLLM's weight transfer calls and areno's transfer engine. vLLM expects the tensor names of the checkpoint. If the trainer's
parameters have other names, nothing is broadcast, and the servers load the weights from folders.
"""

import logging
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import safe_open

from areno.engine.backend import Backend
from areno.engine.parallel.rendezvous import serve_store
from areno.errors import EngineError
from areno.rollouts.fleet import weight_update
from areno.rollouts.fleet.tensors import TensorSpec
from areno.rollouts.fleet.weight_transfer import send_kept
from areno.rollouts.fleet.weight_update import PATIENCE_S, DialledStore, Update
from areno.rollouts.servers.replica import ServerReplica

logger = logging.getLogger(__name__)


class ServerChannel:
    """A process group of the trainer's rank 0 and the workers of all servers.

    If a server is added, removed or replaced, the group is recreated.

    The process that creates this object runs a TCP store, which listens at ``host``. The members of the group connect to this
    store.
    """

    def __init__(self, path: str, host: str, bucket_bytes: int) -> None:
        self._path, self._host, self._bucket_bytes = path, host, bucket_bytes
        self.specs: tuple[TensorSpec, ...] = ()
        self._fits: bool | None = None
        self._store: Any = None
        self._name, self._members = "", list[Backend | ServerReplica]()
        self._sent: Update | None = None
        self._sender: Backend | None = None

    def fits(self, engine: Backend) -> bool:
        """Whether weights can be broadcast to the servers.

        Broadcasts require that this machine has the safetensors files of the servers' checkpoint, and that these files contain
        all tensor names of the trainer's model. Broadcasts also become impossible if the trainer and the servers fail to
        connect (see :meth:`_meet`).
        """
        if self._fits is None:
            self.specs = tuple(engine.run_on_all_ranks(weight_update.own_specs)[0])
            stored = _stored_names(self._path)
            self._fits = bool(stored) and {spec.name for spec in self.specs} <= stored
            if not self._fits:
                why = (
                    "the checkpoint's files do not use the trainer's tensor names"
                    if stored
                    else "the checkpoint has no local safetensors files"
                )
                logger.info(
                    "the servers load the weights of %s from folders and not by a broadcast, because %s",
                    self._path,
                    why,
                )
        return self._fits

    def send(self, engine: Backend, replicas: Mapping[int, ServerReplica], version: int) -> dict[int, float]:
        """Send the weights, and keep them for servers that start later. Return the seconds that each updated server took."""
        self._sender = engine
        self._sent = Update(version=version, specs=self.specs, kept=True, bucket_bytes=self._bucket_bytes)
        name = self._meet(engine, replicas) if replicas else ""
        if not name:
            engine.run_on_all_ranks(weight_update.send, self._sent)
            return self._one_by_one(replicas)
        with ThreadPoolExecutor(len(replicas), thread_name_prefix="areno-update") as pool:
            asked = {n: pool.submit(replica.receive, self._sent) for n, replica in replicas.items()}
            broken = "the trainer failed"
            try:
                broken = engine.run_on_all_ranks(weight_update.send, replace(self._sent, channel=name))[0]
            finally:
                if broken:
                    self.leave()  # so that no server keeps waiting
        arrived = {n: answer.result() for n, answer in asked.items() if answer.exception() is None}
        if len(arrived) < len(replicas):
            self.leave()
        return arrived | self._one_by_one({n: replica for n, replica in replicas.items() if n not in arrived})

    def _one_by_one(self, replicas: Mapping[int, ServerReplica]) -> dict[int, float]:
        """Send the weights to the servers that the broadcast did not reach, one server at a time. Return the seconds that each
        server took."""
        arrived: dict[int, float] = {}
        for number, replica in replicas.items():
            if not self._fits or replica.workers.failed:
                continue
            try:
                arrived[number] = self.catch_up(replica)
            except EngineError as error:
                logger.warning(
                    "sending weights to server %d failed (%s), so the server loads the weights from a folder",
                    number,
                    error,
                )
        return arrived

    def catch_up(self, replica: ServerReplica) -> float:
        """Send one server the copy of the weights that is in the memory of the trainer's rank 0. Return the duration in
        seconds. Training may continue meanwhile."""
        engine, sent = self._sender, self._sent
        if engine is None or sent is None:
            return 0.0
        size = 1 + replica.world_size()
        update, where = replace(sent, channel=f"channel-{uuid.uuid4().hex}"), self._open_store(size)
        send_kept(engine, update, where, size)
        replica.join_group(where, 1, size)
        return replica.receive(update)

    def _open_store(self, size: int) -> DialledStore:
        self._store, port = serve_store(self._host, size, timedelta(seconds=PATIENCE_S))
        return DialledStore(self._host, port)

    def leave(self) -> None:
        """Leave the group."""
        name, self._name = self._name, ""
        if name and self._sender is not None:
            with suppress(EngineError):
                self._sender.run_on_all_ranks(weight_update.leave, name)

    def _meet(self, engine: Backend, replicas: Mapping[int, ServerReplica]) -> str:
        """Let the trainer and all servers form a process group. Return the group's name, or an empty string on failure.

        If the group could not be formed although no server has failed, later updates use folders instead of broadcasts. If a
        server has failed, the next update tries to form the group again, because the failed server may have been the cause.
        """
        members: list[Backend | ServerReplica] = [engine, *replicas.values()]
        if self._name and members == self._members:
            return self._name
        self.leave()
        name = f"channel-{uuid.uuid4().hex}"
        try:
            sizes = [replica.world_size() for replica in replicas.values()]
            where = self._open_store(1 + sum(sizes))
            with ThreadPoolExecutor(len(replicas), thread_name_prefix="areno-join") as pool:
                asked = []
                for replica, first in zip(replicas.values(), accumulate(sizes, initial=1), strict=False):
                    asked.append(pool.submit(replica.join_group, where, first, 1 + sum(sizes)))
                    asked[-1].add_done_callback(self._call_off)
                problem = engine.run_on_all_ranks(weight_update.join, where, name, 0, 1 + sum(sizes))[0]
            for answer in asked:
                answer.result()
        except EngineError as error:
            problem = str(error)
        self._name, self._members = name, members
        if problem:
            self.leave()
            self._fits = any(replica.workers.failed for replica in replicas.values())
            logger.warning("the vLLM servers and the trainer could not connect: %s", problem)
        return self._name

    def _call_off(self, answer: Future[None]) -> None:
        """If a server could not join the group, close the group's TCP store, so that the other members stop waiting."""
        if answer.exception() is not None:
            self._store = None


def _stored_names(path: str) -> set[str]:
    folder = Path(path)
    if not folder.is_dir():
        with suppress(OSError, ValueError):
            folder = Path(snapshot_download(path, local_files_only=True, allow_patterns=["*.safetensors"]))
    stored: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:  # type: ignore[no-untyped-call]
            stored |= set(opened.keys())
    return stored
