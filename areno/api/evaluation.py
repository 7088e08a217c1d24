"""Measuring a policy on prompts that it is not trained on: generate, reward, report; training and ``areno eval`` alike.

Special here: a sample's seed depends on the run's seed, its prompt and its number alone, in a stream of its own. So
evaluations of different checkpoints can be compared sample by sample, and none of them changes what training draws.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from areno.api.datasets import iter_prompt_batches
from areno.api.records import reward_record
from areno.api.sampler import Sampler
from areno.config.train_options import TrainOptions
from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import RewardError
from areno.types import PARTS, PromptBatch, RewardRecord, RolloutSequence, SamplingParams, part_columns, tightest

RewardSource = Callable[[list[RewardRecord], list[list[int]]], Sequence[float | None]]
"""Scores records, given with the token ids of prompt and response; None where a score failed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: what the reward function sees, the token ids that a reward model reads, and what the policy said."""

    record: RewardRecord
    tokens: list[int]
    sequence: RolloutSequence

    @property
    def length(self) -> int:
        """Tokens of the answer; where a server keeps them to itself, as it has counted them."""
        return int(self.record.metadata.get("response_len", len(self.sequence.resp_tokens)))


AnswerSource = Callable[[PromptBatch, Sequence[int]], list[Answer | None]]
"""Answers the prompts of one piece, with their numbers in the evaluation; prompt by prompt, None where there is none."""

OnScored = Callable[[list[RewardRecord], list[float | None]], None]
"""Receives the records of one piece of an evaluation with their rewards, None where a reward failed."""

# Second part of every seed, where training has the step: a number that no run reaches.
EVALUATION_STREAM = 0x6576616C
# Samples generated in one piece, as a multiple of what runs at the same time: few slots idle at the end of a piece, and
# thousands of prompts never lie in memory with all their tokens.
_WAVES = 4


def rollout_sampling(options: TrainOptions) -> SamplingParams:
    """How a run samples its training rollouts."""
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
    """How a run samples its evaluations: as in training, but at ``--eval-temperature``.

    Without that option, one sample per prompt is the most likely one (greedy), and several are drawn at
    ``--temperature``.
    """
    own = options.eval_temperature
    greedy = own is None and (options.greedy or options.eval_n_samples == 1)
    return replace(rollout_sampling(options), greedy=greedy, temperature=own or options.temperature)


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
        trainer: initialized; its policy generates.
        rows: data rows with a ``prompt``, in the order that seeds count.
        rewards: scores the answers of one piece at a time.
        sampling: generation controls; see :func:`evaluation_sampling`.
        n_samples: answers per prompt.
        max_prompt_tokens: longer prompts are passed over and counted, as are those that leave the context no room.
        max_running: most answers generated at the same time.
        seed: fixes every draw; the same seed, rows and policy give the same answers.
        source: what error messages call the data.
        on_scored: sees every answer with its reward, piece by piece.
        answers: answers in place of the policy's completions, such as those of an agent.

    Returns:
        ``rewards_mean, rewards_std``, of a reward in parts their means as ``reward_parts/NAME``, ``accuracy`` (share of
        rewards above 0), ``pass@k`` for k = 1, 2, 4, ... and
        ``n_samples``, ``response_len_mean`` in tokens, ``truncated_ratio, num_prompts, num_samples, skipped_long,
        reward_errors, eval_time_s``. Answers without a reward count in the lengths only.

    Raises:
        RewardError: no answer at all got a reward, or ``rewards`` gave a wrong number of them, or one not finite.
    """
    if not len(rows) or n_samples < 1 or max_running < 1:
        raise ValueError(
            "an evaluation needs at least one row, one sample per prompt and one running answer, "
            f"got rows={len(rows)}, n_samples={n_samples}, max_running={max_running}"
        )
    pieces = iter_prompt_batches(
        rows,
        trainer.get_tokenizer(),
        batch_size=prompts_of_piece(max_running, n_samples),
        max_prompt_tokens=max_prompt_tokens,
        # What an agent makes of a row is not known before it asks.
        context_limit=tightest(sampling.max_context_len, trainer.model_context_len()) if answers is None else None,
        disable_thinking=disable_thinking,
        source=source,
    )
    if answers is None:
        policy = partial(
            _completions, trainer, sampling=sampling, n_samples=n_samples, max_running=max_running, seed=seed
        )
    metrics = measure(pieces, answers or policy, rewards, n_samples, on_scored)
    trainer.clock.close_step()  # so that the next training step does not count this generation as its own
    return metrics


def prompts_of_piece(max_running: int, n_samples: int) -> int:
    """Prompts that are answered before the next ones are looked at."""
    return max(1, _WAVES * max_running // n_samples)


def measure(
    pieces: Iterable[PromptBatch],
    answers: AnswerSource,
    rewards: RewardSource,
    n_samples: int,
    on_scored: OnScored | None,
) -> dict[str, float]:
    """Answer prompts piece by piece, reward the answers, and report; see :func:`evaluate_prompts`."""
    began, tally = time.perf_counter(), _Tally(n_samples)
    for piece in pieces:
        prompts = range(tally.num_prompts, tally.num_prompts + len(piece.items))
        drawn = answers(piece, prompts)
        given = [answer for answer in drawn if answer is not None]
        records = [answer.record for answer in given]
        scores = _checked(rewards(records, [answer.tokens for answer in given]), len(records)) if given else []
        tally.add(piece, drawn, scores)
        if on_scored is not None:
            on_scored(records, scores)
    return tally.metrics() | {"eval_time_s": time.perf_counter() - began}


def _completions(
    trainer: Sampler,
    piece: PromptBatch,
    prompts: Sequence[int],
    sampling: SamplingParams,
    n_samples: int,
    max_running: int,
    seed: int,
) -> list[Answer | None]:
    """Answers to the prompts of a piece, prompt by prompt."""
    seeds = [
        [derive_seed(seed, EVALUATION_STREAM, prompt, sample) for sample in range(n_samples)] for prompt in prompts
    ]
    trainer.begin_rollout_session(max_running)
    try:
        token_rows = [item.input_tokens for item in piece.items]
        results = trainer.rollout_token_batch(token_rows, n_samples, sampling, seeds=seeds)
    finally:
        trainer.end_rollout_session()
    return [
        Answer(reward_record(item, prompt, sample, sequence), [*item.input_tokens, *sequence.resp_tokens], sequence)
        for item, prompt, result in zip(piece.items, prompts, results, strict=True)
        for sample, sequence in enumerate(result.sequences)
    ]


def _checked(scores: Sequence[float | None], expected: int) -> list[float | None]:
    if len(scores) != expected:
        raise RewardError(f"the reward source gave {len(scores)} rewards for {expected} answers; it must give one each")
    broken = [score for score in scores if score is not None and not math.isfinite(score)]
    if broken:
        raise RewardError(f"the reward source gave {broken[0]}; give a finite number, or None for a reward that failed")
    return list(scores)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold a correct one: 1 - C(n - c, k) / C(n, k).

    Over prompts its mean is the unbiased estimate of pass@k (Chen et al. 2021, arXiv:2107.03374, equation 1).
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= correct <= n, got n={n}, correct={correct}, k={k}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def reported_ks(n_samples: int) -> list[int]:
    """The k of which pass@k is reported: the powers of two below ``n_samples``, and ``n_samples`` itself."""
    return [*(2**power for power in range((n_samples - 1).bit_length())), n_samples]


@dataclass(slots=True)
class _Tally:
    """Sums over the pieces of an evaluation."""

    n_samples: int
    num_prompts: int = 0
    skipped_long: int = 0
    lengths: list[int] = field(default_factory=list)
    truncated: int = 0
    rewards: list[float] = field(default_factory=list)
    outcomes: list[tuple[int, int]] = field(default_factory=list)  # of each prompt: rewarded answers, those above 0

    def add(self, piece: PromptBatch, answers: Sequence[Answer | None], scores: Sequence[float | None]) -> None:
        """Count one piece; answers lie prompt by prompt, and scores are those of the answers that there are."""
        self.num_prompts += len(piece.items)
        self.skipped_long += piece.skipped_long
        given = [answer for answer in answers if answer is not None]
        self.lengths += [answer.length for answer in given]
        self.truncated += sum(answer.sequence.finish_reason == "length" for answer in given)
        left = iter(scores)
        found = [None if answer is None else next(left) for answer in answers]
        for begin in range(0, len(found), self.n_samples):
            valid = [score for score in found[begin : begin + self.n_samples] if score is not None]
            self.rewards += valid
            self.outcomes.append((len(valid), sum(score > 0 for score in valid)))

    def metrics(self) -> dict[str, float]:
        """The metrics by short name."""
        if not self.rewards:
            raise RewardError(
                f"every reward of the evaluation failed ({len(self.lengths)} answers); --on-reward-error stop shows the error"
            )
        drawn = len(self.lengths)
        return {
            "rewards_mean": statistics.fmean(self.rewards),
            "rewards_std": statistics.pstdev(self.rewards),
            **{name: statistics.fmean(part) for name, part in part_columns(self.rewards, PARTS).items()},
            "accuracy": sum(reward > 0 for reward in self.rewards) / len(self.rewards),
            **self._pass_at_k(),
            "response_len_mean": sum(self.lengths) / drawn,
            "truncated_ratio": self.truncated / drawn,
            "num_prompts": self.num_prompts,
            "num_samples": drawn,
            "skipped_long": self.skipped_long,
            "reward_errors": drawn - len(self.rewards),
        }

    def _pass_at_k(self) -> dict[str, float]:
        """Over the prompts that have at least k rewarded answers; a k without any is left out."""
        found = {}
        for k in reported_ks(self.n_samples):
            values = [pass_at_k(n, correct, k) for n, correct in self.outcomes if n >= k]
            if values:
                found[f"pass@{k}"] = statistics.fmean(values)
        return found
