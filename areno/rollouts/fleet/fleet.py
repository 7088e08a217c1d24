"""Rollout replicas beside a trainer, behind the methods that an engine generates with.

Each replica is an engine in processes of its own, without optimizer or gradients, and its failure is nobody else's. A
request goes to the replica that has the least to do. If that one dies, the request goes to another from its beginning.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from areno.cores import usable_cores
from areno.engine.backend import Backend
from areno.engine.cpu_threads import CPU_THREADS
from areno.engine.engine_config import EngineConfig
from areno.engine.limits import fitted
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.rendezvous import LOOPBACK
from areno.engine.parallel.workers import STALL_S, Processes
from areno.engine.rollout.load import EngineLoad
from areno.errors import EngineError, UsageError
from areno.launch.launcher import Launcher
from areno.rollouts.fleet.control import ReplicaControl
from areno.rollouts.fleet.delivery import Delivery, Mode, UpdateReport, WeightOptions, refuse_unknown
from areno.rollouts.fleet.router import RequestRouter
from areno.rollouts.fleet.scheduler import Job, LocalScheduler, Worker, WorkerFailedError
from areno.rollouts.fleet.server_delivery import ServerDelivery
from areno.rollouts.fleet.tensors import wanted
from areno.rollouts.servers.channel import ServerChannel
from areno.rollouts.servers.replica import ServerReplica
from areno.rollouts.servers.start import ServerOptions, open_server
from areno.types import Request, RolloutResult

# Idle threads of OpenMP sleep at once: whoever spins takes the core from the trainer, or from another replica.
_NO_SPINNING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """How a fleet is laid out, and what happens when a replica dies; for further fields see :class:`Job`."""

    replicas: int = 1  # engines that generate, of ``tp_size`` ranks each
    tp_size: int = 1
    role: str = "rollout"
    log_folder: Path = Path("logs")
    restart: bool = True  # restart a dead or stuck replica, with the current weights
    max_restarts: int = 3  # of each replica, within ten minutes; with one more failure the fleet ends
    backoff_s: float = 1.0
    startup_timeout_s: float = 300.0
    stall_s: float = STALL_S  # a replica that has work and makes no progress for so long is stuck
    threads: int | None = None  # of PyTorch in each process; None divides the cores between all ranks and one trainer
    environment: dict[str, str] | None = None
    server: ServerOptions | None = None  # replicas are inference servers of others
    launcher: Launcher | None = None  # starts the processes, on other machines as well; None on this one
    scales: bool = False  # ``areno scale`` may change the number of replicas, by files in ``log_folder``

    def __post_init__(self) -> None:
        for name in ("replicas", "tp_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: use at least 1")


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """One replica: its processes, and how many requests it works on."""

    worker: Worker
    unfinished: int


@dataclass(frozen=True, slots=True)
class FleetHealth:
    """All replicas."""

    replicas: list[ReplicaHealth]
    version: int  # of the weights that were brought last
    restarts: int  # how often replicas were restarted
    resubmitted: int  # requests that were begun again because their replica died; their partial output is discarded
    waiting: int  # requests that wait for a replica


class RolloutFleet:
    """See the module's text.

    Args:
        path: checkpoint folder or hub id of the policy, as the trainer's.
        config: of the trainer's engine; optimizer and training are left out.
        weights: how weights travel, unless an update says otherwise.
        devices: one per rank, replica by replica; None takes the CPU, or GPUs from 0 on.

    Attributes:
        threads: of PyTorch in each process. A trainer that is to share the cores fairly takes as many.

    Raises:
        UsageError: the checkpoint cannot be used, or cannot in this layout.
        WorkerCreationError: a replica could not be started.
    """

    def __init__(
        self,
        path: str,
        config: EngineConfig,
        options: FleetOptions,
        weights: WeightOptions | None = None,
        devices: Sequence[torch.device] | None = None,
    ) -> None:
        self.path, self.options, self.weights = path, options, weights or WeightOptions()
        self.config = replace(config, trains="nothing", neighbours=options.replicas)
        self.threads = options.threads or max(usable_cores() // (options.replicas * options.tp_size + 1), 1)
        self.version = 0
        self._devices = devices
        self._router = RequestRouter()
        self._updating, self._resizing = threading.Lock(), threading.Lock()
        self._server = options.server
        # Processes of a replica that a launcher starts.
        self._ranks = 1 if options.server is not None else options.tp_size
        # All of one kind, as the delivery is: EngineGroup, or ServerReplica.
        self._replicas: dict[int, Any] = {}
        self._delivery: Delivery | ServerDelivery | None = None
        self._control: ReplicaControl | None = None
        self._closed = self._keeps = False
        self._scheduler = LocalScheduler(self._job())
        first = self._replicas[min(self._replicas)]
        self.tokenizer, self.eos_ids = first.tokenizer, first.eos_ids
        self.context_length, self.vocab_size, self.kv_tokens = first.context_length, first.vocab_size, first.kv_tokens
        try:
            if isinstance(first, ServerReplica):
                assert options.server is not None
                self._delivery = ServerDelivery(self.weights, options.server, first.vocab_size, self._channel(first))
            else:
                far = options.launcher is not None and options.launcher.names is not None
                where = first.meets if far else None
                specs = first.each_rank(wanted)[0]
                self._delivery = Delivery(specs, self.weights, keeps=options.restart, where=where)
            self._control = ReplicaControl(self, options.log_folder) if options.scales else None
        except BaseException:
            self.close()
            raise

    # -- generating ------------------------------------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue requests; one future each. While no replica is up, they wait for one.

        Raises EngineError: the fleet is closed, or a request cannot be answered; WorkerFailedError: replicas have
        failed more often than they may.
        """
        return self._router.submit(fitted(requests, self.context_length, self.vocab_size, self.kv_tokens))

    def cancel(self, future: Future[RolloutResult]) -> None:
        """Answer one request with what it has so far."""
        self._router.cancel(future)

    def load(self) -> EngineLoad:
        """What generation is busy with, over all replicas that are up."""
        loads = []
        for replica in self._up().values():
            with suppress(EngineError):
                loads.append(replica.load())
        return EngineLoad.total(loads)

    def generating(self) -> AbstractContextManager[None]:
        """A block in which generation is waited for; replicas generate outside of it too."""
        return nullcontext()

    def keep_contexts(self, wanted: bool) -> None:
        """See :meth:`Engine.keep_contexts`; replicas that start later do the same."""
        with self._updating:
            self._keeps = wanted
            for replica in self._up().values():
                with suppress(EngineError):
                    replica.keep_contexts(wanted)

    # -- weights ---------------------------------------------------------------------------------------------------

    def update_weights(
        self, engine: Backend, version: int, mode: Mode | None = None, verify: bool | None = None
    ) -> UpdateReport:
        """Bring the weights of a trainer, which must not train meanwhile, to all replicas.

        Generation goes on, but for a pause between two tokens of each replica; every later token carries ``version``.
        ``mode`` and ``verify`` are those of the :class:`WeightOptions`, unless given. Raises UsageError: there is no
        such mode, or trainer and replicas have different models; EngineError: the trainer has failed, the fleet is
        closed, or a replica could not take the weights over and is not restarted.
        """
        chosen = mode or self.weights.mode
        refuse_unknown(chosen)
        with self._updating:
            if self._closed or self._delivery is None:
                raise EngineError("the rollout fleet is closed")
            checked = self.weights.verify if verify is None else verify
            report = self._delivery.deliver(engine, self._up(), version, chosen, checked)
            self.version = version
        return report

    def share_cores(self, threads: int | None = None) -> None:
        """Compute with ``threads``, or as many as each rank of a replica has, where the replicas use the CPU too."""
        if self.config.device.type == "cpu":
            torch.set_num_threads(threads or self.threads)
            CPU_THREADS.share(self.options.replicas * self.options.tp_size + 1)
            CPU_THREADS.begin()

    # -- size ------------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Replicas, those that are being restarted included."""
        return len(self._scheduler.workers())

    def resize(self, replicas: int, addresses: Sequence[str] = ()) -> None:
        """Let further replicas join, or the last ones leave once their requests are answered; returns when that is done.

        ``addresses`` are those of servers to join, behind those that were joined at the start. A new replica has the newest
        weights before it gets a request. Raises UsageError: there is no place for so many; EngineError,
        WorkerCreationError: a further one could not be started; there are as many as before.
        """
        with self._resizing:
            if addresses:
                self._server = self._with(addresses)
            launcher, role = self.options.launcher, self.options.role
            try:
                self._refuse_size(replicas)
                if launcher is not None and replicas > self.size():
                    launcher.resize(role, replicas * self._ranks)
                self._scheduler.resize(replicas)
            finally:
                after = self.size()
                if launcher is not None and not self._closed:
                    launcher.resize(role, after * self._ranks)
                if self._server is not None and self._server.addresses:
                    self._server = replace(self._server, addresses=self._server.addresses[:after])

    def _with(self, addresses: Sequence[str]) -> ServerOptions:
        """The servers and further ones. Raises UsageError: they cannot be joined."""
        server = self._server
        if server is None or not server.addresses:
            raise UsageError("the replicas are started by the run; only one that has joined servers can join more")
        added = tuple(address.strip().rstrip("/") for address in addresses)
        for address in added:
            if not address.startswith(("http://", "https://")):
                raise UsageError(f"--add {address}: that is no address; write http://HOST:PORT")
            if address in server.addresses:
                raise UsageError(f"--add {address}: that server is a replica already")
        if replace(server, addresses=added).elsewhere and self.weights.folder is None:
            raise UsageError(
                f"--add {', '.join(added)}: weights of this run are in this machine's memory; a run that is to join servers of "
                "other machines needs weight_update_mode=disk and a shared folder"
            )
        return replace(server, addresses=(*server.addresses, *added))

    def _refuse_size(self, replicas: int) -> None:
        if replicas < 1:
            raise UsageError(f"{replicas} replicas: use at least 1")
        most = None
        if self._server is not None and self._server.addresses:
            most, what = len(self._server.addresses), "servers are known by address"
        elif self._devices is not None and self.options.launcher is None:
            most, what = len(self._devices) // self.options.tp_size, "replicas have devices on this machine"
        if most is not None and replicas > most:
            raise UsageError(f"{replicas} replicas: {most} {what}")

    # -- supervision -----------------------------------------------------------------------------------------------

    def health(self) -> FleetHealth:
        """State of every replica, and what has happened so far."""
        workers = self._scheduler.workers()
        return FleetHealth(
            replicas=[ReplicaHealth(worker, self._router.unfinished(n)) for n, worker in enumerate(workers)],
            version=self.version,
            restarts=sum(worker.restarts for worker in workers),
            resubmitted=self._router.resubmitted,
            waiting=self._router.waiting(),
        )

    def close(self) -> None:
        """End all replicas; what is pending is answered with what it has so far. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._router.end(EngineError("the rollout fleet is closed"))
        self._scheduler.close()
        if self._control is not None:
            self._control.close()
        with self._updating:
            if self._delivery is not None:
                self._delivery.close()

    def _up(self) -> dict[int, Any]:
        return {n: group for n, group in sorted(self._replicas.items()) if not group.workers.failed}

    def _job(self) -> Job:
        options = self.options
        environment = {} if "OMP_WAIT_POLICY" in os.environ else dict(_NO_SPINNING)
        return Job(
            role=options.role,
            replicas=options.replicas,
            make=self._make,
            log_folder=options.log_folder,
            on_start=self._started,
            on_lost=self._router.leave,
            on_leaving=self._leaving,
            on_given_up=self._given_up,
            startup_timeout_s=options.startup_timeout_s,
            restarts=options.max_restarts if options.restart else 0,
            backoff_s=options.backoff_s,
            threads=self.threads,
            launcher=options.launcher,
            ranks=self._ranks,
            environment=environment | (options.environment or {}),
        )

    def _make(
        self, number: int, processes: Processes, on_failure: Callable[[EngineError], None]
    ) -> EngineGroup | ServerReplica:
        ranks, server = self.options.tp_size, self._server
        devices = None if self._devices is None else self._devices[number * ranks : (number + 1) * ranks]
        if server is not None:
            return open_server(self.path, number, server, devices, processes, on_failure)
        config = replace(self.config, builds_decode=number == 0)  # the others find it on disk
        layout = Layout(1, ranks)
        return EngineGroup(self.path, config, layout, devices, self.options.stall_s, processes, on_failure)

    def _started(self, number: int, made: Any) -> None:
        with self._updating:  # an update that is under way goes on without this one, which then gets it here
            if self._delivery is not None:
                self._delivery.catch_up(made)
            if self._keeps:
                made.keep_contexts(True)
            self._replicas[number] = made
        self._router.enter(number, made)

    def _leaving(self, number: int) -> None:
        with self._updating:  # no update counts on it any more
            replica = self._replicas.pop(number, None)
        self._router.leave(number)
        if replica is not None:
            self._router.drain(replica)

    def _channel(self, first: ServerReplica) -> ServerChannel | None:
        """For servers that this fleet starts, which all weights go to."""
        server, launcher = self.options.server, self.options.launcher
        if server is None or server.addresses or server.adapter or not first.transfers:
            return None
        host = launcher.host if launcher is not None else LOOPBACK
        return ServerChannel(self.path, host, self.weights.weight_chunked_mem_mb << 20)

    def _given_up(self, _number: int, error: WorkerFailedError) -> None:
        """Without restarts the others go on while there are any; with them, the cause must be found."""
        if self.options.restart or not self._up():
            self._router.end(error)
