"""The rollout loop: one thread that serves every request of an engine.

Requests arrive at any time and are answered through futures. Each turn of the loop admits waiting sequences, prefills
them, and decodes one token for everything that lives. An error inside the loop fails all pending requests with its cause;
nobody waits for a loop that has died.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from areno.engine.inference import DecodeProgress
from areno.engine.model.causal_lm import CausalLM
from areno.engine.rollout.kv_cache import ROW_STEP, DecodePlan, PrefillPlan, SlotCache
from areno.engine.rollout.sampler import Draw, SamplingTable
from areno.engine.rollout.scheduler import Move, Scheduler, round_up
from areno.engine.rollout.sequence import Group, Sequence, StopText
from areno.engine.rollout.threads import ThreadRule
from areno.errors import EngineError
from areno.types import Request, RolloutResult

# Attention reads whole multiples of this: finer wastes less, and eight is what keeps kernels independent of the length.
READ_STEP = 16

StopTextFactory = Callable[[list[str], bool], StopText]


@dataclass(slots=True)
class RolloutCounters:
    """Totals since the loop began."""

    generated: int = 0
    prefilled: int = 0
    decode_steps: int = 0


class RolloutLoop:
    """Generates for everybody who submits.

    Args:
        model: the policy; it must not be trained while requests are pending.
        eos_ids: token ids that end a response unless a request ignores them.
        make_stop_text: builds the stop-string watcher of a request (stop strings, skip special tokens).
        budget_tokens: KV tokens that may be in use at once.
        max_running: most sequences decoded at once.
        progress: writes the ``rollout decode progress`` lines.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        eos_ids: frozenset[int],
        make_stop_text: StopTextFactory,
        budget_tokens: int,
        max_running: int,
        progress: DecodeProgress | None = None,
    ) -> None:
        self.model = model
        self.eos_ids = eos_ids
        self.version = 0
        self.counters = RolloutCounters()
        self.scheduler = Scheduler(budget_tokens, max_running)
        self.cache = SlotCache(model.device)
        self._make_stop_text = make_stop_text
        self._progress = progress
        self._table: SamplingTable | None = None
        self._threads = ThreadRule(model)
        self._wake = threading.Condition()
        self._incoming: list[Group] = []
        self._open: set[Group] = set()  # every group that is not answered, wherever its sequences are
        self._closing = False
        self._failure: BaseException | None = None
        self._busy = False
        self._cancel = False
        self._thread: threading.Thread | None = None

    # -- called from any thread ------------------------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue requests; each future resolves to all samples of its request.

        Raises:
            EngineError: the loop has died, or a request can never fit the KV budget.
        """
        groups = [self._group(request) for request in requests]
        with self._wake:
            if self._failure is not None:
                raise EngineError(f"the rollout loop has died: {self._failure}") from self._failure
            if self._closing:
                raise EngineError("the rollout loop is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="areno-rollout", daemon=True)
                self._thread.start()
            self._incoming += groups
            self._open.update(groups)
            self._wake.notify()
        return [group.future for group in groups]

    def cancel_all(self) -> None:
        """Answer every pending request with what it has so far, ``finish_reason`` "abort"; returns when the loop is idle."""
        with self._wake:
            self._cancel = self._pending()
            self._wake.notify()
        self.wait_idle()

    def wait_idle(self) -> None:
        """Wait until nothing is pending. Returns at once when the loop has died: its requests have been failed then."""
        with self._wake:
            self._wake.wait_for(lambda: self._failure is not None or self._thread is None or not self._pending())

    def close(self) -> None:
        """Stop the thread and give the cache back; pending requests are aborted."""
        if self._thread is not None:
            self.cancel_all()
            with self._wake:
                self._closing = True
                self._wake.notify()
            self._thread.join()
        self.cache.release()

    def _group(self, request: Request) -> Group:
        sampling = request.sampling
        if not request.prompt_tokens:
            raise EngineError("a prompt must hold at least one token")
        longest = len(request.prompt_tokens) + sampling.max_new_tokens
        if longest > self.scheduler.budget_tokens:
            raise EngineError(
                f"a request of {len(request.prompt_tokens)} prompt tokens and up to {sampling.max_new_tokens} new ones "
                f"can never fit the KV cache of {self.scheduler.budget_tokens} tokens; raise --kv-cache-tokens or lower "
                "--max-new-tokens"
            )
        stop_ids = frozenset(sampling.stop_token_ids or ()) | (frozenset() if sampling.ignore_eos else self.eos_ids)
        group = Group(request.prompt_tokens, sampling, stop_ids, Future())
        for seed in request.seeds:
            watcher = self._make_stop_text(sampling.stop, sampling.skip_special_tokens) if sampling.stop else None
            group.members.append(Sequence(group, seed, watcher))
        group.unfinished = len(group.members)
        group.future.set_running_or_notify_cancel()  # from here on only the loop ends it, not a caller who went away
        return group

    # -- the loop's own thread -------------------------------------------------------------------------------------

    def _pending(self) -> bool:
        return bool(self._incoming or self._busy)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._next_work():
                    self._turn()
        except BaseException as error:
            self._fail(error)

    def _next_work(self) -> bool:
        """Take in new requests; sleeps while there is nothing to do. False means the loop shall end."""
        with self._wake:
            self._accept()
            if self._cancel:
                self._cancel = False
                self._abort_all()
            self._busy = bool(self.scheduler.waiting or self.scheduler.running)
            if not self._busy:
                self._threads.reset()
                if self._progress is not None:
                    self._progress.idle()
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._incoming or self._closing)
                self._accept()
                self._busy = bool(self.scheduler.waiting)
            return self._busy or not self._closing

    def _accept(self) -> None:
        for group in self._incoming:
            self.scheduler.add(group.members)
        self._incoming = []

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            self._failure = error
            groups, self._open = self._open, set()
            self._wake.notify_all()
        for group in groups:
            failure = EngineError(f"generation failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            group.future.set_exception(failure)

    def _turn(self) -> None:
        """Admit and prefill what fits, then decode one token for every live sequence."""
        while shared := self.scheduler.admit():
            self._prefill(shared)
        moves = self.scheduler.make_room()
        if moves or len(self.scheduler.running) != len(self._table.seeds if self._table else ()):
            self.cache.move(moves)
            self._table = None
        if self.scheduler.running:
            self._decode()

    def _abort_all(self) -> None:
        waiting = list(self.scheduler.waiting)
        self.scheduler.waiting.clear()
        self._leave(list(self.scheduler.running))
        for sequence in waiting:
            self._finish(sequence)

    def _prefill(self, shared: list[list[Sequence]]) -> None:
        contexts = [members[0].context for members in shared]
        running = self.scheduler.running
        self.cache.reserve(len(running), max(self.cache.columns, self.scheduler.columns()))
        plan = PrefillPlan(self.cache, [len(c) for c in contexts], [[s.slot for s in members] for members in shared])
        tokens = torch.tensor([token for context in contexts for token in context], device=self.model.device)
        self._threads.apply(len(tokens))
        hidden = self.model.body(tokens, plan.position_ids, plan)
        plan.finish()
        last = torch.tensor(plan.starts[1:], device=hidden.device) - 1
        logits = self.model.logits(hidden.index_select(0, last))
        owner = [index for index, members in enumerate(shared) for _ in members]
        members = [sequence for members in shared for sequence in members]
        table = SamplingTable([s.group.sampling for s in members], [s.seed for s in members], self.model.device)
        self.counters.prefilled += len(tokens)
        self._table = None
        self._take(
            members, table.draw(logits[torch.tensor(owner, device=logits.device)], [len(s.output) for s in members])
        )

    def _decode(self) -> None:
        running = self.scheduler.running
        rows = round_up(len(running), ROW_STEP)
        self.cache.reserve(rows, self.scheduler.columns())
        columns = round_up(max(s.length for s in running), READ_STEP)
        if self._table is None:
            sampling = [s.group.sampling for s in running]
            self._table = SamplingTable(sampling, [s.seed for s in running], self.model.device)
        padding = [0] * (rows - len(running))
        tokens = self._upload([s.last_token for s in running] + padding)
        plan = DecodePlan(self.cache, self._upload([s.length - 1 for s in running] + padding), columns)
        self._threads.apply(rows)
        hidden = self.model.body(tokens, plan.position_ids, plan)
        logits = self.model.logits(hidden[: len(running)])
        self.counters.decode_steps += 1
        if self._progress is not None:
            self._progress.step(len(running))
        self._take(list(running), self._table.draw(logits, [len(s.output) for s in running]))

    def _upload(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.model.device)

    def _take(self, sequences: list[Sequence], draw: Draw) -> None:
        """Give each sequence its token, and let those leave that are done."""
        tokens, logprobs = draw.tokens.tolist(), draw.logprobs.tolist()
        cuts = draw.cut_mass.tolist() if draw.cut_mass is not None else [0.0] * len(tokens)
        done = []
        for sequence, token, logprob, cut in zip(sequences, tokens, logprobs, cuts, strict=True):
            if not logprob > -float("inf"):
                raise EngineError(
                    "the model produced logits that are not finite; the weights have diverged or are broken"
                )
            if sequence.push(token, logprob, cut, self.version):
                done.append(sequence)
        self.counters.generated += len(tokens)
        self._leave(done)

    def _leave(self, done: list[Sequence]) -> None:
        if not done:
            return
        moves: list[Move] = self.scheduler.remove(done)
        self.cache.move(moves)
        self._table = None
        for sequence in done:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        group = sequence.group
        group.unfinished -= 1
        if group.unfinished == 0:
            self._open.discard(group)
            group.future.set_result(group.result())
