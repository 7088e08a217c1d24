"""Weights from a trainer to vLLM servers by a broadcast: vLLM's own calls for it, with a transfer engine that areno gives it.

The names that travel are those of a checkpoint, so models whose files have other names than their parameters go as folders.
"""

import logging
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from safetensors import safe_open

from areno.engine.backend import Backend
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.rendezvous import serve_store
from areno.errors import EngineError
from areno.rollouts.fleet import ranks
from areno.rollouts.fleet.ranks import PATIENCE_S, DialledStore, Update
from areno.rollouts.fleet.tensors import TensorSpec
from areno.rollouts.servers.replica import ServerReplica

logger = logging.getLogger(__name__)


class ServerChannel:
    """The group of rank 0 of a trainer and the workers of all servers; made anew whenever a member has changed.

    Its members meet at a store of this process, which they reach at ``host``.
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
        """Whether the files of the checkpoint call its tensors as the trainer's model does."""
        if self._fits is None:
            self.specs = tuple(engine.each_rank(ranks.own_specs)[0])
            self._fits = {spec.name for spec in self.specs} <= _stored_names(self._path)
            if not self._fits:
                logger.info("weights go to the servers as folders: the model's tensors have other names in its files")
        return self._fits

    def send(self, engine: Backend, replicas: Mapping[int, ServerReplica], version: int) -> dict[int, float]:
        """Bring the weights to the servers; returns the seconds of those that have got them. The others have old or no ones."""
        self._sender = engine
        self._sent = Update(version=version, specs=self.specs, kept=True, bucket_bytes=self._bucket_bytes)
        if problem := self._meet(engine, replicas):
            logger.warning("vLLM's servers and the trainer have not come together: %s", problem)
            self.leave()
            return {}
        with ThreadPoolExecutor(len(replicas), thread_name_prefix="areno-update") as pool:
            asked = {n: pool.submit(replica.receive, self._sent) for n, replica in replicas.items()}
            broken = engine.each_rank(ranks.send, replace(self._sent, channel=self._name))[0]
        if broken or any(answer.exception() is not None for answer in asked.values()):
            self.leave()
        return {n: answer.result() for n, answer in asked.items() if not broken and answer.exception() is None}

    def catch_up(self, replica: ServerReplica) -> float:
        """Bring the weights that rank 0 of the trainer has kept to one server, also while that trains."""
        engine, sent = self._sender, self._sent
        if engine is None or sent is None:
            return 0.0
        size = 1 + replica.world_size()
        update, where = replace(sent, channel=f"channel-{uuid.uuid4().hex}"), self._open_store(size)
        if isinstance(engine, EngineGroup):
            engine.workers.tell(0, "apply", ranks.hand_over, update, where, size)
        else:
            engine.each_rank(ranks.hand_over, update, where, size)
        replica.join_group(where, 1, size)
        return replica.receive(update)

    def _open_store(self, size: int) -> DialledStore:
        """One that lasts until the next is opened."""
        self._store, port = serve_store(self._host, size, timedelta(seconds=PATIENCE_S))
        return DialledStore(self._host, port)

    def leave(self) -> None:
        """End the group."""
        name, self._name = self._name, ""
        if name and self._sender is not None:
            self._sender.each_rank(ranks.leave, name)

    def _meet(self, engine: Backend, replicas: Mapping[int, ServerReplica]) -> str:
        """Have all in one group; returns why that is not so, or nothing."""
        members: list[Backend | ServerReplica] = [engine, *replicas.values()]
        if self._name and members == self._members:
            return ""
        self.leave()
        name = f"channel-{uuid.uuid4().hex}"
        asked: list[Future[None]] = []
        try:
            sizes = [replica.world_size() for replica in replicas.values()]
            where = self._open_store(1 + sum(sizes))
            with ThreadPoolExecutor(len(replicas), thread_name_prefix="areno-join") as pool:
                first = 1
                for replica, size in zip(replicas.values(), sizes, strict=True):
                    asked.append(pool.submit(replica.join_group, where, first, 1 + sum(sizes)))
                    first += size
                own = engine.each_rank(ranks.join, where, name, 0, 1 + sum(sizes))[0]
            self._name, self._members = name, members
            return own or next((str(answer.exception()) for answer in asked if answer.exception()), "")
        except EngineError as error:
            return str(error)


def _stored_names(path: str) -> set[str]:
    """Names in the files of a checkpoint; none where it has no safetensors."""
    stored: set[str] = set()
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:  # type: ignore[no-untyped-call]
            stored |= set(opened.keys())
    return stored
