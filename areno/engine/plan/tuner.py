"""``--tune-params``: batch sizes that fit, found before the first step in the process that will train.

The plan says which sizes may fit, the largest first; those are then tried for real, with sequences as long as the run
allows, and taken if the measured peak stays below the target. Nothing of a try remains: no weight, moment, random state
or cached token is other than before. What the user has set is not touched.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from areno.config.train_options import TrainOptions
from areno.engine.checkpoint.rng import capture_rng, restore_rng
from areno.engine.engine import Engine
from areno.engine.plan.account import MemoryPlan, Phase, make_plan
from areno.engine.plan.memory import available_bytes
from areno.engine.plan.meter import held_memory, peak_memory, return_freed_memory
from areno.engine.plan.sizes import RunSizes
from areno.engine.rollout.loop import IDLE_PREFILL
from areno.errors import EngineError, UsageError
from areno.loss_fns.pack import LossFn
from areno.types import Request, SamplingParams, TrainSequence

logger = logging.getLogger(__name__)

_MINI_BS = (16, 8, 4, 2, 1)
_MIB = 2**20
# A probe generates so many tokens behind a context that fills the rest of the longest sequence.
_PROBED_TOKENS = 2


def tune_sizes(
    engine: Engine, options: TrainOptions, loss_fn: LossFn, *, rows: int | None = None, capacity: int | None = None
) -> TrainOptions:
    """Choose ``max_running_prompts``, ``batch_size`` and ``mini_bs``, as far as they are not explicit.

    Args:
        engine: with the actor loaded; further models need not be there, the plan counts them.
        options: of the run, which generates.
        loss_fn: its loss.
        rows: prompts of its data set, more than which no batch holds; None is no limit.
        capacity: bytes that the process may hold in all; None is what it holds and what is free.

    Returns:
        The options with these sizes, and with ``drop_rollout_state`` unless that is explicit.

    Raises:
        UsageError: not even the smallest sizes fit; the message says what to lower.
    """
    rng = capture_rng()
    try:
        return _Tuner(engine, options, loss_fn, rows, capacity).run()
    finally:
        restore_rng(rng)


@dataclass(slots=True)
class _Tuner:
    """One search; see :func:`tune_sizes`."""

    engine: Engine
    options: TrainOptions
    loss_fn: LossFn
    rows: int | None
    capacity: int | None
    limit: int = 0
    held: int = 0

    def run(self) -> TrainOptions:
        """Search for the rollout's size, then for those of training."""
        if "drop_rollout_state" not in self.options.explicit:
            self.options = dataclasses.replace(self.options, drop_rollout_state=True)
        self.engine.config.keep_rollout_state = not self.options.drop_rollout_state
        if self.options.kv_cache_tokens is None:  # plan with the budget that the engine has taken
            budget = self.engine.loop.scheduler.budget_tokens
        else:
            budget = self.options.kv_cache_tokens
        self._measure_start()
        planned = dataclasses.replace(self.options, kv_cache_tokens=budget)
        running = self._running(planned)
        planned = dataclasses.replace(planned, max_running_prompts=running, batch_size=self._batch_size(running))
        mini_bs = self._mini_bs(planned)
        chosen = dataclasses.replace(
            self.options, max_running_prompts=running, batch_size=planned.batch_size, mini_bs=mini_bs
        )
        logger.info(
            "auto tune chose: max_running_prompts=%d batch_size=%d mini_bs=%d drop_rollout_state=%s",
            *(running, chosen.batch_size, mini_bs, chosen.drop_rollout_state),
        )
        return chosen

    def _measure_start(self) -> None:
        """What is held once the optimizer has its states, and what may be held at most."""
        device = self.engine.config.device
        self.engine.actor.trained_by().allocate()
        return_freed_memory(device)
        self.held = held_memory(device)
        capacity = self.capacity if self.capacity is not None else self.held + available_bytes(device)
        self.limit = int(capacity * self.options.mem_frac)
        logger.info(
            "auto tune may fill %.0f MiB: mem_frac=%g of %.0f MiB; %.0f MiB are held by weights, optimizer and process",
            *(self.limit / _MIB, self.options.mem_frac, capacity / _MIB, self.held / _MIB),
        )

    # -- candidates ------------------------------------------------------------------------------------------------

    def _running(self, planned: TrainOptions) -> int:
        if "max_running_prompts" in self.options.explicit:
            logger.info("auto tune rollout: skipped, --max-running-prompts is %d", planned.running_sequences)
            return planned.running_sequences
        longest = self._longest(planned)
        remedy = f"lower --max-new-tokens or --max-prompt-tokens, which make sequences of {longest} tokens"
        self._prove(1, planned, "max_running_prompts", "rollout", self._generate, remedy)
        for value in self._running_candidates():
            if value == 1 or self._fits(value, planned, "max_running_prompts", ("rollout",), self._generate):
                return value
        raise AssertionError("one sequence was proven to fit")

    def _running_candidates(self) -> Iterator[int]:
        most = min(self.options.tune_max_samples, self.engine.config.max_running)
        if "batch_size" in self.options.explicit:
            most = min(most, self.options.batch_size * self.options.n_samples)
            if most == self.options.batch_size * self.options.n_samples:
                yield most
        yield from _powers_of_two(most)

    def _batch_size(self, running: int) -> int:
        if "batch_size" in self.options.explicit:
            return self.options.batch_size
        most = min(self.options.tune_max_samples, running) // self.options.n_samples
        return next(_powers_of_two(max(min(most, self.rows or most), 1)))

    def _mini_bs(self, planned: TrainOptions) -> int:
        remedy = f"lower --max-new-tokens or --max-prompt-tokens, which make rows of {self._longest(planned)} tokens"
        if "mini_bs" in self.options.explicit:
            self._prove(self.options.mini_bs, planned, "mini_bs", "backward", self._update, "lower --mini-bs")
            return self.options.mini_bs
        self._prove(1, planned, "mini_bs", "backward", self._update, remedy)
        rows = planned.batch_size * planned.n_samples
        for value in _MINI_BS:
            if value == 1:
                return 1
            if value <= rows and self._fits(value, planned, "mini_bs", ("forward", "backward"), self._update):
                return value
        raise AssertionError("one row was proven to fit")

    # -- tries -----------------------------------------------------------------------------------------------------

    def _prove(
        self,
        value: int,
        planned: TrainOptions,
        name: str,
        phase: str,
        work: Callable[[TrainOptions], None],
        remedy: str,
    ) -> None:
        """The least that must fit, or there is nothing to choose."""
        if not self._fits(value, planned, name, (phase,), work):
            raise UsageError(
                f"--tune-params: {name}={value} does not fit into --mem-frac {self.options.mem_frac:g} of the memory "
                f"({self.limit / _MIB:.0f} MiB); {remedy}, or raise --mem-frac"
            )

    def _fits(
        self,
        value: int,
        planned: TrainOptions,
        name: str,
        phases: tuple[str, ...],
        work: Callable[[TrainOptions], None],
    ) -> bool:
        """Whether a size fits by the plan, and then by trying."""
        candidate = dataclasses.replace(planned, **{name: value})  # type: ignore[arg-type]
        plan = make_plan(candidate, self.limit)
        expected, absent = self.held + max(self._more(plan, phase) for phase in phases), self._absent(plan)
        told = f"auto tune {name}={value}: planned {expected / _MIB:.0f} MiB"
        if expected > self.limit:
            logger.info("%s, too much", told)
            return False
        measured = self._measured(work, candidate)
        if measured is None:
            logger.info("%s, out of memory when tried", told)
            return False
        fits = measured + absent <= self.limit
        logger.info("%s, measured %.0f MiB, %s", told, (measured + absent) / _MIB, "fits" if fits else "too much")
        return fits

    def _more(self, plan: MemoryPlan, name: str) -> int:
        """What a phase takes besides what the process holds already."""
        phase = plan.phase(name)
        assert phase is not None, name
        return phase.total - phase.parts["process"] - phase.parts["weights"] - self._own_state(phase)

    def _absent(self, plan: MemoryPlan) -> int:
        """What the plan counts and a try does not hold: further models, their optimizers, and a cache that is kept."""
        phase = plan.phase("forward")
        assert phase is not None
        kept = 0 if self.options.drop_rollout_state else phase.parts["kv_cache"]
        return phase.parts["roles"] + phase.parts["optimizer"] - self._own_state(phase) + kept

    def _own_state(self, phase: Phase) -> int:
        """The actor's part of the optimizer states, which are there."""
        return min(self.engine.actor.trained_by().state_bytes(), phase.parts["optimizer"])

    def _measured(self, work: Callable[[TrainOptions], None], candidate: TrainOptions) -> int | None:
        """Peak bytes of a try; None where it ran out of memory."""
        device = self.engine.config.device
        try:
            with peak_memory(device) as peak:
                work(candidate)
        except (torch.cuda.OutOfMemoryError, EngineError) as error:
            cause = error.__cause__ if isinstance(error, EngineError) else error
            if not isinstance(cause, torch.cuda.OutOfMemoryError):
                raise
            self.engine.loop.restart()
            return None
        finally:
            self.engine.actor.trained_by().zero_grad()
            self.engine.loop.drop_cache()
            return_freed_memory(device)
        return peak.bytes

    def _generate(self, candidate: TrainOptions) -> None:
        """Let all sequences be as long as they may become; those of one request share their prefill."""
        running, longest = candidate.running_sequences, self._longest(candidate)
        context = max(longest - _PROBED_TOKENS, 1)
        contexts = min(max(IDLE_PREFILL // context, 1), running)
        sampling = SamplingParams(max_new_tokens=_PROBED_TOKENS, ignore_eos=True)
        self.engine.loop.scheduler.max_running = running
        seeds = [list(range(first, running, contexts)) for first in range(contexts)]
        requests = [Request([index % 7] + [1] * (context - 1), sampling, own) for index, own in enumerate(seeds)]
        for future in self.engine.submit(requests):
            future.result()

    def _update(self, candidate: TrainOptions) -> None:
        """Gradients of two largest microbatches, as a step would compute them; no update."""
        sizes = RunSizes(candidate, self.engine.config.device)
        lengths, microbatches = sizes.microbatch(self._longest(candidate))
        scored = sizes.scored(lengths)
        rows = [_row(length, own) for length, own in zip(lengths, scored, strict=True)]
        self.engine.actor.rehearse(rows * min(microbatches, 2), self.loss_fn, len(rows))

    def _longest(self, options: TrainOptions) -> int:
        return RunSizes(options, self.engine.config.device).longest_row(self.engine.actor.model.context_length)


def _powers_of_two(most: int) -> Iterator[int]:
    """Powers of two up to ``most``, the largest first."""
    for exponent in reversed(range(most.bit_length())):
        yield 1 << exponent


def _row(length: int, scored: int) -> TrainSequence:
    """A row of made-up tokens with all that a policy's loss may read."""
    zeros = [0.0] * length
    return TrainSequence(
        prompt_mask=[index < length - scored for index in range(length)],
        tokens=[1] * length,
        logprobs=zeros,
        advantages=[1.0] * length,
        ref_logprobs=zeros,
    )
