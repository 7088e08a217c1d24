"""The steps of a weight update on each rank. The trainer's ranks send weights, and the replicas' ranks receive them.

A replica continues to generate while it receives the new weights. The replica then pauses generation between two tokens, and
installs the weights. If the transfer fails before the installation, the old weights stay in place.
"""

import logging
import mmap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from areno.engine.engine import Engine
from areno.engine.heartbeat import HEARTBEAT
from areno.engine.model.adapter import NAME
from areno.engine.model.loading import load_causal_lm
from areno.engine.parallel.channels import RankGroup, meet
from areno.engine.parallel.rank_context import RankContext
from areno.engine.parallel.rendezvous import Rendezvous
from areno.engine.parallel.segment import attach
from areno.errors import ArenoError, EngineError
from areno.rollouts.fleet.tensors import (
    TensorSpec,
    digest,
    install,
    layout,
    refuse_misfit,
    shapes,
    views,
    whole_tensors,
)

logger = logging.getLogger(__name__)

# Seconds that the members of a process group wait for each other.
PATIENCE_S = 120.0
_channels: dict[str, RankGroup] = {}
# On rank 0 of a trainer: the newest weights by version, if ``Update.kept`` is set.
_kept: dict[int, Tensor] = {}


class BrokenChannelError(EngineError):
    """A broadcast of weights failed, and no weights were installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One transfer of weights."""

    version: int
    specs: tuple[TensorSpec, ...]  # the tensors, in transfer order
    segment: str = ""  # shared memory for all tensors
    channel: str = ""  # name of a joined process group
    kept: bool = False  # rank 0 of the trainer keeps a copy for replicas that start later
    bucket_bytes: int = 1 << 30  # maximum size of one broadcast, unless a single tensor is larger
    folder: str = ""  # checkpoint with the tensors
    digests: Mapping[str, str] | None = None  # checksum of each tensor by name, to verify received tensors


# -- on the trainer's ranks ------------------------------------------------------------------------------------------


def checksums(engine: Engine, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return the checksum of each transferred tensor, by name."""
    engine.wait_idle()
    refuse_misfit(engine, specs)
    return {spec.name: digest(tensor) for spec, tensor in _mine(engine, specs)}


def send(engine: Engine, update: Update) -> str:
    """Send the weights of the trainer as ``update`` specifies. All ranks of the trainer must call this function.

    If ``update.segment`` is set, rank 0 writes the weights to the shared memory with this name. Otherwise, if ``update.kept``
    is set, rank 0 keeps a copy of the weights for replicas that start later. Independently of both fields, if
    ``update.channel`` is set, rank 0 broadcasts the weights to the process group with this name. Returns an empty string, or
    the error of a failed broadcast.
    """
    engine.wait_idle()
    refuse_misfit(engine, update.specs)
    first = engine.config.peers.first
    copies: Iterator[Tensor] = iter(())
    if update.segment and first:
        copies = views(attach(update.segment, layout(update.specs)[1], writable=True), update.specs)
    elif update.kept and first:
        _kept.clear()
        _kept[update.version] = torch.empty(layout(update.specs)[1], dtype=torch.uint8)
        copies = views(_kept[update.version], update.specs)
    tensors = _mine(engine, update.specs)
    broken = ""
    for bucket in _buckets(update.specs, update.bucket_bytes):
        filled = [tensor for _, tensor in islice(tensors, len(bucket))]
        if not first:
            continue
        for target, tensor in zip(islice(copies, len(bucket)), filled, strict=False):
            target.copy_(tensor)
        if update.channel and not broken:
            try:
                _send_bucket(engine, update.channel, bucket, filled)
            except BrokenChannelError as error:
                broken = str(error)
                leave(engine, update.channel)  # so that no member waits for further data
        HEARTBEAT.tick()
    return broken


def _mine(engine: Engine, specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield the full tensors on ranks that help to gather them (see :func:`whole_tensors`), and nothing on other ranks.

    With FSDP, all ranks help, because every rank has shards. Without FSDP, each data-parallel replica has the whole model.
    Therefore, only the ranks of replica 0 help.
    """
    if engine.config.peers.replica == 0 or engine.config.peers.layout.fsdp:
        yield from whole_tensors(engine, specs)


def _send_bucket(engine: Engine, channel: str, bucket: Sequence[TensorSpec], tensors: Iterable[Tensor]) -> None:
    memory = torch.empty(layout(bucket)[1], dtype=torch.uint8, device=engine.config.device)
    for target, tensor in zip(views(memory, bucket), tensors, strict=True):
        target.copy_(tensor)
    _broadcast(channel, memory)


def _broadcast(channel: str, memory: Tensor) -> None:
    if channel not in _channels:
        raise BrokenChannelError("the trainer and the rollout replicas could not form a process group")
    try:
        _channels[channel].broadcast(memory)
    except RuntimeError as error:
        raise BrokenChannelError(f"new weights did not arrive: {error}") from error


def _buckets(specs: Sequence[TensorSpec], limit: int) -> Iterator[list[TensorSpec]]:
    bucket: list[TensorSpec] = []
    for spec in specs:
        if bucket and sum(s.nbytes for s in bucket) + spec.nbytes > limit:
            yield bucket
            bucket = []
        bucket.append(spec)
    if bucket:
        yield bucket


def hand_over(engine: Engine, update: Update, where: Rendezvous, size: int) -> None:
    """Send the copy of the weights that rank 0 keeps (see ``Update.kept``) to the members of a new process group.

    The transfer runs in a thread, so that other calls need not wait.
    """

    def send_kept() -> None:
        memory = _kept.get(update.version)
        if memory is None or join(engine, where, update.channel, 0, size):
            return
        try:
            tensors = views(memory, update.specs)
            for bucket in _buckets(update.specs, update.bucket_bytes):
                _send_bucket(engine, update.channel, bucket, islice(tensors, len(bucket)))
            _settle(engine.config.device)
        except BrokenChannelError as error:  # the replica reports a failure too
            logger.warning("the trainer could not send its copy of the weights to a replica: %s", error)
        finally:
            leave(engine, update.channel)

    threading.Thread(target=send_kept, name="areno-weights", daemon=True).start()


# -- on the ranks of a replica ---------------------------------------------------------------------------------------


def receive(engine: Engine, update: Update) -> float:
    """Receive and install new weights. Return the seconds for which generation paused.

    Raises:
        BrokenChannelError: the new weights did not arrive. The old weights remain.
        EngineError: the received tensors differ from the sent tensors.
    """
    tensors = _arrived(engine, update)
    if update.digests is not None:
        _compare(tensors, update.digests)
    with engine.loop.weights_changing(update.version):
        began = time.perf_counter()
        _settle(engine.config.device)  # a launched step may still use the old weights
        install(engine, tensors, check=update.digests is not None)
        _settle(engine.config.device)
    return time.perf_counter() - began


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _arrived(engine: Engine, update: Update) -> dict[str, Tensor]:
    if update.channel:
        return _from_channel(engine, update)
    if update.folder:
        return _from_folder(engine, update)
    memory = attach(update.segment, layout(update.specs)[1], writable=False)
    memory[:: mmap.PAGESIZE].sum()  # fault the pages in before generation pauses
    return _named(memory, update.specs)


def _named(memory: Tensor, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    return {spec.name: tensor for spec, tensor in zip(specs, views(memory, specs), strict=True)}


def _from_channel(engine: Engine, update: Update) -> dict[str, Tensor]:
    arrived: dict[str, Tensor] = {}
    for bucket in _buckets(update.specs, update.bucket_bytes):
        memory = torch.empty(layout(bucket)[1], dtype=torch.uint8, device=engine.config.device)
        _broadcast(update.channel, memory)
        arrived |= _named(memory, bucket)
        HEARTBEAT.tick()
    return arrived


def _from_folder(engine: Engine, update: Update) -> dict[str, Tensor]:
    if engine.actor.model.adapter is not None:
        stored = load_file(Path(update.folder) / "adapter_model.safetensors")
        names = {spec.name: "base_model.model." + spec.name.replace(f".{NAME}.", ".") for spec in update.specs}
        return {spec.name: stored[names[spec.name]].to(spec.dtype) for spec in update.specs}
    options = replace(engine.config.load_options("the weight update"), peers=RankContext(), device="cpu")
    model = load_causal_lm(update.folder, options)
    parameters = dict(model.module.named_parameters())
    return {spec.name: parameters[spec.name].detach().to(spec.dtype) for spec in update.specs}


def _compare(tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
    if wrong := [name for name, tensor in tensors.items() if digest(tensor) != digests[name]]:
        raise EngineError(
            f"{len(wrong)} of {len(digests)} received tensors differ from the sent tensors: {', '.join(wrong[:3])}"
        )


# -- collectives -----------------------------------------------------------------------------------------------------


def join(engine: Engine, where: Rendezvous, channel: str, first: int, size: int) -> str:
    """Join a process group of ``size`` members. Returns an empty string on success, otherwise the error.

    Args:
        engine: engine of a trainer or a replica. All ranks of a replica join. Of a trainer, only rank 0 joins.
        where: rendezvous of the members.
        channel: name of the process group.
        first: position of the engine's rank 0 among the members; 0 for the trainer. The engine's next ranks get the next
            positions.
        size: number of members.
    """
    peers = engine.config.peers
    if first or peers.first:
        rank = first + peers.rank
        try:
            _wait_for_members(where, channel, rank, size)
            _channels[channel] = _meet(where, channel, rank, size, engine.config.device)
        except (RuntimeError, OSError, ArenoError) as error:
            return str(error) or "a member did not join"
    return ""


def _wait_for_members(where: Rendezvous, channel: str, rank: int, size: int) -> None:
    """Wait until all members have joined. Raises OSError if a member died."""
    where.come(channel, rank)
    deadline = time.monotonic() + PATIENCE_S
    while where.members(channel) < size:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all {size} members of the process group joined within {PATIENCE_S:g} s")
        time.sleep(0.01)


def _meet(where: Rendezvous, channel: str, rank: int, size: int, device: torch.device) -> RankGroup:
    """Form the process group in a thread, so that this call can raise an error as soon as a member dies.

    If a member dies, gloo lets the others wait for five times the timeout of the process group.
    """
    formed: Future[RankGroup] = Future()

    def form() -> None:
        try:
            formed.set_result(meet(where, channel, rank, size, device, timedelta(seconds=PATIENCE_S)))
        except Exception as error:
            formed.set_exception(error)

    threading.Thread(target=form, name="areno-meet", daemon=True).start()
    while not wait([formed], timeout=0.1).done:
        where.members(channel)  # raises OSError if a member died
    return formed.result()


@dataclass(frozen=True, slots=True)
class DialledStore:
    """A :class:`Rendezvous` through an existing TCP store. Programs other than areno can also connect to this store."""

    host: str
    port: int

    def store(self, name: str, rank: int, size: int, patience: timedelta) -> dist.Store:
        """See :class:`Rendezvous`."""
        return dist.TCPStore(self.host, self.port, size, False, patience)

    def open(self, name: str) -> None:
        """Do nothing. Members can join a process group that was not announced."""

    def come(self, name: str, member: int) -> None:
        """Do nothing, because members are not counted (see :meth:`members`)."""

    def members(self, name: str) -> int:
        """Return a number above the size of any process group, because the actual number of members is unknown.

        A caller that waits until this number reaches the size of the group therefore continues at once. The members wait for
        each other when they form the process group.
        """
        return 2**31

    def call_off(self, name: str) -> None:
        """Do nothing, because the members of a process group cannot be notified that the group is cancelled.

        A member that waits for the group times out after :data:`PATIENCE_S` seconds.
        """


def own_specs(engine: Engine) -> list[TensorSpec]:
    """Return the specs of the trainer's tensors, in the compute dtype of the trainer's model."""
    return [TensorSpec(name, engine.actor.model.dtype, shape) for name, shape in shapes(engine).items()]


def leave(_engine: Engine, channel: str) -> None:
    """Leave a process group."""
    with suppress(KeyError):
        del _channels[channel]
