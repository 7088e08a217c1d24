"""Policy-gradient training with one model: GSPO, GRPO, and losses like them.

One step: prompts -> samples -> reward records -> rewards -> group advantages -> rows -> optimizer step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from areno.api.datasets import iter_prompt_batches
from areno.api.trainers.loop import StepOutcome, TrainingLoop
from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import RewardError
from areno.loss_fns.advantages import compute_group_advantages
from areno.observability import lifecycle
from areno.observability.samples import completions_to_log, log_completions, sample_records
from areno.rewards import RewardOutcome, RewardRunner
from areno.rewards.runner import OnError
from areno.types import PromptBatch, PromptItem, RewardRecord, RolloutSequence, SamplingParams, TrainSequence

logger = logging.getLogger("areno.api.trainers.policy_only.PolicyOnlyTrainer")


@dataclass(slots=True)
class Sample:
    """One completion on its way to a training row."""

    item: PromptItem
    prompt_index: int
    sample_index: int
    sequence: RolloutSequence
    record: RewardRecord
    reward: float = 0.0
    advantage: float = 0.0


class PolicyOnlyTrainer(TrainingLoop):
    """Rollout, reward, group advantage, policy step; see :class:`~areno.api.trainers.loop.TrainingLoop`."""

    logger = logger

    def prepare(self) -> None:
        """Start the reward workers, so that a broken reward file shows before the first rollout."""
        config = self.config
        self.sampling = SamplingParams(
            greedy=config.greedy,
            top_p=config.top_p,
            top_k=config.top_k,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            stop=list(config.stop) or None,
            stop_token_ids=list(config.stop_token_ids) or None,
            ignore_eos=config.ignore_eos,
        )
        self._log_limit = completions_to_log()
        path = config.reward_fn_path
        self._rewards = RewardRunner(
            None if path else self.reward_fn,
            path=path,
            timeout_s=config.reward_timeout_s,
            workers=config.reward_workers,
            on_error=cast(OnError, config.on_reward_error),
        )
        self._rewards.start()

    def cleanup(self) -> None:
        """End the reward workers."""
        if hasattr(self, "_rewards"):
            self._rewards.close()

    def batches(self, order: Sequence[int], start: int) -> Iterator[tuple[PromptBatch, int]]:
        """Tokenized prompt batches; over-long prompts are passed over and counted."""
        batches = iter_prompt_batches(
            self.dataset,
            self.instance.get_tokenizer(),
            batch_size=self.config.batch_size,
            max_prompt_tokens=self.config.max_prompt_tokens,
            order=order,
            start=start,
            disable_thinking=self.config.disable_thinking,
            source=str(self.config.dataset_path),
        )
        position = start
        for batch in batches:
            position += batch.scanned
            yield batch, position

    def run_step(self, batch: PromptBatch) -> StepOutcome:
        """One policy step."""
        epoch, step = self.state.epoch, self.state.step
        timings: dict[str, float] = {}
        with self.stop.interruptible():
            samples = self._timed("rollout", timings, self._rollout, batch)
            drawn = len(samples)
            samples = self._timed("reward", timings, self._reward, samples)
        rows = self._timed("advantage", timings, self._rows, samples)
        lifecycle.train_start(logger, epoch, step)
        stats = self._timed("train", timings, self.train, rows)
        lifecycle.train_end(logger, epoch, step)
        rewards = [sample.reward for sample in samples]
        stats |= self._rollout_stats(samples, drawn, timings)
        self.run_dir.append_samples(
            sample_records(step, [s.record for s in samples], rewards, [s.advantage for s in samples])
        )
        return StepOutcome(
            rows=rows,
            stats=stats,
            timings=timings,
            rewards=rewards,
            sample=_preview(samples[0]),
            skipped_long=batch.skipped_long,
        )

    def _timed(self, phase: str, timings: dict[str, float], work: Any, argument: Any) -> Any:
        self.display.phase(phase)
        began = time.perf_counter()
        result = work(argument)
        timings[phase] = time.perf_counter() - began
        return result

    def _rollout(self, batch: PromptBatch) -> list[Sample]:
        epoch, step, config = self.state.epoch, self.state.step, self.config
        if batch.skipped_long:
            logger.info(
                "skipped %d prompts of more than --max-prompt-tokens=%d tokens",
                batch.skipped_long,
                config.max_prompt_tokens,
            )
        lifecycle.rollout_start(logger, epoch, step)
        seeds = [
            [derive_seed(config.seed, step, prompt, sample) for sample in range(config.n_samples)]
            for prompt in range(len(batch.items))
        ]
        session = self.instance.rollout_session(
            sampling_params=self.sampling, max_running_prompts=config.running_sequences, proxy=False
        )
        with session:
            results = self.instance.rollout_token_batch(
                [item.input_tokens for item in batch.items], config.n_samples, self.sampling, seeds=seeds
            )
        lifecycle.rollout_end(logger, epoch, step)
        samples = [
            Sample(item, prompt, index, sequence, _reward_record(item, prompt, index, sequence))
            for prompt, (item, result) in enumerate(zip(batch.items, results, strict=True))
            for index, sequence in enumerate(result.sequences)
        ]
        if self._log_limit:
            log_completions(
                logger,
                [s.record for s in samples],
                prompt_tokens=[s.item.input_tokens for s in samples],
                decode=self.instance.get_tokenizer().decode,
                limit=self._log_limit,
            )
        return samples

    def _reward(self, samples: list[Sample]) -> list[Sample]:
        outcomes: list[RewardOutcome] = self._rewards.run([sample.record for sample in samples])
        kept = []
        for sample, outcome in zip(samples, outcomes, strict=True):
            if outcome.value is not None:
                sample.reward = outcome.value
                kept.append(sample)
        if not kept:
            raise RewardError(f"every reward of this step failed; the first error: {outcomes[0].error}")
        for outcome in outcomes:
            if outcome.error is not None:
                logger.warning("sample dropped: %s", outcome.error)
        epoch, step = self.state.epoch, self.state.step
        lifecycle.reward_mean(logger, epoch, step, sum(s.reward for s in kept) / len(kept))
        logprobs = [value for sample in kept for value in sample.sequence.resp_logprobs]
        lifecycle.rollout_logprob_mean(logger, epoch, step, sum(logprobs) / max(len(logprobs), 1))
        return kept

    def _rows(self, samples: list[Sample]) -> list[TrainSequence]:
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.prompt_index, []).append(sample)
        for members in groups.values():
            for sample, advantage in zip(members, compute_group_advantages([m.reward for m in members]), strict=True):
                sample.advantage = advantage
        eos = min(self.instance.backend.eos_token_ids(), default=0)
        temperature = 1.0 if self.sampling.greedy else self.sampling.temperature
        return [_train_row(sample, eos, temperature) for sample in samples]

    def _rollout_stats(self, samples: list[Sample], drawn: int, timings: dict[str, float]) -> dict[str, float]:
        rewards: dict[int, list[float]] = {}
        for sample in samples:
            rewards.setdefault(sample.prompt_index, []).append(sample.reward)
        tied = sum(min(group) == max(group) for group in rewards.values())
        tokens = sum(len(sample.sequence.resp_tokens) for sample in samples)
        return {
            "reward_mean": sum(s.reward for s in samples) / len(samples),
            "reward_errors": float(drawn - len(samples)),
            "zero_std_groups": tied / len(rewards),
            "truncated_ratio": sum(s.sequence.finish_reason == "length" for s in samples) / len(samples),
            "sampling_cut_mass": sum(s.sequence.cut_mass for s in samples) / len(samples),
            "tokens_per_second": tokens / max(timings["rollout"], 1e-9),
            "reward_score_time_s": timings["reward"],
        }


def _reward_record(item: PromptItem, prompt_index: int, sample_index: int, sequence: RolloutSequence) -> RewardRecord:
    return RewardRecord(
        prompt=item.prompt,
        completion=sequence.text,
        rendered_completion=sequence.text,
        final_answer=sequence.text,
        answer=item.solutions if item.solutions is not None else item.record.get("answer"),
        tokens=sequence.resp_tokens,
        logprobs=sequence.resp_logprobs,
        loss_mask=[True] * len(sequence.resp_tokens),
        source_record=item.record,
        metadata={
            "prompt_index": prompt_index,
            "sample_index": sample_index,
            "finish_reason": sequence.finish_reason,
        },
    )


def _train_row(sample: Sample, eos_token_id: int, temperature: float) -> TrainSequence:
    prompt, response = sample.item.input_tokens, sample.sequence.resp_tokens
    return TrainSequence(
        prompt_mask=[True] * len(prompt) + [False] * len(response),
        tokens=[*prompt, *response],
        logprobs=[0.0] * len(prompt) + sample.sequence.resp_logprobs,
        advantages=[0.0] * len(prompt) + [sample.advantage] * len(response),
        reward=sample.reward,
        eos_token_id=eos_token_id,
        temperature=temperature,
        group=sample.prompt_index,
        truncated=sample.sequence.finish_reason == "length",
    )


def _preview(sample: Sample) -> str:
    return f"{sample.item.prompt} → {sample.record.completion} (reward {sample.reward:g})"
