"""An engine on several ranks, with the methods of :class:`areno.engine.engine.Engine`.

For scoring and training, every rank receives all rows, and selects its own rows by a deterministic rule, so the ranks need not
coordinate. A generation request goes only to the least loaded data-parallel replica. The choice of the replica does not affect
the result.
"""

import functools
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch

from areno.cache_folder import ScratchFolder
from areno.config.paths import base_of, tokenizer_of
from areno.engine.backend import ACTOR, Backend
from areno.engine.device import rank_devices
from areno.engine.engine import NO_REWARD_ROLLOUT, Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.limits import check_tokenizer, fitted
from areno.engine.parallel.layout import NO_ROLLOUT, Layout
from areno.engine.parallel.rendezvous import FolderRendezvous, NamedRendezvous, Rendezvous
from areno.engine.parallel.server import EngineServer, LoopFailure, RequestResult, TokenEvent
from areno.engine.parallel.workers import STALL_S, Processes, WorkerGroup
from areno.engine.rollout.load import EngineLoad
from areno.engine.scoring import Scored, TokenRows, temperature_per_row
from areno.engine.train.microbatch import MicroBatching
from areno.errors import EngineError
from areno.loss_fns.loss_interface import LossFn
from areno.text.chat import eos_token_ids, load_tokenizer
from areno.types import ModelRole, Request, RolloutResult, TokenRecord, TrainSequence
from areno.types.routing import RoutingRecord

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Pending:
    request: Request
    replica: int
    future: Future[RolloutResult] = field(default_factory=Future)


class EngineGroup(Backend):
    """An engine on several ranks; see the module docstring.

    Args:
        path: checkpoint folder or hub id of the actor.
        config: configuration of the engine; ``device`` is the device of rank 0.
        layout: how the ranks divide the model.
        devices: one device per rank. If None, the ranks use consecutive GPUs starting at ``config.device``. If
            ``config.device`` is the CPU, all ranks use the CPU.
        stall_s, processes, on_failure: see :class:`WorkerGroup` and :class:`Processes`.

    Raises:
        UsageError: the checkpoint cannot be used in this layout.
        EngineError: a rank failed.
    """

    # Read from rank 0; see :class:`Backend`.
    context_length: int | None = None
    vocab_size = 0
    kv_tokens = 0

    def __init__(
        self,
        path: str,
        config: EngineConfig,
        layout: Layout,
        devices: Sequence[torch.device] | None = None,
        stall_s: float = STALL_S,
        processes: Processes | None = None,
        on_failure: Callable[[EngineError], None] = lambda _error: None,
    ) -> None:
        self.path, self.config, self.layout = path, config, layout
        self.tokenizer = load_tokenizer(tokenizer_of(path), trust_remote_code=config.trust_remote_code)
        check_tokenizer(self.tokenizer, path, option="--ckpt", trust_remote_code=config.trust_remote_code)
        self.eos_ids = eos_token_ids(self.tokenizer, base_of(path))
        self._lock = threading.Lock()
        # With FSDP all ranks gather the weights before a rollout's first request; the lock keeps all calls in one order.
        self._order = threading.Lock()
        self._gathered = not layout.fsdp
        self._pending: dict[int, _Pending] = {}
        self._count = 0
        self._folder = ScratchFolder("ranks")
        self._on_failure = on_failure
        processes = processes or Processes()
        if processes.names is None:
            places = devices or rank_devices(config.device, layout.world_size, torch.cuda.device_count())
        else:  # the launcher gives each rank its own device
            own = torch.device("cuda", 0) if config.device.type == "cuda" else config.device
            places = [own] * layout.world_size
        self.meets = meeting_place(processes, Path(self._folder.name))
        try:
            self.workers = WorkerGroup(
                [
                    functools.partial(EngineServer, path, replace(config, device=device), layout, rank, self.meets)
                    for rank, device in enumerate(places)
                ],
                on_event=self._heard,
                on_failure=self._failed,
                busy=self._owes,
                processes=processes,
                stall_s=stall_s,
            )
            try:
                self._read_limits()
            except BaseException:
                self.workers.close()
                raise
        except BaseException:
            self._folder.cleanup()
            raise

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        return self.layout.dp_size

    @property
    def failed(self) -> bool:
        """Whether the group has failed. If one rank fails, the whole group fails."""
        return self.workers.failed

    @property
    def version(self) -> int:
        """Number of optimizer steps applied to the actor's weights."""
        return self.run_on_all_ranks(attrgetter("version"))[0]

    def _read_limits(self) -> None:
        self.context_length, self.vocab_size, self.kv_tokens = self.workers.call("limits", ranks=[0])[0]

    # -- generating ------------------------------------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue requests; return one future per request. Raises EngineError if a rank has failed or cannot serve a request."""
        if self.layout.pp_size > 1:
            raise EngineError(NO_ROLLOUT)
        if self.config.trains == "reward":
            raise EngineError(NO_REWARD_ROLLOUT)
        # Raise at once the errors that the ranks would raise later.
        requests = fitted(requests, self.context_length, self.vocab_size, self.kv_tokens)
        with self._order:
            if not self._gathered:
                self.workers.call("engine.begin_rollout")
                self._gathered = True
            opened = self._assign(requests)
            try:
                asked = self._hand_over(opened)
            except BaseException:  # such as a constraint that cannot be pickled
                for number in opened:
                    self._take(number)
                raise
        for numbers, answer in asked.items():
            answer.add_done_callback(functools.partial(self._refused, numbers))
        return [pending.future for pending in opened.values()]

    def _hand_over(self, opened: Mapping[int, _Pending]) -> dict[tuple[int, ...], Future[Any]]:
        """Send each request to the leader (first rank) of its replica.

        Return one future for each leader that receives requests. The future's key is the tuple of these requests' keys in
        ``opened``.
        """
        asked = {}
        for replica, leader in enumerate(self.layout.leaders()):
            batch = {number: pending.request for number, pending in opened.items() if pending.replica == replica}
            if batch:
                plain = {n: replace(request, listener=None, on_restart=None) for n, request in batch.items()}
                streamed = {number for number, request in batch.items() if request.listener is not None}
                asked[tuple(batch)] = self.workers.tell(leader, "submit", plain, streamed)
        return asked

    def _assign(self, requests: Sequence[Request]) -> dict[int, _Pending]:
        opened: dict[int, _Pending] = {}
        with self._lock:
            tokens = [0] * self.layout.dp_size
            for pending in self._pending.values():
                tokens[pending.replica] += pending.request.most_tokens
            for request in requests:
                self._count += 1
                opened[self._count] = pending = _Pending(request, tokens.index(min(tokens)))
                pending.future.set_running_or_notify_cancel()
                tokens[pending.replica] += request.most_tokens
            self._pending |= opened
        return opened

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all ranks, and return the results in rank order.

        With FSDP, the called method may release the gathered weights, so the next rollout always gathers the weights again.
        """
        with self._order:
            self._gathered = not self.layout.fsdp
            answers = self.workers.begin(method, *arguments)
        return answers()

    def _owes(self, rank: int) -> bool:
        replica = self.layout.place(rank).replica
        with self._lock:
            return any(pending.replica == replica for pending in self._pending.values())

    def _heard(self, rank: int, payload: Any) -> None:
        """Handle a worker's event; runs in the thread of the worker group."""
        if isinstance(payload, LoopFailure):
            self.workers.abandon(f"rank {rank} of {self.workers.size} failed while generating:\n{payload.error}")
            return
        if isinstance(payload, TokenEvent):
            pending = self._pending.get(payload.request)
            if pending is not None and pending.request.listener is not None:
                pending.request.listener(payload.sample, payload.token)
            return
        assert isinstance(payload, RequestResult)
        pending = self._take(payload.request)
        if pending is not None and payload.result is not None:
            pending.future.set_result(payload.result)
        elif pending is not None:
            pending.future.set_exception(payload.error)

    def _take(self, number: int) -> _Pending | None:
        with self._lock:
            return self._pending.pop(number, None)

    def _refused(self, numbers: Sequence[int], asked: Future[Any]) -> None:
        error = asked.exception()
        for number in numbers if error is not None else ():
            if (pending := self._take(number)) is not None:
                pending.future.set_exception(error)

    def _failed(self, error: EngineError) -> None:
        self._fail_requests(error)
        self._on_failure(error)

    def _fail_requests(self, error: EngineError) -> None:
        with self._lock:
            open_requests, self._pending = self._pending, {}
        for pending in open_requests.values():
            pending.future.set_exception(error)

    def cancel(self, future: Future[RolloutResult]) -> None:
        """Abort one request. The future then resolves to the tokens sampled so far."""
        with self._lock:
            matches = [(n, pending.replica) for n, pending in self._pending.items() if pending.future is future]
        for number, replica in matches:
            self.workers.tell(self.layout.leaders()[replica], "cancel", number)

    def load(self) -> EngineLoad:
        """Return the rollout load, summed over all replicas."""
        loads = [self.workers.tell(rank, "engine.load") for rank in self.layout.leaders()]
        return EngineLoad.total(load.result() for load in loads)

    def set_max_running(self, sequences: int | None) -> None:
        """Limit the total number of concurrent sequences; None means each replica's configured limit.

        Each replica gets an equal share, rounded up. Raises ValueError for a limit below 1.
        """
        share = None if sequences is None else -(-sequences // self.layout.dp_size)
        self.workers.call("engine.set_max_running", share)

    def enable_prefix_cache(self, enabled: bool) -> None:
        """See :meth:`Engine.enable_prefix_cache`."""
        self.workers.call("engine.enable_prefix_cache", enabled)

    def end_rollout(self) -> None:
        """See :meth:`Backend.end_rollout`."""
        self.workers.call("engine.loop.cancel_all", ranks=self.layout.leaders())
        self._all("end_rollout")

    # -- training and scoring --------------------------------------------------------------------------------------

    def train(
        self,
        rows: Sequence[TrainSequence],
        loss_fn: LossFn,
        mini_bs: int | MicroBatching,
        accumulation: int | None = None,
        role: str = ACTOR,
    ) -> dict[str, float]:
        """Train the model of ``role`` on the sequences ``rows``; see :meth:`Engine.train`."""
        return dict(self._all("engine.train", list(rows), loss_fn, mini_bs, accumulation, role)[0])

    def measure(
        self, rows: Sequence[TrainSequence], loss_fn: LossFn, mini_bs: int | MicroBatching, role: str = ACTOR
    ) -> dict[str, float]:
        """Return the loss and statistics without training; see :meth:`Engine.measure`."""
        return dict(self._all("engine.measure", list(rows), loss_fn, mini_bs, role)[0])

    def take_token_records(self) -> dict[int, TokenRecord]:
        """Return the merged records of all ranks; see :meth:`Engine.take_token_records`."""
        parts = self.workers.call("engine.take_token_records")
        return {number: record for part in parts for number, record in part.items()}

    def score(
        self,
        what: Scored,
        role: str,
        rows: TokenRows,
        micro_bs: int,
        temperatures: float | Sequence[float] = 1.0,
        routed: Sequence[RoutingRecord | None] | None = None,
    ) -> list[Any]:
        """See :meth:`Backend.score`."""
        per_row = temperature_per_row(rows, temperatures)
        for index, row in enumerate(rows):
            if not row:
                raise ValueError(
                    f"row {index} is empty, but a row must have at least one token; remove empty rows before scoring"
                )
        parts = self._all("score", what, role, list(map(list, rows)), micro_bs, per_row, routed)
        by_row = dict(entry for part in parts for entry in part)
        return [by_row[index] for index in range(len(rows))]

    # -- roles and checkpoints -------------------------------------------------------------------------------------

    def ensure_roles(self, roles: Mapping[str, ModelRole], checkpoint: Path | None = None) -> None:
        """Load the roles that are not loaded yet, on all ranks."""
        self._all("engine.ensure_roles", dict(roles), checkpoint)
        self._read_limits()  # the roles may have taken memory from the KV cache

    def drop_role(self, name: str) -> None:
        """Unload a role other than the actor."""
        self._all("engine.drop_role", name)

    def learning_rate(self, role: str) -> float:
        """Return the learning rate of a role's next optimizer step."""
        return float(self.workers.call("engine.learning_rate", role, ranks=[0])[0])

    def set_learning_rate(self, role: str, value: float) -> None:
        """Replace a role's learning-rate schedule with a constant learning rate."""
        self.workers.call("engine.set_learning_rate", role, value)

    def checkpoint_bytes(self) -> int:
        """Return the approximate size in bytes of a checkpoint that contains the state of all trainable roles."""
        stages = range(0, self.layout.world_size, self.layout.stage_size)
        return sum(self.workers.call("engine.checkpoint_bytes", ranks=stages))

    def save_model(self, folder: str | Path, role: str = ACTOR) -> None:
        """Write a role's weights, configuration and tokenizer in Hugging Face format."""
        self._all("engine.save_model", Path(folder), role)

    def save_state(self, checkpoint: Path) -> None:
        """Write the training state, from which a run with any layout can resume."""
        self._all("engine.save_state", checkpoint)

    def load_state(self, checkpoint: Path) -> None:
        """Load a training state. The run that saved the state may have had another layout."""
        self._all("engine.load_state", checkpoint)

    def run_on_all_ranks(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """Call a function with each rank's engine; see :meth:`Backend.run_on_all_ranks`."""
        return self._all("apply", function, *arguments)

    def close(self) -> None:
        """Stop all ranks."""
        try:
            if not self.workers.failed and not self.workers.closed:
                self.workers.call("engine.close")
        finally:
            self.workers.close()
            self._fail_requests(EngineError("the engine has been closed"))  # none, unless the closing was interrupted
            self._folder.cleanup()


def meeting_place(processes: Processes, folder: Path) -> Rendezvous:
    """Return the ranks' rendezvous: ``folder`` if all ranks are on this machine, otherwise the registry ``processes.names``."""
    names = processes.names
    if names is None:
        return FolderRendezvous(folder)
    return NamedRendezvous(names.options, f"{names.root}/groups/{uuid.uuid4().hex}")


def open_engine(
    path: str,
    config: EngineConfig,
    layout: Layout,
    devices: Sequence[torch.device] | None = None,
    stall_s: float = STALL_S,
    processes: Processes | None = None,
) -> Backend:
    """Load an engine with a given layout.

    If the layout has only one rank and ``processes`` has no cluster launcher, the rank runs in this process. Otherwise, each
    rank runs in a worker process. For the arguments, see :class:`EngineGroup`.
    """
    if layout.world_size == 1 and (processes is None or processes.names is None):
        return Engine(path, config)
    return EngineGroup(path, config, layout, devices, stall_s, processes)
