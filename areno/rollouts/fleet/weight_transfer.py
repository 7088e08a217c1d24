"""Transfers new weights from a trainer to rollout replicas through shared memory, a broadcast, or a checkpoint on disk."""

import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Literal, get_args

from areno.cache_folder import ScratchFolder
from areno.engine.backend import Backend
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.rendezvous import FolderRendezvous, Rendezvous
from areno.engine.parallel.segment import Segment
from areno.errors import EngineError, UsageError
from areno.rollouts.fleet import weight_update
from areno.rollouts.fleet.tensors import TensorSpec, layout
from areno.rollouts.fleet.weight_update import BrokenChannelError, Update

Mode = Literal["shm", "xccl", "disk"]
TORN = "a new replica cannot get the weights, because the last weight update failed; call update_weights again"
"""Error message if a replica starts after a failed transfer."""

Replicas = Mapping[int, EngineGroup]
Answers = Mapping[int, Future[list[float]]]
"""Futures by replica number. The result of a future is a list: the seconds for which each rank paused generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOptions:
    """Options of weight transfers.

    Attributes:
        mode: ``shm`` is shared memory of one machine. ``xccl`` is a broadcast, with gloo between CPUs and with NCCL between
            GPUs. ``disk`` is a checkpoint folder.
        verify: compare the checksums of sent and received tensors, and compare installed and received tensors bit by bit. An
            inference server is verified differently: its log-probs of test tokens are compared with the trainer's. The first
            transfer to servers is always verified; later transfers only if ``verify`` is True.
    """

    mode: Mode = "shm"
    verify: bool = False
    weight_chunked_mem_mb: int = 1024  # maximum size of one broadcast in MiB, unless a single tensor is larger
    folder: Path | None = None  # where ``weight_update_v{version}`` is written; None uses a temporary folder

    def __post_init__(self) -> None:
        refuse_unknown(self.mode)
        if self.weight_chunked_mem_mb < 1:
            raise UsageError(f"weight_chunked_mem_mb must be at least 1, got {self.weight_chunked_mem_mb}")


def refuse_unknown(mode: str) -> None:
    """Raise a UsageError for an unknown mode."""
    if mode not in get_args(Mode):
        raise UsageError(f"weight_update_mode={mode} is unknown; use one of {', '.join(get_args(Mode))}")


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Result of a weight update.

    ``nbytes`` is the number of bytes transferred, and ``seconds`` is the duration. ``pauses_s`` has a time in seconds for
    each replica. For an inference server, this is the time to receive and load the weights. For any other replica, it is the
    time for which generation paused.

    ``logprob_gap`` is the mean absolute difference, in nats, between the trainer's and a server's log-probs of test tokens. The
    largest difference of all servers is reported; None if log-probs were not compared.
    """

    version: int
    mode: Mode
    nbytes: int
    seconds: float
    pauses_s: dict[int, float] = field(default_factory=dict)
    logprob_gap: float | None = None


def save_weights(engine: Backend, root: Path, version: int) -> Path:
    """Write a trainer's checkpoint to a folder below ``root``. The folder gets its final name when the checkpoint is
    complete."""
    folder = root / f"weight_update_v{version}"
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    engine.save_model(partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    return folder


def send_kept(engine: Backend, update: Update, where: Rendezvous, size: int) -> None:
    """Let a trainer's rank 0 send its copy of the weights (see ``Update.kept``) to the members of a new process group. Also
    works during training."""
    if isinstance(engine, EngineGroup):  # `tell` does not wait for a training step to end
        engine.workers.tell(0, "apply", weight_update.hand_over, update, where, size)
    else:
        engine.run_on_all_ranks(weight_update.hand_over, update, where, size)


class WeightTransfer:
    """Transfers weights to the replicas, one update at a time.

    With ``keeps``, the newest weights are kept for replicas that start later. ``where`` is the :class:`Rendezvous`
    through which the trainer and the replicas form process groups. If ``where`` is None, the trainer and the replicas find each
    other through a temporary folder, and must be on one machine.
    """

    def __init__(
        self, specs: list[TensorSpec], options: WeightOptions, *, keeps: bool, where: Rendezvous | None = None
    ) -> None:
        self.specs = tuple(specs)
        self.options = options
        self.nbytes = sum(spec.nbytes for spec in specs)
        self.newest: Update | None = None
        self._keeps, self._torn = keeps, False
        self._segment: Segment | None = None
        self._channel = ""
        self._members: list[Backend] = []  # members of the channel, the trainer first
        self._scratch = ScratchFolder("weights")
        self._rooms = Path(self._scratch.name)
        self._shares_memory = where is None
        self._where: Rendezvous = where or FolderRendezvous(self._rooms)
        self._sender: Backend | None = None

    def deliver(self, engine: Backend, replicas: Replicas, version: int, mode: Mode, verify: bool) -> UpdateReport:
        """Transfer the trainer's weights to all replicas. Raises the errors of :meth:`RolloutFleet.update_weights`."""
        began = time.perf_counter()
        digests = engine.run_on_all_ranks(weight_update.checksums, self.specs)[0] if verify else None
        plain = Update(version=version, specs=self.specs, digests=digests)
        previous, self.newest, self._torn = self.newest, None, True
        self._sender = engine
        update = plain
        if mode == "xccl":
            local = self._keeps and self._shares_memory
            update = replace(plain, segment=self._memory() if local else "", kept=self._keeps and not local)
            pauses = self._broadcast(engine, replicas, update)
        else:
            if mode == "disk":
                update = replace(plain, folder=str(save_weights(engine, self.options.folder or self._rooms, version)))
            else:
                update = replace(plain, segment=self._memory())
                engine.run_on_all_ranks(weight_update.send, update)
            self._store(update)
            pauses = self._pauses(replicas, self._ask(replicas, update))
        outdated = previous.folder if previous is not None else ""
        for folder in {outdated, update.folder} - {"", self.newest.folder if self.newest is not None else ""}:
            shutil.rmtree(folder, ignore_errors=True)
        return UpdateReport(version, mode, self.nbytes, time.perf_counter() - began, pauses)

    def _store(self, update: Update) -> None:
        """Mark the weights of ``update`` as complete. Replicas that start later get these weights."""
        self.newest, self._torn = update if self._keeps else None, False

    def catch_up(self, replica: EngineGroup) -> None:
        """Transfer the newest weights to a newly started replica. Raises EngineError if the last update failed."""
        if self._torn:
            raise EngineError(TORN)
        if self.newest is not None and self.newest.kept:
            self._hand_over(replica, self.newest)
        elif self.newest is not None:
            replica.run_on_all_ranks(weight_update.receive, self.newest)

    def _hand_over(self, replica: EngineGroup, update: Update) -> list[float]:
        """Send weights to one replica. The trainer's rank 0 has a copy of these weights in memory, and sends this copy.

        A new process group connects only rank 0 and this replica.
        """
        assert self._sender is not None
        sent = replace(update, channel=self._open_channel(), bucket_bytes=self.options.weight_chunked_mem_mb << 20)
        size = 1 + replica.layout.world_size
        send_kept(self._sender, sent, self._where, size)
        try:
            broken = replica.run_on_all_ranks(weight_update.join, self._where, sent.channel, 1, size)
            if any(broken):
                raise EngineError(f"the trainer's weights did not arrive: {next(filter(None, broken))}")
            return replica.run_on_all_ranks(weight_update.receive, sent)
        finally:
            self._where.call_off(sent.channel)
            with suppress(EngineError):
                replica.run_on_all_ranks(weight_update.leave, sent.channel)

    def _open_channel(self) -> str:
        channel = f"channel-{uuid.uuid4().hex}"
        self._where.open(channel)
        return channel

    def close(self) -> None:
        """Free shared memory, delete folders, and leave the process group."""
        if self._segment is not None:
            self._segment.close()
        if self.newest is not None and self.newest.folder:
            shutil.rmtree(self.newest.folder, ignore_errors=True)
        if self._channel:
            with suppress(EngineError):
                self._members[0].run_on_all_ranks(weight_update.leave, self._channel)
        self._scratch.cleanup()

    def _memory(self) -> str:
        if self._segment is None:
            self._segment = Segment(layout(self.specs)[1])
        return self._segment.path

    # -- receiving -------------------------------------------------------------------------------------------------

    @staticmethod
    def _ask(replicas: Replicas, update: Update, send: Callable[[], None] = lambda: None) -> Answers:
        with ThreadPoolExecutor(max(len(replicas), 1), thread_name_prefix="areno-update") as pool:
            asked = {
                n: pool.submit(group.run_on_all_ranks, weight_update.receive, update) for n, group in replicas.items()
            }
            send()
        return asked

    def _pauses(self, replicas: Replicas, asked: Answers) -> dict[int, float]:
        """Return the seconds for which each replica paused generation.

        The result omits dead replicas and replicas that could not load the weights. The processes of the latter are stopped.
        """
        pauses, failures = {}, []
        for number, answer in asked.items():
            error = answer.exception()
            if error is None:
                pauses[number] = max(answer.result())
            elif not replicas[number].workers.failed:
                replicas[number].workers.abandon(f"its weights could not be updated: {error}")
                failures.append(EngineError(f"replica {number} could not load the new weights: {error}"))
        if failures and not self._keeps:
            raise failures[0]
        return pauses

    # -- collectives -----------------------------------------------------------------------------------------------

    def _broadcast(self, engine: Backend, replicas: Replicas, update: Update) -> dict[int, float]:
        """Broadcast an update to all replicas. If the trainer keeps a copy of the weights, any replica that the broadcast did
        not reach gets this copy."""
        bucket_bytes = self.options.weight_chunked_mem_mb << 20
        sent = replace(update, channel=self._joined(engine, replicas), bucket_bytes=bucket_bytes)
        broken = ""

        def send() -> None:
            nonlocal broken
            try:
                broken = engine.run_on_all_ranks(weight_update.send, sent)[0]
            except BaseException:
                with suppress(EngineError):
                    engine.run_on_all_ranks(
                        weight_update.leave, sent.channel
                    )  # so that no member waits for further data
                raise

        asked = self._ask(replicas, replace(sent, segment=""), send)
        self._store(update)
        if broken or any(future.exception() is not None for future in asked.values()):
            self._leave()
        cut_off = {n: replicas[n] for n, f in asked.items() if isinstance(f.exception(), BrokenChannelError)}
        alive = {n: group for n, group in cut_off.items() if not group.workers.failed}
        pauses = self._pauses(replicas, {n: future for n, future in asked.items() if n not in alive})
        if alive and not (update.segment or update.kept):
            cause = broken or asked[next(iter(alive))].exception()
            raise EngineError(f"new weights did not reach the replicas {', '.join(map(str, alive))}: {cause}")
        if update.segment:
            return pauses | self._pauses(alive, self._ask(alive, update))
        with ThreadPoolExecutor(max(len(alive), 1), thread_name_prefix="areno-update") as pool:
            again = {n: pool.submit(self._hand_over, group, update) for n, group in alive.items()}
        return pauses | self._pauses(alive, again)

    def _joined(self, engine: Backend, replicas: Replicas) -> str:
        """Let the trainer and the replicas form a process group if none exists or a member has changed. Return its name."""
        members: list[Backend] = [engine, *replicas.values()]
        if self._channel and members == self._members:
            return self._channel
        self._leave()
        channel = self._open_channel()
        # One rank of the trainer, and all ranks of the replicas.
        firsts = list(accumulate((group.layout.world_size for group in replicas.values()), initial=1))
        with ThreadPoolExecutor(len(members), thread_name_prefix="areno-join") as pool:
            asked = [
                pool.submit(member.run_on_all_ranks, weight_update.join, self._where, channel, first, firsts[-1])
                for member, first in zip(members, [0, *firsts], strict=False)
            ]
            wait(asked, return_when=FIRST_EXCEPTION)
            self._where.call_off(channel)  # members stop waiting for a dead one
        self._channel, self._members = channel, members
        if any(answer.exception() is not None or any(answer.result()) for answer in asked):
            self._leave()
        return channel

    def _leave(self) -> None:
        channel, self._channel = self._channel, ""
        for member in self._members if channel else ():
            with suppress(EngineError):
                member.run_on_all_ranks(weight_update.leave, channel)
