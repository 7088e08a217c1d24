"""A fleet of rollout replicas, separate from the trainer, with the generation interface of an engine. Each replica is an
inference server, or an areno engine that runs in its own processes, without optimizer and gradients. The failure of a replica
does not affect other replicas.

A request goes to the least loaded replica. If this replica dies, the request restarts on another replica. But if tokens of the
answer were already streamed to a client, the request ends with an error.
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

from areno import DEFAULT_SPINCOUNT
from areno.cores import openmp_threads, usable_cores
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
from areno.gpus import visible_gpus
from areno.launch.launcher import Launcher
from areno.rollouts.fleet.control import ReplicaControl
from areno.rollouts.fleet.replica_supervisor import ReplicaJob, ReplicaSupervisor, Worker, WorkerFailedError
from areno.rollouts.fleet.router import RequestRouter
from areno.rollouts.fleet.server_weight_transfer import ServerWeightTransfer
from areno.rollouts.fleet.tensors import rollout_specs
from areno.rollouts.fleet.weight_transfer import Mode, UpdateReport, WeightOptions, WeightTransfer, refuse_unknown
from areno.rollouts.servers.channel import ServerChannel
from areno.rollouts.servers.command_line import ServerOptions
from areno.rollouts.servers.replica import ServerReplica
from areno.rollouts.servers.start import open_server
from areno.types import Request, RolloutResult

# Idle OpenMP threads sleep at once, because spinning would take cores from the trainer and other replicas.
_NO_SPINNING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Settings of a :class:`RolloutFleet`. See also :class:`ReplicaJob`."""

    replicas: int = 1  # engines of ``tp_size`` ranks each
    tp_size: int = 1
    role: str = "rollout"
    log_folder: Path = Path("logs")
    restart: bool = True  # restart a dead or stuck replica, with the current weights
    max_restarts: int = 3  # per replica, reset after it has run for ten minutes; one more failure ends the fleet
    backoff_s: float = 1.0
    startup_timeout_s: float = 300.0
    stall_s: float = STALL_S  # seconds without progress after which a replica with work counts as stuck
    stall_option: str = "--stall-timeout"  # name of the user's option for ``stall_s``
    threads: int | None = None  # PyTorch threads per process; None divides the cores between all ranks and one trainer
    environment: dict[str, str] | None = None
    server: ServerOptions | None = None  # set if replicas are inference servers (vLLM, SGLang)
    launcher: Launcher | None = None  # starts the processes, possibly on other machines; None: on this machine
    scales: bool = False  # let ``areno scale`` change the number of replicas, through files in ``log_folder``

    def __post_init__(self) -> None:
        for name in ("replicas", "tp_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """The state of a replica, and the number of its unfinished requests."""

    worker: Worker
    unfinished: int


@dataclass(frozen=True, slots=True)
class FleetHealth:
    """The state of all replicas."""

    replicas: list[ReplicaHealth]
    version: int  # version of the last weight update
    restarts: int
    resubmitted: int  # requests restarted because their replica died; their partial output is discarded
    waiting: int  # requests waiting for a replica


class RolloutFleet:
    """Rollout replicas with the generation interface of an engine.

    Args:
        path: checkpoint folder or hub id of the policy.
        config: configuration of the trainer's engine. Its training options are ignored.
        weights: default options of weight updates.
        devices: one device per rank, in the order of the replicas. If this argument is None and ``config.device`` is the CPU,
            all ranks use the CPU. If it is None and ``config.device`` is a GPU, the launcher assigns the GPUs. Without a
            launcher, consecutive GPUs are used, beginning with ``config.device``.

    Attributes:
        threads: number of PyTorch threads per process: ``FleetOptions.threads``, else ``OMP_NUM_THREADS``, else an equal share
            of the cores. The trainer should use the same number.

    Raises:
        UsageError: the checkpoint is unsupported or does not fit the layout, or there are too few devices.
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
        self.config = replace(config, trains="nothing", neighbors=options.replicas)
        share = max(usable_cores() // (options.replicas * options.tp_size + 1), 1)
        self.threads = options.threads or openmp_threads() or share
        self.version = 0
        if devices is None and options.launcher is None and config.device.type == "cuda":
            devices = [torch.device("cuda", index) for index in range(config.device.index or 0, visible_gpus())]
        self._devices = devices
        self._router = RequestRouter()
        self._updating, self._resizing = threading.Lock(), threading.Lock()
        self._server = options.server
        # Number of processes per replica that a launcher starts.
        self._ranks = 1 if options.server is not None else options.tp_size
        # All replicas have the same type, EngineGroup or ServerReplica, which determines the type of the transfer.
        self._replicas: dict[int, Any] = {}
        self._transfer: WeightTransfer | ServerWeightTransfer | None = None
        self._control: ReplicaControl | None = None
        self._closed = self._keeps = False
        self._refuse_size(options.replicas)
        self._supervisor = ReplicaSupervisor(self._job())
        first = self._replicas[min(self._replicas)]
        self.tokenizer, self.eos_ids = first.tokenizer, first.eos_ids
        self.context_length, self.vocab_size, self.kv_tokens = first.context_length, first.vocab_size, first.kv_tokens
        try:
            if isinstance(first, ServerReplica):
                assert options.server is not None
                self._transfer = ServerWeightTransfer(
                    self.weights, options.server, first.vocab_size, self._channel(first)
                )
            else:
                remote = options.launcher is not None and options.launcher.names is not None
                where = first.meets if remote else None
                specs = first.run_on_all_ranks(rollout_specs)[0]
                self._transfer = WeightTransfer(specs, self.weights, keeps=options.restart, where=where)
            self._control = ReplicaControl(self, options.log_folder) if options.scales else None
        except BaseException:
            self.close()
            raise

    # -- generating ------------------------------------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue requests, and return one future per request. If no replica is ready, requests wait for a replica.

        Raises:
            EngineError: the fleet is closed, or a request cannot be answered.
            WorkerFailedError: a replica has used up its restarts, or (if restarts are disabled) all replicas have failed.
        """
        return self._router.submit(fitted(requests, self.context_length, self.vocab_size, self.kv_tokens))

    @property
    def failed(self) -> bool:
        """Whether the fleet rejects all requests. If so, the error that :meth:`submit` raises tells the cause."""
        return self._router.ended

    def cancel(self, future: Future[RolloutResult]) -> None:
        """Abort the request of ``future``. Then ``future`` returns the partial answer."""
        self._router.cancel(future)

    def load(self) -> EngineLoad:
        """Return the total generation load of all running replicas."""
        loads = []
        for replica in self._up().values():
            with suppress(EngineError):
                loads.append(replica.load())
        return EngineLoad.total(loads)

    def generating(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because replicas can always generate. In contrast, a :class:`SharedEngine` must
        first switch to generation.
        """
        return nullcontext()

    def enable_prefix_cache(self, enabled: bool) -> None:
        """See :meth:`Engine.enable_prefix_cache`. Also applies to replicas that start later."""
        with self._updating:
            self._keeps = enabled
            for replica in self._up().values():
                with suppress(EngineError):
                    replica.enable_prefix_cache(enabled)

    # -- weights ---------------------------------------------------------------------------------------------------

    def update_weights(
        self, engine: Backend, version: int, mode: Mode | None = None, verify: bool | None = None
    ) -> UpdateReport:
        """Transfer the weights of a trainer to all replicas. The trainer must not train during the transfer.

        Each replica pauses generation between two tokens. Tokens after the pause have the weight version ``version``. But if
        the weights are LoRA adapters on inference servers, a running sample keeps the old adapter, and its tokens keep the old
        version. ``mode`` and ``verify`` override the :class:`WeightOptions`.

        Raises:
            UsageError: the mode is unknown, or the trainer and the replicas have different models.
            EngineError: the trainer failed, the fleet is closed, a server's log-probs differ too much from the trainer's, or
                (only if restarts are disabled) a replica could not load the weights.
        """
        chosen = mode or self.weights.mode
        refuse_unknown(chosen)
        with self._updating:
            if self._closed or self._transfer is None:
                raise EngineError("the rollout fleet is closed")
            checked = self.weights.verify if verify is None else verify
            report = self._transfer.deliver(engine, self._up(), version, chosen, checked)
            self.version = version
        return report

    def share_cores(self, threads: int | None = None) -> None:
        """Limit this process to ``threads`` PyTorch threads, if replicas run on the CPU.

        If ``threads`` is None, this process gets as many threads as each process of a replica (:attr:`threads`).
        """
        if self.config.device.type == "cpu":
            torch.set_num_threads(threads or self.threads)
            CPU_THREADS.share(self.options.replicas * self.options.tp_size + 1)
            CPU_THREADS.begin()

    # -- size ------------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Return the number of replicas, including replicas that are restarting or have failed."""
        return len(self._supervisor.workers())

    def resize(self, replicas: int, addresses: Sequence[str] = ()) -> None:
        """Change the number of replicas, and wait until the change is complete. To reduce the number, the last replicas are
        removed after they have answered their requests. ``addresses`` lists further servers that join the fleet. A new
        replica gets the newest weights before its first request. After an error, the number of replicas is unchanged.

        Raises:
            UsageError: the resources do not suffice for ``replicas`` replicas, or a server cannot be joined.
            EngineError, WorkerCreationError: a new replica could not be started.
        """
        with self._resizing:
            if addresses:
                self._server = self._with(addresses)
            launcher, role = self.options.launcher, self.options.role
            try:
                self._refuse_size(replicas)
                if launcher is not None and replicas > self.size():
                    launcher.resize(role, replicas * self._ranks)
                self._supervisor.resize(replicas)
            finally:
                after = self.size()
                if launcher is not None and not self._closed:
                    launcher.resize(role, after * self._ranks)
                if self._server is not None and self._server.addresses:
                    self._server = replace(self._server, addresses=self._server.addresses[:after])

    def _with(self, addresses: Sequence[str]) -> ServerOptions:
        """Return the server options with ``addresses`` added.

        Raises UsageError if areno started the servers of this run, or the run has no servers. Also raises UsageError for an
        address that is invalid or repeated, and for a server on another machine if there is no shared folder for weights.
        """
        server = self._server
        if server is None or not server.addresses:
            raise UsageError(
                "--add works only for a run that uses existing inference servers, but this run starts its replicas itself; set "
                "the number of replicas instead"
            )
        added = tuple(address.strip().rstrip("/") for address in addresses)
        for address in added:
            if not address.startswith(("http://", "https://")):
                raise UsageError(f"--add {address} is not an address; use http://HOST:PORT")
            if address in server.addresses:
                raise UsageError(f"--add {address} is already a replica; omit this address")
            if added.count(address) > 1:
                raise UsageError(f"--add {address} is repeated; give each address once")
        if replace(server, addresses=added).elsewhere and self.weights.folder is None:
            raise UsageError(
                f"--add {', '.join(added)}: servers on other machines cannot join, because this run transfers weights through "
                "this machine's memory; start the run with weight_update_mode=disk and a shared folder"
            )
        return replace(server, addresses=(*server.addresses, *added))

    def _refuse_size(self, replicas: int) -> None:
        if replicas < 1:
            raise UsageError(f"the number of replicas must be at least 1, got {replicas}")
        limit = None
        if self._server is not None and self._server.addresses:
            limit = len(self._server.addresses)
            reason = f"only {limit} server addresses are known"
        elif self._devices is not None and self.options.launcher is None:
            limit = len(self._devices) // self.options.tp_size
            reason = f"this machine has devices for only {limit} replicas"
        if limit is not None and replicas > limit:
            raise UsageError(f"the number of replicas cannot be {replicas}, because {reason}; use at most {limit}")

    # -- supervision -----------------------------------------------------------------------------------------------

    def health(self) -> FleetHealth:
        """Return the state of all replicas, and the numbers of restarts and resubmitted requests."""
        workers = self._supervisor.workers()
        return FleetHealth(
            replicas=[ReplicaHealth(worker, self._router.unfinished(n)) for n, worker in enumerate(workers)],
            version=self.version,
            restarts=sum(worker.restarts for worker in workers),
            resubmitted=self._router.resubmitted,
            waiting=self._router.waiting(),
        )

    def close(self) -> None:
        """Stop all replicas. Waiting requests fail, and running requests return partial answers or fail."""
        if self._closed:
            return
        self._closed = True
        self._router.end(EngineError("the rollout fleet is closed"))
        self._supervisor.close()
        if self._control is not None:
            self._control.close()
        with self._updating:
            if self._transfer is not None:
                self._transfer.close()

    def _up(self) -> dict[int, Any]:
        return {n: group for n, group in sorted(self._replicas.items()) if not group.workers.failed}

    def _job(self) -> ReplicaJob:
        options = self.options
        chosen = (
            "OMP_WAIT_POLICY" in os.environ or os.environ.get("GOMP_SPINCOUNT", DEFAULT_SPINCOUNT) != DEFAULT_SPINCOUNT
        )
        environment = {} if chosen else dict(_NO_SPINNING)
        return ReplicaJob(
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
        config = replace(
            self.config, builds_decode=number == 0
        )  # the other replicas load the compiled decode step from disk
        layout, processes = Layout(1, ranks), replace(processes, stall_option=self.options.stall_option)
        return EngineGroup(self.path, config, layout, devices, self.options.stall_s, processes, on_failure)

    def _started(self, number: int, started: Any) -> None:
        with self._updating:  # an update in progress does not include this replica, so it catches up afterwards
            if self._transfer is not None:
                self._transfer.catch_up(started)
            if self._keeps:
                started.enable_prefix_cache(True)
            self._replicas[number] = started
        self._router.enter(number, started)

    def _leaving(self, number: int) -> None:
        with self._updating:  # later updates do not include the replica
            replica = self._replicas.pop(number, None)
        self._router.leave(number)
        if replica is not None:
            self._router.drain(replica)

    def _channel(self, first: ServerReplica) -> ServerChannel | None:
        """Return the channel through which weights are broadcast to the servers of this fleet.

        Return None if areno did not start these servers, if they load only an adapter, or if they cannot receive broadcasts.
        """
        server, launcher = self.options.server, self.options.launcher
        if server is None or server.addresses or server.adapter or not first.transfers:
            return None
        host = launcher.host if launcher is not None else LOOPBACK
        return ServerChannel(self.path, host, self.weights.weight_chunked_mem_mb << 20)

    def _given_up(self, _number: int, error: WorkerFailedError) -> None:
        if self.options.restart or not self._up():
            self._router.end(error)
