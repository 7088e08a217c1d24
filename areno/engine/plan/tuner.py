"""Find the number of concurrent sequences and the batch sizes that fit into memory, for ``--tune-params``.

The search runs in the training processes, before the first step. Options that the user has set are not changed.

The number of sequences is searched first, then ``mini_bs``. Each search first checks that the smallest value fits, then goes
through the values from largest to smallest. Values whose planned memory exceeds the limit are skipped. All other values are
tried with sequences of maximum length. The search chooses the first value whose measured peak is within the limit. The trials
change neither weights nor optimizer states nor random states.

With several replicas, each replica processes an equal part of a trial's sequences. The highest peak of all ranks is compared
with the limit.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from areno.config.all_train_options import TrainOptions
from areno.engine.backend import Backend
from areno.engine.checkpoint.rng import capture_rng, restore_rng
from areno.engine.plan import trial
from areno.engine.plan.memory_plan import MemoryPlan, Phase, make_plan
from areno.engine.plan.sizes import RunSizes
from areno.engine.rollout.loop import IDLE_PREFILL
from areno.errors import EngineError, UsageError
from areno.loss_fns.loss_interface import LossFn
from areno.types import Request, SamplingParams, TrainSequence

logger = logging.getLogger(__name__)

_MINI_BS = (16, 8, 4, 2, 1)
_MIB = 2**20
# Number of tokens that a trial generates, after a context that fills the rest of the longest sequence.
_PROBED_TOKENS = 2


def tune_sizes(
    engine: Backend, options: TrainOptions, loss_fn: LossFn, *, rows: int | None = None, capacity: int | None = None
) -> TrainOptions:
    """Choose ``max_running_prompts``, ``batch_size`` and ``mini_bs``. Values that the user has set are not changed.

    Args:
        engine: engine or engine group with a loaded actor. Other models need not be loaded, because the search uses
            estimates of their memory.
        rows: number of prompts in the dataset, which limits the batch size; None means no limit.
        capacity: memory in bytes of each rank, of which the search uses at most the share ``mem_frac``. None means the
            memory that the rank uses plus the free memory. Ranks on a CPU share one memory, so each rank gets an equal part.

    Returns:
        The options with the chosen sizes. ``drop_rollout_state``, which frees the KV cache after each rollout, is also set
        to True, unless the user has set it.

    Raises:
        UsageError: the smallest sizes do not fit, or the ``mini_bs`` that the user has set does not fit. The message names the
            options to lower.
        EngineError: a rank of a tensor-parallel model ran out of memory, so the other ranks cannot continue.
    """
    rng, random_of_ranks = capture_rng(), engine.run_on_all_ranks(trial.random_state)
    try:
        tuned = _Tuner(engine, options, loss_fn, rows, capacity).run()
        engine.run_on_all_ranks(trial.restore_random, random_of_ranks)
        return tuned
    finally:
        restore_rng(rng)


class _Search(NamedTuple):
    """An option, the phases whose memory depends on this option, and a function that measures the peak memory in bytes."""

    name: str
    phases: tuple[str, ...]
    work: Callable[[TrainOptions], int | None]


@dataclass(slots=True)
class _Tuner:
    engine: Backend
    options: TrainOptions
    loss_fn: LossFn
    rows: int | None
    capacity: int | None
    limit: int = 0
    held: int = 0
    states: int = 0

    def run(self) -> TrainOptions:
        if "drop_rollout_state" not in self.options.explicit:
            self.options = dataclasses.replace(self.options, drop_rollout_state=True)
        explicit = self.options.kv_cache_tokens
        budget = self.engine.kv_tokens if explicit is None else explicit  # plan with the engine's actual cache
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
        """Set three sizes in bytes per rank.

        These are ``held`` (the memory in use), ``states`` (the optimizer states, which ``held`` includes), and ``limit`` (the
        maximum memory that the run may use).
        """
        ranks = self.engine.run_on_all_ranks(trial.prepare, not self.options.drop_rollout_state)
        self.held, self.states = max(rank.held for rank in ranks), ranks[0].states
        capacity = self.capacity
        if capacity is None and self._sizes(self.options).sharing > 1:
            capacity = (sum(rank.held for rank in ranks) + min(rank.available for rank in ranks)) // len(ranks)
        elif capacity is None:
            capacity = min(rank.held + rank.available for rank in ranks)
        self.limit = int(capacity * self.options.mem_frac)
        where = " on each rank" if len(ranks) > 1 else ""
        logger.info(
            "auto tune limit: %.0f MiB%s (mem_frac=%g of %.0f MiB); weights, optimizer and process use %.0f MiB",
            *(self.limit / _MIB, where, self.options.mem_frac, capacity / _MIB, self.held / _MIB),
        )

    # -- candidates ------------------------------------------------------------------------------------------------

    def _running(self, planned: TrainOptions) -> int:
        if "max_running_prompts" in self.options.explicit:
            logger.info(
                "auto tune rollout: skipped, because --max-running-prompts is set to %d", planned.running_sequences
            )
            return planned.running_sequences
        remedy = _remedy(self._longest(planned))
        search = _Search("max_running_prompts", ("rollout",), self._generate)
        self._require(search, 1, planned, remedy)
        return next(n for n in self._running_candidates() if n == 1 or self._fits(search, n, planned))

    def _running_candidates(self) -> Iterator[int]:
        most = min(self.options.tune_max_samples, self.engine.config.max_running)
        if "batch_size" in self.options.explicit:
            most = min(most, self.options.batch_size * self.options.n_samples)
            if most == self.options.batch_size * self.options.n_samples and most & (most - 1):  # no power of two
                yield most
        yield from _powers_of_two(most)

    def _batch_size(self, running: int) -> int:
        if "batch_size" in self.options.explicit:
            return self.options.batch_size
        most = min(self.options.tune_max_samples, running) // self.options.n_samples
        return next(_powers_of_two(max(min(most, self.rows or most), 1)))

    def _mini_bs(self, planned: TrainOptions) -> int:
        # A trial computes gradients without an update; only the plan covers the temporary memory of the update.
        search = _Search("mini_bs", ("forward", "backward", "optimizer"), self._update)
        remedy = _remedy(self._longest(planned))
        if "mini_bs" in self.options.explicit:
            self._require(search, self.options.mini_bs, planned, "lower --mini-bs")
            return self.options.mini_bs
        self._require(search, 1, planned, remedy)
        rows = planned.batch_size * planned.n_samples
        return next(n for n in _MINI_BS if n == 1 or (n <= rows and self._fits(search, n, planned)))

    # -- trials ----------------------------------------------------------------------------------------------------

    def _require(self, search: _Search, value: int, planned: TrainOptions, remedy: str) -> None:
        if not self._fits(search, value, planned):
            raise UsageError(
                f"--tune-params: {search.name}={value} needs more memory than the limit of {self.limit / _MIB:.0f} MiB "
                f"(--mem-frac {self.options.mem_frac:g}); raise --mem-frac, or {remedy}"
            )

    def _fits(self, search: _Search, value: int, planned: TrainOptions) -> bool:
        candidate = dataclasses.replace(planned, **{search.name: value})  # type: ignore[arg-type]
        plan = make_plan(candidate, self.limit)
        expected = self.held + max(self._more(plan, phase) for phase in search.phases)
        absent = self._absent(plan, search)
        line = f"auto tune {search.name}={value}: planned {expected / _MIB:.0f} MiB"
        if expected > self.limit:
            logger.info("%s, which is above the limit", line)
            return False
        try:
            measured = search.work(candidate)  # peak bytes of the fullest rank; None if one ran out of memory
        finally:
            self.engine.run_on_all_ranks(trial.clean)
        if measured is None:
            logger.info("%s, but the trial ran out of memory", line)
            return False
        fits = measured + absent <= self.limit
        logger.info(
            "%s, measured %.0f MiB, %s",
            line,
            (measured + absent) / _MIB,
            "which fits" if fits else "which is above the limit",
        )
        return fits

    def _more(self, plan: MemoryPlan, name: str) -> int:
        """Return the planned bytes that a phase needs in addition to the memory that the process already uses."""
        phase = plan.phase(name)
        assert phase is not None, name
        return phase.total - phase.parts["process"] - phase.parts["weights"] - self._own_state(phase)

    def _absent(self, plan: MemoryPlan, search: _Search) -> int:
        """Return the planned bytes that a trial does not allocate. :meth:`_fits` adds them to the trial's measured peak.

        During a trial, only the actor is loaded. The bytes therefore include the other models that stay loaded during training,
        and the optimizer states of these models. A trial of training has no KV cache. For such a trial, the bytes also include
        the KV cache if the run keeps the cache during training.
        """
        phase = plan.phase("forward")
        assert phase is not None
        has_cache = "rollout" in search.phases
        kept = 0 if has_cache or self.options.drop_rollout_state else phase.parts["kv_cache"]
        return phase.parts["roles"] + phase.parts["optimizer"] - self._own_state(phase) + kept

    def _own_state(self, phase: Phase) -> int:
        """Return how many bytes of the optimizer states planned for ``phase`` are already allocated."""
        return min(self.states, phase.parts["optimizer"])

    def _generate(self, candidate: TrainOptions) -> int | None:
        """Generate sequences of maximum length on every replica. Return the peak memory in bytes; None if memory ran out."""
        sizes, longest = self._sizes(candidate), self._longest(candidate)
        replicas = sizes.layout.dp_size
        context = max(longest - _PROBED_TOKENS, 1)
        contexts = min(max(IDLE_PREFILL // context, 1), sizes.running)
        sampling = SamplingParams(max_new_tokens=_PROBED_TOKENS, ignore_eos=True)
        self.engine.set_max_running(sizes.running * replicas)
        self.engine.run_on_all_ranks(trial.begin)
        seeds = [list(range(first, sizes.running, contexts)) for first in range(contexts)]
        # One copy of each request per replica, so that each replica gets one.
        requests = [
            Request([index % 7] + [1] * (context - 1), sampling, own)
            for index, own in enumerate(seeds)
            for _ in range(replicas)
        ]
        try:
            for future in self.engine.submit(requests):
                future.result()
        except EngineError:
            if not any(self.engine.run_on_all_ranks(trial.recover)):
                raise
            if sizes.layout.tp_size > 1:
                raise EngineError(
                    "--tune-params: a rank ran out of memory, so the other ranks of the model cannot continue; "
                    "lower --mem-frac, or set --max-running-prompts, --batch-size and --mini-bs yourself"
                ) from None
            return None
        return max(self.engine.run_on_all_ranks(trial.peak))

    def _update(self, candidate: TrainOptions) -> int | None:
        """Compute gradients of microbatches of maximum size. Return the peak memory in bytes; None if memory ran out.

        If a step has several microbatches, two are enough, because the second one already accumulates gradients.
        """
        sizes = self._sizes(candidate)
        lengths, microbatches = sizes.microbatch(self._longest(candidate))
        rows = [_row(length, own) for length, own in zip(lengths, sizes.scored(lengths), strict=True)]
        rows = rows * min(microbatches, 2)
        peaks = self.engine.run_on_all_ranks(trial.rehearse, rows, self.loss_fn, len(lengths))
        measured = [peak for peak in peaks if peak is not None]
        return max(measured) if len(measured) == len(peaks) else None

    def _sizes(self, options: TrainOptions) -> RunSizes:
        return RunSizes(options, self.engine.config.device)

    def _longest(self, options: TrainOptions) -> int:
        return self._sizes(options).longest_row(self.engine.context_length)


def _remedy(longest: int) -> str:
    return (
        "lower --max-new-tokens, --max-prompt-tokens or --max-context-len (these options currently allow sequences of up to "
        f"{longest} tokens)"
    )


def _powers_of_two(most: int) -> Iterator[int]:
    for exponent in reversed(range(most.bit_length())):
        yield 1 << exponent


def _row(length: int, scored: int) -> TrainSequence:
    """Return a synthetic row with all per-token values that a policy loss may read."""
    zeros = [0.0] * length
    return TrainSequence(
        prompt_mask=[index < length - scored for index in range(length)],
        tokens=[1] * length,
        logprobs=zeros,
        advantages=[1.0] * length,
        ref_logprobs=zeros,
    )
