"""What a weight update does on each rank: that of the trainer, which sends, and those of the replicas, which receive.

A replica first brings the new weights together while it generates on, and then swaps them in between two tokens. Only the
swap is a pause, and until it begins nothing has changed: a transfer that breaks leaves the old weights.
"""

import logging
import mmap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
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
from areno.engine.model.adapter import NAME
from areno.engine.model.loading import load_causal_lm
from areno.engine.parallel.channels import Group, meet
from areno.engine.parallel.peers import Peers
from areno.engine.parallel.rendezvous import Rendezvous
from areno.engine.parallel.segment import attach
from areno.engine.progress import PROGRESS
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

# How long the members of a collective wait for each other.
PATIENCE_S = 120.0
_channels: dict[str, Group] = {}
_kept: dict[
    int, Tensor
] = {}  # on rank 0 of a trainer: the newest weights, by version, where ``Update.kept`` asks for it


class BrokenChannelError(EngineError):
    """A collective transfer did not come to its end; nothing has been installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One transfer of weights."""

    version: int
    specs: tuple[TensorSpec, ...]  # what travels, in this order
    segment: str = ""  # shared memory that holds, or is to hold, all tensors
    channel: str = ""  # name of a collective that was joined before
    kept: bool = False  # rank 0 of the trainer keeps a copy for replicas that start later
    bucket_bytes: int = 1 << 30  # of one broadcast, at most, unless a single tensor is larger
    folder: str = ""  # checkpoint that holds the tensors
    digests: Mapping[str, str] | None = None  # checksum of each tensor, by name; with them, what arrives is checked


# -- on the trainer's ranks ------------------------------------------------------------------------------------------


def checksums(engine: Engine, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Checksum of each wanted tensor, by name."""
    engine.wait_idle()
    refuse_misfit(engine, specs)
    return {spec.name: digest(tensor) for spec, tensor in _mine(engine, specs)}


def send(engine: Engine, update: Update) -> str:
    """Write the weights to shared memory, and broadcast them; returns how the broadcast broke, or nothing."""
    engine.wait_idle()
    refuse_misfit(engine, update.specs)
    first = engine.config.peers.first
    kept: Iterator[Tensor] = iter(())
    if update.segment and first:
        kept = views(attach(update.segment, layout(update.specs)[1], writable=True), update.specs)
    elif update.kept and first:
        _kept.clear()
        _kept[update.version] = torch.empty(layout(update.specs)[1], dtype=torch.uint8)
        kept = views(_kept[update.version], update.specs)
    tensors = _mine(engine, update.specs)
    broken = ""
    for bucket in _buckets(update.specs, update.bucket_bytes):
        filled = [tensor for _, tensor in islice(tensors, len(bucket))]
        if not first:
            continue
        for place, tensor in zip(islice(kept, len(bucket)), filled, strict=False):
            place.copy_(tensor)
        if update.channel and not broken:
            memory = torch.empty(layout(bucket)[1], dtype=torch.uint8, device=engine.config.device)
            for place, tensor in zip(views(memory, bucket), filled, strict=True):
                place.copy_(tensor)
            try:
                _broadcast(update.channel, memory)
            except BrokenChannelError as error:
                broken = str(error)
        PROGRESS.tick()
    return broken


def _mine(engine: Engine, specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, Tensor]]:
    """The tensors, on the ranks that put them together; nothing on further replicas, whose weights are the same."""
    if engine.config.peers.replica == 0 or engine.config.peers.layout.fsdp:
        yield from whole_tensors(engine, specs)


def _broadcast(channel: str, memory: Tensor) -> None:
    """The trainer's bytes, in place."""
    if channel not in _channels:
        raise BrokenChannelError("the trainer and the rollout replicas have not come together")
    try:
        _channels[channel].spread(memory)
    except RuntimeError as error:
        raise BrokenChannelError(f"new weights have not arrived: {error}") from error


def _buckets(specs: Sequence[TensorSpec], limit: int) -> Iterator[list[TensorSpec]]:
    """Runs of tensors of at most so many bytes, and at least one tensor."""
    bucket: list[TensorSpec] = []
    for spec in specs:
        if bucket and sum(s.nbytes for s in bucket) + spec.nbytes > limit:
            yield bucket
            bucket = []
        bucket.append(spec)
    if bucket:
        yield bucket


def hand_over(engine: Engine, update: Update, where: Rendezvous, size: int) -> None:
    """Begin to send the kept weights to the members of a new collective; other calls are not held up."""

    def send_kept() -> None:
        memory = _kept.get(update.version)
        if memory is None or join(engine, where, update.channel, 0, size):
            return
        try:
            kept = views(memory, update.specs)
            for bucket in _buckets(update.specs, update.bucket_bytes):
                sent = torch.empty(layout(bucket)[1], dtype=torch.uint8, device=engine.config.device)
                for place, tensor in zip(views(sent, bucket), islice(kept, len(bucket)), strict=True):
                    place.copy_(tensor)
                _broadcast(update.channel, sent)
            _settle(engine.config.device)
        except BrokenChannelError as error:  # the replica learns it too, and is started again
            logger.warning("the kept weights were not taken over: %s", error)
        finally:
            leave(engine, update.channel)

    threading.Thread(target=send_kept, name="areno-weights", daemon=True).start()


# -- on the ranks of a replica ---------------------------------------------------------------------------------------


def receive(engine: Engine, update: Update) -> float:
    """Take new weights over; returns for how many seconds generation paused.

    Raises BrokenChannelError: they have not arrived; the old ones stand; EngineError: something else than what was sent
    has arrived.
    """
    tensors = _arrived(engine, update)
    if update.digests is not None:
        _compare(tensors, update.digests)
    with engine.loop.weights_changing(update.version):
        began = time.perf_counter()
        _settle(engine.config.device)  # a step may be on its way that was launched with the old weights
        install(engine, tensors, check=update.digests is not None)
        _settle(engine.config.device)
    return time.perf_counter() - began


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _arrived(engine: Engine, update: Update) -> dict[str, Tensor]:
    """Whole tensors by name, in the wanted types."""
    if update.channel:
        return _from_channel(engine, update)
    if update.folder:
        return _from_folder(engine, update)
    memory = attach(update.segment, layout(update.specs)[1], writable=False)
    memory[:: mmap.PAGESIZE].sum()  # so that its pages are at hand when generation rests
    return _named(memory, update.specs)


def _named(memory: Tensor, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    return {spec.name: tensor for spec, tensor in zip(specs, views(memory, specs), strict=True)}


def _from_channel(engine: Engine, update: Update) -> dict[str, Tensor]:
    arrived: dict[str, Tensor] = {}
    for bucket in _buckets(update.specs, update.bucket_bytes):
        memory = torch.empty(layout(bucket)[1], dtype=torch.uint8, device=engine.config.device)
        _broadcast(update.channel, memory)
        arrived |= _named(memory, bucket)
        PROGRESS.tick()
    return arrived


def _from_folder(engine: Engine, update: Update) -> dict[str, Tensor]:
    """Weights of a checkpoint folder; ``transformers`` knows under which names they are stored."""
    if engine.actor.model.adapter is not None:
        stored = load_file(Path(update.folder) / "adapter_model.safetensors")
        names = {spec.name: "base_model.model." + spec.name.replace(f".{NAME}.", ".") for spec in update.specs}
        return {spec.name: stored[names[spec.name]].to(spec.dtype) for spec in update.specs}
    options = replace(engine.config.load_options("the weight update"), peers=Peers(), device="cpu")
    model = load_causal_lm(update.folder, options)
    own = dict(model.module.named_parameters())
    return {spec.name: own[spec.name].detach().to(spec.dtype) for spec in update.specs}


def _compare(tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
    if wrong := [name for name, tensor in tensors.items() if digest(tensor) != digests[name]]:
        raise EngineError(
            f"{len(wrong)} of {len(digests)} weights have arrived as something else than was sent: {', '.join(wrong[:3])}"
        )


# -- collectives -----------------------------------------------------------------------------------------------------


def join(engine: Engine, where: Rendezvous, channel: str, first: int, size: int) -> str:
    """Become a member of a collective of ``size`` members; returns nothing when all have come, else why not.

    Args:
        engine: of a trainer, where rank 0 is the only member, or of a replica.
        where: its members meet.
        channel: name of the collective.
        first: number of this engine's first rank in it; 0 is the trainer's.
        size: number of members.
    """
    peers = engine.config.peers
    if first or peers.first:
        rank = first + peers.rank
        try:
            _wait_for_members(where, channel, rank, size)
            patience = timedelta(seconds=PATIENCE_S)
            _channels[channel] = meet(where, channel, rank, size, engine.config.device, patience)
        except (RuntimeError, OSError, ArenoError) as error:
            return str(error) or "a member has not come"
    return ""


def _wait_for_members(where: Rendezvous, channel: str, rank: int, size: int) -> None:
    """Wait until all have come, unless the collective is called off: when a member has died."""
    where.come(channel, rank)
    deadline = time.monotonic() + PATIENCE_S
    while where.members(channel) < size:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of {size} members have come within {PATIENCE_S:g} s")
        time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class DialledStore:
    """Members, those of other programs among them, dial a store that is there already; see :class:`Rendezvous`."""

    host: str
    port: int

    def store(self, name: str, rank: int, size: int, patience: timedelta) -> dist.Store:
        """See :class:`Rendezvous`."""
        return dist.TCPStore(self.host, self.port, size, False, patience)

    def open(self, name: str) -> None:
        """Nothing is announced."""

    def come(self, name: str, member: int) -> None:
        """Nobody is told."""

    def members(self, name: str) -> int:
        """As many as one waits for: the group itself waits for them."""
        return 2**31

    def call_off(self, name: str) -> None:
        """Whoever waits does so for :data:`PATIENCE_S`."""


def own_specs(engine: Engine) -> list[TensorSpec]:
    """The trainer's own tensors in the types that its model computes with."""
    return [TensorSpec(name, engine.actor.model.dtype, shape) for name, shape in shapes(engine).items()]


def leave(_engine: Engine, channel: str) -> None:
    """End a membership."""
    with suppress(KeyError):
        del _channels[channel]
