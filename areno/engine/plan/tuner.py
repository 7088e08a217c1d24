"""``--tune-params``: batch sizes that fit, found before the first step in the processes that will train.

The plan says which sizes may fit, the largest first; those are then tried for real, with sequences as long as the run
allows, and taken if the measured peak stays below the target. Nothing of a try remains: no weight, moment, random state
or cached token is other than before. What the user has set is not touched.

With several ranks every one of them tries, with what its replica would get, and the largest of the measured peaks counts.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from areno.config.train_options import TrainOptions
from areno.engine.backend import Backend
from areno.engine.checkpoint.rng import capture_rng, restore_rng
from areno.engine.plan import trial
from areno.engine.plan.account import MemoryPlan, Phase, make_plan
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
    engine: Backend, options: TrainOptions, loss_fn: LossFn, *, rows: int | None = None, capacity: int | None = None
) -> TrainOptions:
    """Choose ``max_running_prompts``, ``batch_size`` and ``mini_bs``, as far as they are not explicit.

    Args:
        engine: with the actor loaded, in this process or on ranks; further models need not be there, the plan counts them.
        rows: prompts of its data set, more than which no batch holds; None is no limit.
        capacity: bytes that a process may hold in all; None is what it holds and what is free, shared by ranks on a CPU.

    Returns:
        The options with these sizes, and with ``drop_rollout_state`` unless that is explicit.

    Raises:
        UsageError: not even the smallest sizes fit; the message says what to lower.
        EngineError: a rank that shares a model with others ran out of memory, which the others cannot survive.
    """
    rng, random_of_ranks = capture_rng(), engine.each_rank(trial.random_state)
    try:
        found = _Tuner(engine, options, loss_fn, rows, capacity).run()
        engine.each_rank(trial.restore_random, random_of_ranks)
        return found
    finally:
        restore_rng(rng)


class _Search(NamedTuple):
    """A size that is searched for: the phases that it decides, and what tries it, which returns the peak."""

    name: str
    phases: tuple[str, ...]
    work: Callable[[TrainOptions], int | None]


@dataclass(slots=True)
class _Tuner:
    """One search; see :func:`tune_sizes`."""

    engine: Backend
    options: TrainOptions
    loss_fn: LossFn
    rows: int | None
    capacity: int | None
    limit: int = 0
    held: int = 0
    states: int = 0

    def run(self) -> TrainOptions:
        """Search for the rollout's size, then for those of training."""
        if "drop_rollout_state" not in self.options.explicit:
            self.options = dataclasses.replace(self.options, drop_rollout_state=True)
        given = self.options.kv_cache_tokens
        budget = self.engine.kv_tokens if given is None else given  # plan with what the engine has taken
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
        ranks = self.engine.each_rank(trial.prepare, not self.options.drop_rollout_state)
        self.held, self.states = max(rank.held for rank in ranks), ranks[0].states
        capacity = self.capacity
        if capacity is None and self._sizes(self.options).sharing > 1:
            capacity = (sum(rank.held for rank in ranks) + min(rank.available for rank in ranks)) // len(ranks)
        elif capacity is None:
            capacity = min(rank.held + rank.available for rank in ranks)
        self.limit = int(capacity * self.options.mem_frac)
        where = " on each rank" if len(ranks) > 1 else ""
        logger.info(
            "auto tune may fill %.0f MiB%s: mem_frac=%g of %.0f MiB; %.0f MiB are held by weights, optimizer and process",
            *(self.limit / _MIB, where, self.options.mem_frac, capacity / _MIB, self.held / _MIB),
        )

    # -- candidates ------------------------------------------------------------------------------------------------

    def _running(self, planned: TrainOptions) -> int:
        if "max_running_prompts" in self.options.explicit:
            logger.info("auto tune rollout: skipped, --max-running-prompts is %d", planned.running_sequences)
            return planned.running_sequences
        longest = self._longest(planned)
        remedy = f"lower --max-new-tokens or --max-prompt-tokens, which make sequences of {longest} tokens"
        search = _Search("max_running_prompts", ("rollout",), self._generate)
        self._prove(search, 1, planned, remedy)
        return next(n for n in self._running_candidates() if n == 1 or self._fits(search, n, planned))

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
        # A try computes gradients and makes no update: what that takes beside them is planned.
        search = _Search("mini_bs", ("forward", "backward", "optimizer"), self._update)
        remedy = f"lower --max-new-tokens or --max-prompt-tokens, which make rows of {self._longest(planned)} tokens"
        if "mini_bs" in self.options.explicit:
            self._prove(search, self.options.mini_bs, planned, "lower --mini-bs")
            return self.options.mini_bs
        self._prove(search, 1, planned, remedy)
        rows = planned.batch_size * planned.n_samples
        return next(n for n in _MINI_BS if n == 1 or (n <= rows and self._fits(search, n, planned)))

    # -- tries -----------------------------------------------------------------------------------------------------

    def _prove(self, search: _Search, value: int, planned: TrainOptions, remedy: str) -> None:
        """The least that must fit, or there is nothing to choose."""
        if not self._fits(search, value, planned):
            raise UsageError(
                f"--tune-params: {search.name}={value} does not fit into --mem-frac {self.options.mem_frac:g} of the memory "
                f"({self.limit / _MIB:.0f} MiB); {remedy}, or raise --mem-frac"
            )

    def _fits(self, search: _Search, value: int, planned: TrainOptions) -> bool:
        """Whether a size fits by the plan, and then by trying."""
        candidate = dataclasses.replace(planned, **{search.name: value})  # type: ignore[arg-type]
        plan = make_plan(candidate, self.limit)
        expected, absent = self.held + max(self._more(plan, phase) for phase in search.phases), self._absent(plan)
        line = f"auto tune {search.name}={value}: planned {expected / _MIB:.0f} MiB"
        if expected > self.limit:
            logger.info("%s, too much", line)
            return False
        try:
            measured = search.work(
                candidate
            )  # peak bytes on the rank where they are most; None if one ran out of memory
        finally:
            self.engine.each_rank(trial.clean)
        if measured is None:
            logger.info("%s, out of memory when tried", line)
            return False
        fits = measured + absent <= self.limit
        logger.info("%s, measured %.0f MiB, %s", line, (measured + absent) / _MIB, "fits" if fits else "too much")
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
        return min(self.states, phase.parts["optimizer"])

    def _generate(self, candidate: TrainOptions) -> int | None:
        """Let all sequences of every replica be as long as they may become; those of one request share their prefill."""
        sizes, longest = self._sizes(candidate), self._longest(candidate)
        replicas = sizes.layout.dp_size
        context = max(longest - _PROBED_TOKENS, 1)
        contexts = min(max(IDLE_PREFILL // context, 1), sizes.running)
        sampling = SamplingParams(max_new_tokens=_PROBED_TOKENS, ignore_eos=True)
        self.engine.set_max_running(sizes.running * replicas)
        self.engine.each_rank(trial.begin)
        seeds = [list(range(first, sizes.running, contexts)) for first in range(contexts)]
        # Equal requests, as many as replicas, go to one each.
        requests = [
            Request([index % 7] + [1] * (context - 1), sampling, own)
            for index, own in enumerate(seeds)
            for _ in range(replicas)
        ]
        try:
            for future in self.engine.submit(requests):
                future.result()
        except EngineError:
            if not any(self.engine.each_rank(trial.recover)):
                raise
            if sizes.layout.tp_size > 1:
                raise EngineError(
                    "--tune-params: a rank ran out of memory, and those that share its model cannot go on without it; lower "
                    "--mem-frac, or give --max-running-prompts, --batch-size and --mini-bs"
                ) from None
            return None
        return max(self.engine.each_rank(trial.peak))

    def _update(self, candidate: TrainOptions) -> int | None:
        """Gradients of two largest microbatches on every replica, as a step would compute them; no update."""
        sizes = self._sizes(candidate)
        lengths, microbatches = sizes.microbatch(self._longest(candidate))
        rows = [_row(length, own) for length, own in zip(lengths, sizes.scored(lengths), strict=True)]
        rows = rows * min(microbatches, 2)
        peaks = self.engine.each_rank(trial.rehearse, rows, self.loss_fn, len(lengths))
        found = [peak for peak in peaks if peak is not None]
        return max(found) if len(found) == len(peaks) else None

    def _sizes(self, options: TrainOptions) -> RunSizes:
        return RunSizes(options, self.engine.config.device)

    def _longest(self, options: TrainOptions) -> int:
        return self._sizes(options).longest_row(self.engine.context_length)


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
