"""The rollout loop: one thread that serves all requests of an engine.

Requests can arrive at any time, and futures return the results. Each iteration of the loop admits and prefills waiting
sequences, and runs one decode step. While sequences are running, an iteration prefills only a limited number of tokens, so a
long prompt does not delay the running sequences. If an error ends the loop, every pending request fails, with this error as the
cause.
"""

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from areno.engine.device import use_device
from areno.engine.heartbeat import HEARTBEAT
from areno.engine.inference import DecodeProgress
from areno.engine.libc_tuning import release_workers, trim_freed_memory
from areno.engine.limits import fitted
from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.routing import Routers
from areno.engine.rollout.compiled.switch import DecodeMode, DecodeSwitch
from areno.engine.rollout.decode import DecodeBatch, RowParameters, sampling_table
from areno.engine.rollout.load import EngineLoad
from areno.engine.rollout.pause import Pause
from areno.engine.rollout.prefix_store import PrefixStore, remember
from areno.engine.rollout.routed import make_room, take_all, take_routing
from areno.engine.rollout.sampler import Draw
from areno.engine.rollout.scheduler import Scheduler
from areno.engine.rollout.sequence import DecodeOutcome, LoopCommands, Prefill, SampleGroup, Sequence, grammar_errors
from areno.engine.rollout.slot_cache import LayerShape, PrefillPlan, PrefillSpan, SlotCache
from areno.engine.rollout.speculation import VerifyPlan, draft
from areno.errors import EngineError
from areno.types import Request, RolloutResult

# Maximum tokens per prefill call: with nothing to decode, between decode steps on CPUs, and between decode steps on GPUs, where
# short calls cost as much as long ones.
IDLE_PREFILL, BUSY_PREFILL, BUSY_PREFILL_CUDA = 8192, 512, 8192


class RolloutLoop:
    """A rollout loop with continuous batching.

    Args:
        model: the policy. While requests are pending, the weights may change only within :meth:`weights_changing`.
        eos_ids: ids of the end-of-text tokens, which end a response unless the request ignores these tokens.
        tokenizer: tokenizer of the model, for stop strings and grammars.
        budget_tokens: capacity of the KV cache in tokens.
        max_running: maximum number of sequences that are decoded at once.
        progress: writes the ``rollout decode progress`` lines.
        layers: cache layout of each layer; if the tuple is empty, decode steps cannot be compiled.
        decode_mode: whether and when decode steps are compiled; see :class:`DecodeSwitch`.
        builds: whether mode ``auto`` may compile the decode step if no compiled step is on disk.
        speculate: maximum number of draft tokens per sequence and step (see :mod:`speculation`); 0 disables drafts.
        prefix_tokens: size of the prefix cache in tokens; 0 disables the prefix cache.
        records: routers whose expert choices are recorded; None records nothing. On a CPU, recording requires eager decoding.
    """

    prefill_plan: type[PrefillPlan] = PrefillPlan
    idle_s: float | None = None  # idle seconds after which freed memory is returned to the system; None: never

    def __init__(
        self,
        model: CausalLM,
        *,
        eos_ids: frozenset[int],
        tokenizer: Any,
        budget_tokens: int,
        max_running: int,
        progress: DecodeProgress | None = None,
        layers: tuple[LayerShape, ...] = (),
        decode_mode: DecodeMode = "auto",
        builds: bool = True,
        speculate: int = 0,
        prefix_tokens: int = 0,
        records: Routers | None = None,
    ) -> None:
        self.model = model
        self.eos_ids = eos_ids
        self.version = 0
        self.counters = EngineLoad()
        self.scheduler = Scheduler(budget_tokens, max_running)
        self.cache = SlotCache(model.device)
        self.records = self.cache.records = records
        self.prefixes = PrefixStore(prefix_tokens)
        self._tokenizer = tokenizer
        self._progress = progress
        self._rows: RowParameters | None = None  # None when the running sequences have changed
        self.decode = DecodeSwitch(model, self.cache, layers, decode_mode, builds)
        self.speculate = speculate
        self._threads = self.decode.threads
        self._wake = threading.Condition()
        self._commands = LoopCommands()
        self._open: dict[Future[RolloutResult], SampleGroup] = {}  # all unanswered requests
        self._pause = Pause(self._wake)
        self._closing = self._busy = False
        self.failure: BaseException | None = None  # the error that ended the loop
        self._thread: threading.Thread | None = None
        release_workers()  # loading the model has started OpenMP workers

    # -- called from any thread ------------------------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue requests, and return one future per request. The result of a future contains all samples of the request.

        Raises:
            EngineError: the loop has failed or is closed, or a request is invalid. In these cases, no request is queued.
        """
        model, budget = self.model, self.scheduler.budget_tokens
        groups = [self._group(r) for r in fitted(requests, model.context_length, model.vocab_size, budget)]
        release_workers()  # this thread will most likely wait now
        with self._wake:
            self._check_alive()
            self._start()
            self._commands.arrived += groups
            self._open.update((group.future, group) for group in groups)
            self._wake.notify()
        return [group.future for group in groups]

    def cancel(self, future: Future[RolloutResult]) -> None:
        """Abort the request of ``future`` before the next iteration. Unfinished samples get the ``finish_reason`` "abort"."""
        with self._wake:
            group = self._open.get(future)
            if group is not None:
                self._commands.cancelled.append(group)
                self._wake.notify()

    def load(self) -> EngineLoad:
        """Return the current load of the loop, and counts of its tokens and steps."""
        with self._wake:
            scheduler = self.scheduler
            return replace(
                self.counters,
                waiting=len(scheduler.waiting) + sum(len(group.members) for group in self._commands.arrived),
                running=scheduler.held(),
                kv_tokens_used=scheduler.cells(),
                kv_tokens=scheduler.budget_tokens,
                preemptions_total=scheduler.preemptions,
            )

    @contextmanager
    def weights_changing(self, version: int) -> Iterator[None]:
        """Pause generation between two tokens while the ``with`` block changes the weights to ``version``.

        After the block, the KV cache is recomputed, and samples continue from their current output. Later tokens are labeled
        with the new version. A merged adapter is unmerged before the block and merged again after the block. If the block
        raises an exception, the loop ends with this exception, because only some of the weights may have changed.
        """
        with self._pause.held(lambda: self._thread is None or self._closing or self.failure is not None):
            self._check_alive()
            try:
                with self.model.adapter.changing() if self.model.adapter is not None else nullcontext():
                    yield
            except BaseException as error:
                self._fail(error)
                raise
            take_all(self.cache, self.scheduler.running)
            with self._wake:
                self.scheduler.requeue()
                self.prefixes.clear()
            self._rows = None
            self.decode.refresh()
            self.version = version

    def cancel_all(self) -> None:
        """Abort all pending requests, whose futures then return the tokens sampled so far. Wait until the loop is idle."""
        with self._wake:
            self._commands.cancel_all = self._pending()
            self._wake.notify()
        RolloutLoop.wait_idle(self)  # of this rank only

    def wait_idle(self) -> None:
        """Wait until no request is pending. If the loop has failed, no request is pending, so the method returns at once."""
        with self._wake:
            self._wake.wait_for(lambda: self.failure is not None or self._thread is None or not self._pending())

    def follow_weights(self) -> None:
        """If no request is pending, let a compiled step switch to the current weights, which frees the old weights."""
        with self._wake:
            if not self._pending():
                self.decode.refresh()

    def drop_cache(self) -> None:
        """Free the KV cache and the prefix cache. Call this method only if no request is pending."""
        self.prefixes.clear()
        self.cache.release()

    def set_limits(self, *, prefix_tokens: int | None = None, max_running: int | None = None) -> None:
        """Set the size of the prefix cache and the maximum number of running sequences. None keeps the current value."""
        with self._wake:
            if prefix_tokens is not None:
                self._commands.prefix_tokens = prefix_tokens
            if max_running is not None:
                self._commands.max_running = max_running
            if self.failure is None and not (self._closing or self._pending()):
                self._apply(self._take_commands())

    def resize(self, budget_tokens: int, prefix_tokens: int) -> None:
        """Change the sizes of the KV cache and the prefix cache. Call this method only if no request is pending."""
        self.scheduler.budget_tokens, self.prefixes.budget_tokens = budget_tokens, prefix_tokens

    def weights_changed(self, version: int) -> None:
        """Set the weights' version. If the version changes, clear the prefix cache. Call this only if no request is pending."""
        if version != self.version:
            self.prefixes.clear()
        self.version = version

    def restart(self) -> BaseException | None:
        """Free the cache, and reset a failed loop. Return the error that stopped the loop; None if the loop has not failed."""
        if (cause := self.failure) is not None:
            if self._thread is not None:
                self._thread.join()
            self.scheduler = Scheduler(self.scheduler.budget_tokens, self.scheduler.max_running)
            self.failure = self._thread = self._rows = None
            self._busy, self._commands = False, replace(self._commands, arrived=[], cancel_all=False)
        self.drop_cache()
        return cause

    def close(self) -> None:
        """Abort pending requests, stop the loop's thread, and free the cache."""
        if self._thread is not None:
            self.cancel_all()
            with self._wake:
                self._closing = True
                self._wake.notify()
            self._thread.join()
        self.decode.close()
        self.drop_cache()

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineError(f"the rollout loop has failed: {self.failure}") from self.failure
        if self._closing:
            raise EngineError("the rollout loop is closed and accepts no requests")

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="areno-rollout", daemon=True)
            self._thread.start()
            atexit.register(_close_at_exit, weakref.ref(self))

    def _group(self, request: Request) -> SampleGroup:
        closing = None if self.records is None else lambda sequence: take_routing(self.cache, sequence)
        return SampleGroup.of(request, self.eos_ids, self._tokenizer, closing)

    # -- the loop's own thread -------------------------------------------------------------------------------------

    def _pending(self) -> bool:
        return bool(self._commands.arrived or self._busy)

    def _run(self) -> None:
        try:
            use_device(self.model.device)
            with torch.inference_mode():
                while self._next_work():
                    self._pause.rest()
                    HEARTBEAT.tick()
                    if self.failure is None and self._busy:
                        self._turn()
        except BaseException as error:
            self._fail(error)

    def _next_work(self) -> bool:
        """Apply commands, and wait while the loop is idle. Return False if the loop should stop."""
        with self._wake:
            self._apply(self._take_commands())
            if not self._busy:
                self._threads.reset()
                release_workers()
                if self._progress is not None:
                    self._progress.idle()
                self._wake.notify_all()
                if not self._wake.wait_for(self._awaited, self.idle_s):
                    trim_freed_memory()  # 0.1 s for 3 GB
                    self._wake.wait_for(self._awaited)
                self.decode.refresh()
                self._apply(self._take_commands())
            return self.failure is None and (self._busy or not self._closing)

    def _awaited(self) -> bool:
        return bool(self._commands.arrived or self._closing or self._pause.wanted)

    def _take_commands(self) -> LoopCommands:
        commands, self._commands = self._commands, LoopCommands()
        commands.cancelled = [group for group in commands.cancelled if group.future in self._open]
        commands.pause = self._pause.wanted and not self._pause.agreed
        return commands

    def _apply(self, commands: LoopCommands) -> None:
        self._pause.agreed |= commands.pause
        if commands.prefix_tokens is not None:
            self.prefixes.resize(commands.prefix_tokens)
        if commands.max_running is not None:
            self.scheduler.max_running = commands.max_running
        for group in commands.arrived:
            self.scheduler.waiting += group.members
        if commands.cancel_all or commands.cancelled:
            sequences = [*self.scheduler.waiting, *self.scheduler.live()]
            self._abort([s for s in sequences if commands.cancel_all or s.group in commands.cancelled])
        self._busy = bool(self.scheduler.waiting or self.scheduler.held())

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            self.failure = error
            groups, self._open = list(self._open.values()), {}
            self._wake.notify_all()
        for group in groups:
            failure = EngineError(f"generation failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            group.future.set_exception(failure)

    def _turn(self) -> None:
        self._prefill_some()
        self._make_room()
        if self.scheduler.running:
            self._step()

    def _make_room(self) -> None:
        if make_room(self.cache, self.scheduler):
            self._rows = None

    def _prefill_some(self) -> None:
        scheduler = self.scheduler
        most = BUSY_PREFILL_CUDA if self.model.device.type == "cuda" else BUSY_PREFILL
        while True:
            tokens = most if (busy := bool(scheduler.running)) else IDLE_PREFILL
            if scheduler.chunked_prefill is not None:
                self._continue_chunked_prefill(tokens)
            elif shared := scheduler.admit(tokens):
                self._prefill(shared)
            elif scheduler.chunked_prefill is None:
                return
            if busy and scheduler.running:
                return

    def _abort(self, sequences: list[Sequence]) -> None:
        aborted = set(sequences)
        self.scheduler.waiting = deque(s for s in self.scheduler.waiting if s not in aborted)
        queued = [s for s in sequences if s.slot < 0]
        self._leave([s for s in sequences if s.slot >= 0])
        for sequence in queued:
            self._finish(sequence)

    def _prefill(self, shared: list[list[Sequence]]) -> None:
        self._reserve()
        cached = [self._reuse(members) for members in shared]
        self._first_tokens(shared, self._run_prefill(shared, cached))

    def _continue_chunked_prefill(self, tokens: int) -> None:
        chunked = self.scheduler.chunked_prefill
        assert chunked is not None
        length = chunked.members[0].length
        self._reserve()
        start = chunked.done or self._reuse(chunked.members)
        chunked.done = min(start + tokens, length)
        hidden = self._run_prefill([chunked.members], [start], chunked.done)
        if chunked.done == length:
            self._first_tokens([self.scheduler.finish_chunked_prefill()], hidden)

    def _reserve(self) -> None:
        self.cache.reserve(self.scheduler.held(), self.scheduler.columns())

    def _reuse(self, members: list[Sequence]) -> int:
        hit = self.prefixes.find(members[0].context, self.version)
        if hit is None:
            return 0
        self.cache.restore(hit.snapshot, [s.slot for s in members], hit.length)
        self.counters.reused_total += hit.length
        return hit.length

    def _run_prefill(self, shared: list[list[Sequence]], cached: list[int], stop: int | None = None) -> Tensor:
        """For each i, prefill the common context of the samples ``shared[i]``, from token ``cached[i]`` to ``stop`` or the end.

        Return the hidden state of the last prefilled token of each context [contexts, C].
        """
        tokens: list[int] = []
        spans: list[PrefillSpan] = []
        for members, start in zip(shared, cached, strict=True):
            piece = members[0].context[start:stop]
            tokens += piece
            spans.append(PrefillSpan([s.slot for s in members], len(piece), start))
        plan = self.prefill_plan(self.cache, spans)
        self._threads.apply(len(tokens))
        hidden = self.model.body(self._upload(tokens), plan.position_ids, plan)
        plan.finish()
        self.counters.prefilled_total += len(tokens)
        return hidden.index_select(0, self._upload(plan.starts[1:]) - 1)

    def _first_tokens(self, shared: list[list[Sequence]], hidden: Tensor) -> None:
        """Sample the next tokens. ``hidden[i]`` is the last hidden state of the shared context of the samples ``shared[i]``."""
        logits = self.model.logits(hidden)
        owner = [index for index, members in enumerate(shared) for _ in members]
        for members in shared:
            prefill = Prefill(members[0].length)
            for member in members:
                member.prefill = prefill
        members = [sequence for members in shared for sequence in members]
        self._rows = None
        draw = sampling_table(members, self.model.device).draw
        self._take(members, draw(logits[self._upload(owner)], [len(s.output) for s in members]))

    def _step(self) -> None:
        running = self.scheduler.running
        self._reserve()
        drafts = draft(running, self.speculate, self.scheduler.columns()) if self.speculate else []
        if self._progress is not None:
            self._progress.step(len(running))
        self.counters.decode_steps_total += 1
        if any(drafts):
            self._verify(drafts)
        else:
            self._decode()

    def _decode(self) -> None:
        running = self.scheduler.running
        if self._rows is None:
            self._rows = RowParameters(running, self.model.device)
        self._take(list(running), self.decode.run(DecodeBatch(running, self._rows), self.scheduler.tokens_ahead))

    def _verify(self, drafts: list[list[int]]) -> None:
        """Feed the drafts to the model, sample a token at each position, and keep the accepted tokens."""
        running = list(self.scheduler.running)
        plan = VerifyPlan(self.cache, running, drafts)
        self._threads.apply(len(plan.tokens))
        hidden = self.model.body(self._upload(plan.tokens), plan.position_ids, plan)
        logits = self.model.logits(hidden[self._upload(plan.cells)])
        draw = sampling_table(plan.members, self.model.device).draw(logits, plan.counters)
        self._rows = None
        accepted = plan.accepted(draw.tokens.tolist())
        self.counters.drafted_total += sum(len(d) for d in drafts)
        self.counters.agreed_total += sum(map(len, accepted)) - len(running)
        outcome = DecodeOutcome()
        for rows in zip_longest(*accepted):
            continuing = [row for row in rows if row is not None and outcome.continues(plan.members[row])]
            if continuing:
                self._give([plan.members[row] for row in continuing], draw.rows(continuing), outcome)
        self._settle(outcome)  # only after every sequence has its tokens, because compaction copies caches

    def _upload(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.model.device)

    def _take(self, sequences: list[Sequence], draw: Draw) -> None:
        self._give(sequences, draw, outcome := DecodeOutcome())
        self._settle(outcome)

    def _give(self, sequences: list[Sequence], draw: Draw, outcome: DecodeOutcome) -> None:
        tokens, logprobs = draw.tokens.tolist(), draw.logprobs.tolist()
        cuts = draw.cut_mass.tolist() if draw.cut_mass is not None else [0.0] * len(tokens)
        tops = draw.top_lists([s.group.sampling.top_logprobs for s in sequences])
        for sequence, token, logprob, cut, top in zip(sequences, tokens, logprobs, cuts, tops, strict=True):
            if not logprob > -float("inf"):
                error = "the model's logits are not finite; either training has diverged, or the weights are corrupt"
                outcome.failed[sequence.group], outcome.finite = EngineError(error), False
            elif sequence.push(token, logprob, cut, self.version, top):
                outcome.done.append(sequence)
        self.counters.generated_total += len(tokens)
        outcome.failed.update(grammar_errors(sequences))

    def _settle(self, outcome: DecodeOutcome) -> None:
        for group, error in outcome.failed.items():  # first, because a sample may fail with its last token
            if self._open.pop(group.future, None) is not None:
                self._abort([s for s in group.members if s.finish is None])
                group.future.set_exception(error)
        self._leave(outcome.done)
        if not outcome.finite:
            self.prefixes.clear()
            self.cache.make_finite()

    def _leave(self, done: list[Sequence]) -> None:
        if not done:
            return
        take_all(self.cache, done)
        remember(self.prefixes, self.cache, self.scheduler.prefilled(done), self.version)
        self.cache.move(self.scheduler.remove(done))
        self._rows = None
        for sequence in done:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        group = sequence.group
        group.unfinished -= 1
        if group.unfinished == 0 and self._open.pop(group.future, None) is not None:
            group.future.set_result(RolloutResult([member.answer() for member in group.members]))


def _close_at_exit(loop: weakref.ref[RolloutLoop]) -> None:
    """Close a loop at exit, because the process would abort if the loop's thread were still running PyTorch code."""
    if (open_loop := loop()) is not None:
        open_loop.close()
