"""Base class of the trainers with rollouts: prompts, rollout, rewards, optimizer steps, and evaluation.

The stages of a step: prompts -> samples -> rewards -> rows with the inputs of the loss -> optimizer steps. Subclasses
supply the settings of the last two stages.

Before a training step updates weights, a stop signal may interrupt the step, because the work until then can be repeated.
During and after the update, only a second signal interrupts the step. A training step that an error interrupts is not saved.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from areno.api.datasets import iter_prompt_batches, prompt_limit
from areno.api.evaluation import (
    EVALUATION_STREAM,
    AnswerSource,
    OnScored,
    evaluate_prompts,
    evaluation_sampling,
    rollout_sampling,
)
from areno.api.records import Sample
from areno.api.rewards import reward_runner
from areno.api.trainers.agents import AgentRollouts
from areno.api.trainers.base import DatasetTrainer
from areno.api.trainers.samples import REWARD, rows_of
from areno.api.trainers.source import SampleSource
from areno.config.reward_weights import part_weights
from areno.engine.backend import ACTOR
from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import EngineError, RewardError
from areno.loss_fns.loss_interface import knobs_of
from areno.loss_fns.shaping import Credits, RewardShaping, trained_values
from areno.observability import log_lines
from areno.observability.samples import (
    EvalSamples,
    Trajectory,
    completions_to_log,
    log_completions,
    log_trajectory,
    observe,
    row_segments,
    sample_records,
)
from areno.observability.scalars import summary_statistics
from areno.observability.screen import ShownSample
from areno.rewards import RewardOutcome, RewardRunner
from areno.rewards.runner import describe_record
from areno.rollouts.conversation.trajectory_rows import TrajectoryRow, known_roles
from areno.serving.token_text import TokenTexts
from areno.training.checkpoints import rollout_state
from areno.training.loop import PlannedStep
from areno.training.objectives.passes import Learner
from areno.training.objectives.policy import PolicyObjective, PolicySettings, Prepared, Stage
from areno.training.reporter import StepOutcome
from areno.types import ModelRole, PromptBatch, RewardRecord, TokenRecord, TrainSequence


class RolloutTrainer(DatasetTrainer):
    """Base class of the trainers with rollouts. ``role`` is what log lines call the policy: ``policy`` or ``actor``."""

    role: ClassVar[log_lines.Role] = "policy"
    best_metric = "rewards_mean"
    best_is_higher = True
    _unused_samples: Any = None
    _on_scored: OnScored | None = None

    def roles(self) -> list[ModelRole]:
        """Return the auxiliary models that the algorithm needs, without the reward model of ``--reward-ckpt``."""
        return []

    @abstractmethod
    def shaping(self) -> RewardShaping:
        """Return the settings for computing advantages from rewards."""

    def learners(self) -> list[Learner]:
        """Return one learner per model to train, in training order."""
        return [Learner(self.role, lambda rows: self.train(rows), **self.passes)]

    def credits(self, samples: list[Sample], rows: list[list[TrainSequence]]) -> Credits | None:
        """Return one reward per segment of tokens, such as per turn. Return None to use one reward per row."""
        return None

    def row_statistics(self, prepared: Prepared) -> dict[str, float]:
        """Return the statistics of a step's rows."""
        if self.config.kl_reward_coef == 0:
            return {}
        return summary_statistics("kl_reward", prepared.populations["kl_rewards"].tolist())

    def update_statistics(self, updates: Iterator[tuple[str, dict[str, float] | None]]) -> dict[str, float]:
        """Run the updates of a step, and merge their statistics into one dictionary.

        ``updates`` is the generator of :meth:`PolicyObjective.updates`. It yields pairs of role and statistics, and runs the
        updates of a role just before it yields the role's pair.
        """
        return {name: value for _, stats in updates for name, value in (stats or {}).items()}

    @property
    def reward_options(self) -> dict[str, Any]:
        """Settings for :meth:`shaping`: the KL reward, and the weights of reward parts."""
        config = self.config
        weights = part_weights(config.reward_weights) if config.reward_normalize_parts else None
        return {"kl_ctl": config.kl_reward_coef, "kl_estimator": config.kl_reward_type, "part_weights": weights}

    @property
    def passes(self) -> dict[str, int]:
        """Arguments of a :class:`Learner`: the number of passes over a step's rows, and the number of minibatches per pass."""
        return {"passes": self.config.update_epochs, "minibatches": self.config.update_minibatches}

    def load_models(self) -> None:
        """Load the auxiliary models."""
        reward = self.config.reward_ckpt
        self.load_roles([*self.roles(), *([ModelRole("reward", reward, False)] if reward else [])])

    def load_roles(self, roles: Sequence[ModelRole]) -> None:
        """Load models in addition to the policy."""
        for role in roles:
            log_lines.role_init_start(self.logger, role.name, role.trainable, role.path)
            self.backend.ensure_roles({role.name: role}, self.resumed_from)
            log_lines.role_init_end(self.logger, role.name)

    def reference_role(self) -> ModelRole:
        """Return the reference model of the KL divergence, loaded from ``--ref-ckpt`` or, by default, ``--ckpt``."""
        return ModelRole("ref", str(self.config.ref_ckpt or self.config.ckpt), False)

    def prepare(self) -> None:
        """Prepare the steps and start the reward workers. An invalid reward file raises an error before the first rollout."""
        config = self.config
        self.prepare_updates()
        self.keep_rollouts(config.save_rollouts)
        self.sampling = rollout_sampling(config)
        self._log_limit = completions_to_log()
        self._drawn_stats: dict[str, float] = {}
        self._agents = AgentRollouts(config, self.instance, self.logger) if config.agent_fn else None
        self._runner: RewardRunner | None = None
        if not config.reward_ckpt and config.workflow is None:
            self._runner = reward_runner(config, None if config.reward_fn_path else self.reward_fn)
            self._runner.start()
        self._source = SampleSource(config, self.instance, self.sampling, self.state.step, self.logger)
        self._source.load_state(self._unused_samples)

    def prepare_updates(self) -> None:
        """Create the :class:`PolicyObjective`, which computes advantages and trains the models on the rows of a step."""
        config = self.config
        self._texts = TokenTexts(self.instance.get_tokenizer())
        self._warned_minibatches = False
        self._seconds: dict[str, float] = {}
        roles = {role.name for role in self.roles()}
        knobs = knobs_of(self.loss_fn)
        scores = {("ref", "ref_logprobs"): "ref" in roles}
        scores |= {(ACTOR, "prox_logprobs"): getattr(knobs, "needs_proximal", False)}
        settings = PolicySettings(
            shaping=self.shaping(),
            scores=[score for score, needed in scores.items() if needed],
            m2_threshold=getattr(knobs, "m2_threshold", None),
            critic="critic" if "critic" in roles else None,
            reward_path=config.reward_ckpt,
            rows_at_once=lambda *_: config.score_micro_bs,
        )
        parts = (self.instance.backend, settings, self.learners())
        self.objective = PolicyObjective(*parts, seed=config.seed, order="prompts", around=self._around)

    def cleanup(self) -> None:
        """Stop the reward workers and the sample source."""
        for name in ("_source", "_runner"):
            if (part := getattr(self, name, None)) is not None:
                part.close()

    def rollout_state(self) -> Any:
        """Return the samples that have not been used for training yet."""
        source = getattr(self, "_source", None)  # a run may end before the source is created
        return self._unused_samples if source is None else source.export_state()

    def load_part_states(self, parts: dict[str, Any], checkpoint: Path) -> None:
        """Load the samples in a checkpoint that have not been used for training yet."""
        self._unused_samples = rollout_state(checkpoint)

    def looked_ahead(self, planned: Iterator[PlannedStep]) -> Iterator[PlannedStep]:
        """Yield the steps in ``planned``. With ``--rollout async``, generate the samples of later steps while a step trains."""
        return self._source.steps(planned)

    def batches(self, order: Sequence[int], start: int) -> Iterator[tuple[PromptBatch, int]]:
        """Yield tokenized prompt batches. Overlong prompts are skipped and counted."""
        batches = iter_prompt_batches(
            self.dataset,
            self.instance.get_tokenizer(),
            batch_size=self.config.batch_size,
            max_prompt_tokens=self.config.max_prompt_tokens,
            context_limit=self._prompt_context,
            order=order,
            start=start,
            disable_thinking=self.config.disable_thinking,
            source=str(self.config.dataset_path),
        )
        position = start
        for batch in batches:
            position += batch.scanned
            yield batch, position

    @property
    def _prompt_context(self) -> int | None:
        """Context limit beyond which prompts are skipped. None if an agent runs, because the agent writes its own prompts."""
        return self.context_limit if self._agents is None else None

    def run_step(self, batch: PromptBatch) -> StepOutcome:
        """Run one step."""
        timings: dict[str, float] = {}
        with self.stop.interruptible():
            drawn = self._timed("rollout", timings, self._rollout, batch)
            samples = self._timed("reward", timings, self._reward, drawn)
            rows, stats = self._timed("advantage", timings, self.make_rows, samples)
        by_sample = rows_of(samples, rows)
        rewards = [sample.reward for sample in samples]
        if by_sample is not None:
            observe([sample.prompt_index for sample in samples], rewards, by_sample)
            self.save_rows(rows, [number for number, of_sample in enumerate(by_sample) for _ in of_sample])
        stats = self._timed("train", timings, self.update, rows) | stats
        stats |= self._source.complete(self.state.step)
        stats |= self._rollout_stats(samples, drawn, timings)
        self._write_samples(samples, by_sample)
        return StepOutcome(
            rows=rows,
            groups=[sample.prompt_index for sample in samples],
            stats=stats,
            timings=timings,
            rewards=rewards,
            sample=ShownSample(samples[0].item.prompt, samples[0].record.completion, samples[0].reward),
            skipped_long=batch.skipped_long,
        )

    def _timed(self, phase: str, timings: dict[str, float], work: Any, argument: Any) -> Any:
        self.display.phase(phase)
        start = time.perf_counter()
        with self.timed(phase):
            result = work(argument)
        timings[phase] = time.perf_counter() - start
        return result

    def _write_samples(self, samples: list[Sample], rows: list[list[TrainSequence]] | None) -> None:
        """Write to the run directory the samples that :func:`sample_records` selects."""
        computed = self.token_records()
        trajectories: list[Trajectory] | None = None
        if rows is not None:
            trajectories = [
                partial(self._segments, sample.rows, sample_rows, computed)
                for sample, sample_rows in zip(samples, rows, strict=True)
            ]
        self.run_dir.append_samples(
            sample_records(
                self.state.step,
                [sample.record for sample in samples],
                [sample.reward for sample in samples],
                [sample.advantage for sample in samples],
                trajectories=trajectories,
            )
        )

    def _segments(
        self, rows: Sequence[TrajectoryRow], trained: Sequence[TrainSequence], computed: Mapping[int, TokenRecord]
    ) -> list[list[dict[str, Any]]]:
        return [
            row_segments(trained_as, self._texts, known_roles(row), row.turns, computed.get(trained_as.observed))
            for row, trained_as in zip(rows, trained, strict=True)
        ]

    def _rollout(self, batch: PromptBatch) -> list[Sample]:
        epoch, step, config = self.state.epoch, self.state.step, self.config
        if batch.skipped_long:
            _, bound = prompt_limit(config.max_prompt_tokens, self._prompt_context)
            self.logger.info("skipped %d prompts longer than %s", batch.skipped_long, bound)
        log_lines.rollout_start(self.logger, epoch, step, self.role)
        if self._agents is None:
            samples, self._drawn_stats = self._source.draw(batch, step)
        else:
            seed = derive_seed(config.seed, step)
            samples, self._drawn_stats = self._agents.draw(batch, config.n_samples, self.sampling, seed)
        log_lines.rollout_end(self.logger, epoch, step, self.role)
        if self._log_limit:
            self._log_samples(samples[: self._log_limit])
        return samples

    def _log_samples(self, samples: list[Sample]) -> None:
        decode = self.instance.get_tokenizer().decode
        if self._agents is not None:
            for sample in samples:
                log_trajectory(self.logger, sample.record, rows=sample.rows, decode=decode)
            return
        log_completions(
            self.logger,
            [sample.record for sample in samples],
            prompt_tokens=[sample.item.input_tokens for sample in samples],
            decode=decode,
        )

    def _rollout_stats(self, samples: list[Sample], drawn: list[Sample], timings: dict[str, float]) -> dict[str, float]:
        rewards: dict[int, list[float]] = {}
        for sample in samples:
            rewards.setdefault(sample.prompt_index, []).append(sample.reward)
        tied = sum(min(group) == max(group) for group in rewards.values())
        tokens = sum(len(sample.sequence.resp_tokens) for sample in drawn)
        empty = sum(not sample.rows for sample in drawn)
        stats = {
            "reward_mean": sum(s.reward for s in samples) / len(samples),
            "reward_errors": float(len(drawn) - empty - len(samples)),
            "empty_responses": float(empty),
            "zero_std_groups": tied / len(rewards),
            "truncated_ratio": sum(s.sequence.finish_reason == "length" for s in samples) / len(samples),
            "tokens_per_second": tokens / max(timings["rollout"], 1e-9),
            "reward_score_time_s": timings["reward"],
        }
        cut_mass = sum(s.sequence.cut_mass for s in samples) / len(samples)
        if not math.isnan(cut_mass):  # NaN: unknown
            stats["sampling_cut_mass"] = cut_mass
        if self.config.reward_ckpt:
            stats |= summary_statistics("reward_model_raw_reward", [s.reward for s in samples])
        return stats | self._drawn_stats

    def _reward(self, drawn: list[Sample]) -> list[Sample]:
        """Set the rewards, and drop samples without a reward or without a token to train on."""
        samples = [sample for sample in drawn if sample.rows]
        if not samples:
            raise EngineError(f"step {self.state.step}: none of the {len(drawn)} responses has a token to train on")
        outcomes = self.score([sample.record for sample in samples], [sample.tokens for sample in samples])
        rewarded = []
        for sample, outcome in zip(samples, outcomes, strict=True):
            if outcome.value is not None:
                sample.reward = outcome.value
                rewarded.append(sample)
        if not rewarded:
            raise RewardError(f"all rewards of this step failed; first error: {outcomes[0].error}")
        epoch, step = self.state.epoch, self.state.step
        log_lines.reward_mean(self.logger, epoch, step, sum(s.reward for s in rewarded) / len(rewarded))
        logprobs = [value for sample in rewarded for value in sample.sequence.resp_logprobs]
        log_lines.rollout_logprob_mean(self.logger, epoch, step, sum(logprobs) / len(logprobs))
        return rewarded

    def score(self, records: list[RewardRecord], token_rows: Sequence[Sequence[int]]) -> list[RewardOutcome]:
        """Return the rewards of samples. A reward function scores ``records``; a reward model scores ``token_rows``."""
        if self.config.workflow is not None:
            return [RewardOutcome(record.metadata[REWARD], None, 0.0) for record in records]
        if self._runner is None:
            scores = self.objective.rewards(token_rows, lambda index: records[index].completion)
            return [RewardOutcome(score, None, 0.0) for score in scores]
        outcomes = self._runner.run(records)
        for record, outcome in zip(records, outcomes, strict=True):
            if outcome.error is not None:
                self.logger.warning("a sample was dropped: %s; %s", outcome.error, describe_record(record))
        return outcomes

    def evaluate(self, rows: Sequence[dict[str, Any]], on_scored: OnScored | None = None) -> dict[str, float]:
        """Generate answers to held-out prompts, and score the answers as in training.

        Calls ``on_scored`` with the answers and rewards of each evaluation batch.
        """
        config = self.config

        def rewards(records: list[RewardRecord], token_rows: list[list[int]]) -> list[float | None]:
            return [outcome.value for outcome in self.score(records, token_rows)]

        return evaluate_prompts(
            self.instance,
            rows,
            rewards,
            sampling=evaluation_sampling(config),
            n_samples=config.eval_n_samples,
            max_prompt_tokens=config.max_prompt_tokens,
            max_running=config.running_sequences,
            seed=config.seed,
            disable_thinking=config.disable_thinking,
            source=str(config.eval_dataset_path),
            on_scored=on_scored or self._on_scored,
            answers=self._answers(),
        )

    def measure(self) -> dict[str, float]:
        """Evaluate the policy on the held-out rows, and save a few of its answers in the run directory."""
        samples = EvalSamples()
        self._on_scored = samples.add
        try:
            metrics = super().measure()
        finally:
            self._on_scored = None
        self.run_dir.append_eval_samples(samples.records(self.state.step))
        return metrics

    def _answers(self) -> AnswerSource | None:
        if self._agents is not None:
            return partial(self._agent_answers, self._agents)
        return None if self.config.workflow is None else self._source.answers

    def _agent_answers(self, agents: AgentRollouts, batch: PromptBatch, prompts: Sequence[int]) -> list[Sample | None]:
        config = self.config
        seed = derive_seed(config.seed, EVALUATION_STREAM, prompts[0])
        drawn, _ = agents.draw(batch, config.eval_n_samples, evaluation_sampling(config), seed, may_be_empty=True)
        answers: list[Sample | None] = [None] * (len(prompts) * config.eval_n_samples)
        for sample in drawn:
            sample.record.metadata["prompt_index"] = prompts[sample.prompt_index]
            answers[sample.prompt_index * config.eval_n_samples + sample.sample_index] = sample
        return answers

    def train_rows(self, sample: Sample) -> list[TrainSequence]:
        """Return the training rows of a sample, without advantages. Only an agent's sample may have several rows."""
        eos = min(self.instance.backend.eos_ids, default=0)
        return [
            row.train_sequence(reward=sample.reward, group=sample.prompt_index, eos_token_id=eos) for row in sample.rows
        ]

    def make_rows(self, samples: list[Sample]) -> tuple[list[TrainSequence], dict[str, float]]:
        """Return the training rows of the samples, and the statistics of these rows.

        The rows have all inputs of the loss. Sets the ``advantage`` of each sample.
        """
        self._seconds.clear()
        groups = [self.train_rows(sample) for sample in samples]
        prepared = self.objective.prepare([row for group in groups for row in group], self.credits(samples, groups))
        for sample, group in zip(samples, groups, strict=True):
            values = trained_values(group, "advantages")
            sample.advantage = values[0] if min(values) == max(values) else float(np.mean(values))
        stats = self.row_statistics(prepared)
        if prepared.m2_masked is not None:
            stats["m2_filtered_fraction"] = prepared.m2_masked
        if "ref" in self._seconds:
            stats |= summary_statistics("ref_logprob", trained_values(prepared.rows, "ref_logprobs"))
            stats["ref_logprob_forward_time_s"] = self._seconds["ref"]
        return prepared.rows, stats

    @contextmanager
    def _around(self, stage: Stage, role: str, rows: int) -> Iterator[None]:
        """Write log lines before and after the ``with`` block, which runs a stage of the step, and measure the block's time."""
        logger, state, start = self.logger, self.state, time.perf_counter()
        if stage == "train":
            shown, name = rows if role == "critic" else None, cast(log_lines.Role, role)
            log_lines.train_start(logger, state.epoch, state.step, name, rows=shown)
            yield
            self._seconds[f"train_{role}"] = time.perf_counter() - start
            log_lines.train_end(logger, state.epoch, state.step, name, rows=shown)
        elif stage == "advantages":
            yield
        else:
            kinds: dict[Stage, log_lines.ScoreKind] = {"values": "value_score", "rewards": "score"}
            kind = kinds.get(stage, "logprob_score")
            log_lines.score_start(logger, role, kind, rows)
            yield
            self._seconds[role] = time.perf_counter() - start
            log_lines.score_end(logger, role, kind, rows)

    def update(self, rows: list[TrainSequence]) -> dict[str, float]:
        """Run the optimizer steps of a training step on ``rows``, and return the statistics."""
        config, prompts = self.config, len({row.group for row in rows})
        if config.update_minibatches > prompts and not self._warned_minibatches:
            self._warned_minibatches = True
            self.logger.info(
                "--update-minibatches %d is more than the %d prompts of step %d, so each prompt becomes one minibatch",
                *(config.update_minibatches, prompts, self.state.step),
            )
        return self.update_statistics(self.objective.updates(rows, self.state.step))
