"""Evaluates a policy on held-out prompts, during training and in ``areno eval``.

A completion's seed depends only on the run's seed, the prompt index and the sample index. Evaluations of different
checkpoints can therefore be compared sample by sample. Training uses separate seeds, so an evaluation does not affect training.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from areno.api.datasets import iter_prompt_batches
from areno.api.records import Sample
from areno.api.sampler import Sampler
from areno.config.all_train_options import TrainOptions
from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import RewardError
from areno.types import PARTS, PromptBatch, RewardRecord, SamplingParams, part_columns, tightest

RewardSource = Callable[[list[RewardRecord], list[list[int]]], Sequence[float | None]]
"""Takes reward records and, per record, the token ids of prompt and response. Returns rewards; None for a failed reward."""


AnswerSource = Callable[[PromptBatch, Sequence[int]], list[Sample | None]]
"""Generates the answers of an evaluation.

The arguments are a batch of prompts and, for each prompt, its index among all prompts of the evaluation. The result lists the
answers in prompt order, with None for a missing answer.
"""

OnScored = Callable[[list[RewardRecord], list[float | None]], None]
"""Receives the records of an evaluation batch and their rewards. A failed reward is None."""

# Second part of every seed of an evaluation; in training it is the step, which never reaches this number.
EVALUATION_STREAM = 0x6576616C
# Samples per batch, as a multiple of the concurrent samples. Larger batches keep the engine busier, but hold more tokens.
_WAVES = 4


def rollout_sampling(options: TrainOptions) -> SamplingParams:
    """Return the sampling parameters for training."""
    return SamplingParams(
        greedy=options.greedy,
        top_p=options.top_p,
        top_k=options.top_k,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        stop=list(options.stop) or None,
        stop_token_ids=list(options.stop_token_ids) or None,
        ignore_eos=options.ignore_eos,
        max_context_len=options.max_context_len,
    )


def evaluation_sampling(options: TrainOptions) -> SamplingParams:
    """Return the sampling parameters for evaluations.

    Only the temperature and greedy decoding may differ from training. If ``--eval-temperature`` is set, answers are
    sampled at this temperature. Otherwise, decoding is greedy if ``--greedy`` is set or there is one sample per
    prompt. In all other cases, answers are sampled at ``--temperature``.
    """
    temperature = options.eval_temperature
    greedy = temperature is None and (options.greedy or options.eval_n_samples == 1)
    return replace(rollout_sampling(options), greedy=greedy, temperature=temperature or options.temperature)


def evaluate_prompts(
    trainer: Sampler,
    rows: Sequence[Mapping[str, Any]],
    rewards: RewardSource,
    *,
    sampling: SamplingParams,
    n_samples: int,
    max_prompt_tokens: int,
    max_running: int,
    seed: int,
    disable_thinking: bool = False,
    source: str = "",
    on_scored: OnScored | None = None,
    answers: AnswerSource | None = None,
) -> dict[str, float]:
    """Generate ``n_samples`` answers to each prompt and report their rewards.

    Args:
        trainer: initialized trainer; its policy generates the answers.
        rows: data rows with a ``prompt``; the order of the rows determines the seeds.
        rewards: function that scores the answers of one batch.
        sampling: sampling parameters; see :func:`evaluation_sampling`.
        n_samples: number of answers per prompt.
        max_prompt_tokens: maximum number of tokens of a prompt. Longer prompts are skipped and counted, and so are
            prompts that leave no room for an answer in the context.
        max_running: maximum number of answers generated concurrently.
        seed: seed of the evaluation. Equal seeds, rows and policies give equal answers.
        source: name of the data in error messages.
        on_scored: function that is called with the records and rewards of each batch.
        answers: function that generates the answers, for example by running an agent; None samples completions of the policy.

    Returns:
        These metrics: ``rewards_mean``, ``rewards_std``, ``reward_parts/NAME`` (mean of the reward part NAME),
        ``accuracy`` (fraction of rewards above 0), ``pass@k`` (for k = 1, 2, 4, ... and ``n_samples``),
        ``response_len_mean`` (in tokens), ``truncated_ratio``, ``num_prompts``, ``num_samples``, ``skipped_long``,
        ``reward_errors`` and ``eval_time_s``.
        ``rewards_*``, ``reward_parts/NAME``, ``accuracy`` and ``pass@k`` exclude answers whose reward could not be
        computed.

    Raises:
        RewardError: no answer got a reward, or ``rewards`` returned a wrong number of rewards or a reward that is not
            finite.
    """
    if not len(rows) or n_samples < 1 or max_running < 1:
        raise ValueError(
            "an evaluation needs at least one row, and n_samples and max_running must be at least 1; "
            f"got rows={len(rows)}, n_samples={n_samples}, max_running={max_running}"
        )
    batches = iter_prompt_batches(
        rows,
        trainer.get_tokenizer(),
        batch_size=eval_batch_size(max_running, n_samples),
        max_prompt_tokens=max_prompt_tokens,
        # The prompts of an agent are not known in advance.
        context_limit=tightest(sampling.max_context_len, trainer.model_context_len()) if answers is None else None,
        disable_thinking=disable_thinking,
        source=source,
    )
    if answers is None:
        policy = partial(
            _completions, trainer, sampling=sampling, n_samples=n_samples, max_running=max_running, seed=seed
        )
    with trainer.clock.paused():
        return measure(batches, answers or policy, rewards, n_samples, on_scored)


def eval_batch_size(max_running: int, n_samples: int) -> int:
    """Return the number of prompts per batch of an evaluation."""
    return max(1, _WAVES * max_running // n_samples)


def measure(
    batches: Iterable[PromptBatch],
    answers: AnswerSource,
    rewards: RewardSource,
    n_samples: int,
    on_scored: OnScored | None,
) -> dict[str, float]:
    """Generate answers batch by batch, score them, and return the metrics of :func:`evaluate_prompts`."""
    start, totals = time.perf_counter(), _EvalTotals(n_samples)
    for batch in batches:
        prompts = range(totals.num_prompts, totals.num_prompts + len(batch.items))
        sampled = answers(batch, prompts)
        present = [answer for answer in sampled if answer is not None]
        records = [answer.record for answer in present]
        scores = _checked(rewards(records, [answer.tokens for answer in present]), len(records)) if present else []
        totals.add(batch, sampled, scores)
        if on_scored is not None:
            on_scored(records, scores)
    return totals.metrics() | {"eval_time_s": time.perf_counter() - start}


def _completions(
    trainer: Sampler,
    batch: PromptBatch,
    prompts: Sequence[int],
    sampling: SamplingParams,
    n_samples: int,
    max_running: int,
    seed: int,
) -> list[Sample | None]:
    seeds = [
        [derive_seed(seed, EVALUATION_STREAM, prompt, sample) for sample in range(n_samples)] for prompt in prompts
    ]
    trainer.begin_rollout_session(max_running)
    try:
        token_rows = [item.input_tokens for item in batch.items]
        results = trainer.rollout_token_batch(token_rows, n_samples, sampling, seeds=seeds)
    finally:
        trainer.end_rollout_session()
    return [
        Sample.of_completion(item, prompt, sample, sequence)
        for item, prompt, result in zip(batch.items, prompts, results, strict=True)
        for sample, sequence in enumerate(result.sequences)
    ]


def _checked(scores: Sequence[float | None], expected: int) -> list[float | None]:
    if len(scores) != expected:
        raise RewardError(
            f"the reward function returned {len(scores)} rewards for {expected} answers; return one reward per answer"
        )
    non_finite = [score for score in scores if score is not None and not math.isfinite(score)]
    if non_finite:
        raise RewardError(
            f"the reward function returned {non_finite[0]}; return a finite number, or None for a reward that failed"
        )
    return list(scores)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that k of n samples, drawn without replacement, include a correct sample.

    With c = ``correct``, the probability is 1 - C(n - c, k) / C(n, k). Its mean over prompts is the unbiased estimator
    of pass@k (Chen et al. 2021, arXiv:2107.03374, equation 1).
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= correct <= n, got n={n}, correct={correct}, k={k}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def reported_ks(n_samples: int) -> list[int]:
    """Return the values of k for pass@k: the powers of two below ``n_samples``, and ``n_samples`` itself."""
    return [*(2**power for power in range((n_samples - 1).bit_length())), n_samples]


@dataclass(slots=True)
class _EvalTotals:
    n_samples: int
    num_prompts: int = 0
    skipped_long: int = 0
    lengths: list[int | None] = field(default_factory=list)
    truncated: int = 0
    rewards: list[float] = field(default_factory=list)
    # per prompt: the number of scored answers, and of those with a reward above 0
    outcomes: list[tuple[int, int]] = field(default_factory=list)

    def add(self, batch: PromptBatch, answers: Sequence[Sample | None], scores: Sequence[float | None]) -> None:
        """Add the answers of one batch, in prompt order. ``scores`` has no entries for answers that are None."""
        self.num_prompts += len(batch.items)
        self.skipped_long += batch.skipped_long
        present = [answer for answer in answers if answer is not None]
        # A server that returns no tokens may report their number; otherwise the length is None.
        self.lengths += [each.record.metadata.get("response_len", len(each.sequence.resp_tokens)) for each in present]
        self.truncated += sum(answer.sequence.finish_reason == "length" for answer in present)
        remaining = iter(scores)
        aligned = [None if answer is None else next(remaining) for answer in answers]
        for start in range(0, len(aligned), self.n_samples):
            valid = [score for score in aligned[start : start + self.n_samples] if score is not None]
            self.rewards += valid
            self.outcomes.append((len(valid), sum(score > 0 for score in valid)))

    def metrics(self) -> dict[str, float]:
        if not self.lengths:
            raise RewardError(
                f"the evaluation has no answers: all samples of all {self.num_prompts} prompts failed or were dropped, and "
                f"{self.skipped_long} other prompts were skipped because they are too long; see the log for the errors"
            )
        if not self.rewards:
            raise RewardError(
                f"the rewards of all {len(self.lengths)} answers of the evaluation failed; set --on-reward-error stop to "
                "see the error"
            )
        num_samples = len(self.lengths)
        known = [length for length in self.lengths if length is not None]
        return {
            "rewards_mean": statistics.fmean(self.rewards),
            "rewards_std": statistics.pstdev(self.rewards),
            **{name: statistics.fmean(part) for name, part in part_columns(self.rewards, PARTS).items()},
            "accuracy": sum(reward > 0 for reward in self.rewards) / len(self.rewards),
            **self._pass_at_k(),
            **({"response_len_mean": statistics.fmean(known)} if known else {}),
            "truncated_ratio": self.truncated / num_samples,
            "num_prompts": self.num_prompts,
            "num_samples": num_samples,
            "skipped_long": self.skipped_long,
            "reward_errors": num_samples - len(self.rewards),
        }

    def _pass_at_k(self) -> dict[str, float]:
        """Return one metric ``pass@k`` for each k of :func:`reported_ks`.

        The metric is the mean over the prompts with at least k scored answers. If there is no such prompt for a k, the result
        has no entry ``pass@k``.
        """
        metrics = {}
        for k in reported_ks(self.n_samples):
            values = [pass_at_k(n, correct, k) for n, correct in self.outcomes if n >= k]
            if values:
                metrics[f"pass@{k}"] = statistics.fmean(values)
        return metrics
