"""Trains with PPO, GRPO and related algorithms.

By default, separate processes generate while this process trains. Alternatively, a single engine alternates between
generation and training. A training step has these stages:

    generate a batch of trajectories -> convert it to rows -> score the rows with the actor, reference, critic and teacher
      models -> compute advantages -> take optimizer steps -> send the new weights to the replicas -> save models -> evaluate
      -> record statistics -> write a recovery checkpoint

With separate processes, the next batches are generated while the model trains on a batch. Generation may be ahead of training
by at most ``rollout.max_head_offpolicyness`` weight versions.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from areno.config.experiment.allocation import ModelAllocation
from areno.config.experiment.experiments import PPOConfig
from areno.config.experiment.roles import shares_devices, takes_turns
from areno.engine.backend import ACTOR, Backend
from areno.engine.engine_config import EngineConfig
from areno.errors import DataError, RewardError, UsageError
from areno.experiments.checks import parser_problems
from areno.experiments.trainers import engines, update
from areno.experiments.trainers.experiment import ExperimentTrainer, in_scope
from areno.experiments.trainers.row_source import RowSource, without_long
from areno.experiments.trainers.workflows import filter_of, workflow_of
from areno.loss_fns.loss_interface import knobs_of
from areno.loss_fns.policy_loss import PolicyLossConfig
from areno.loss_fns.shaping import row_counts, summaries, version_statistics
from areno.loss_fns.units import with_names
from areno.loss_fns.value import CRITIC_NAMES, value_loss_fn
from areno.observability import tracing
from areno.observability.perf_tracer import Category
from areno.observability.samples import EVAL_PROMPTS, EvalSamples, observe, reward_records, row_records
from areno.observability.screen import ShownSample
from areno.rollouts.dispatcher import STALL_TIMEOUT_S, BatchDispatcher
from areno.rollouts.dump import TrajectoryDump
from areno.rollouts.engine_client import EngineClient
from areno.rollouts.fleet.fleet import FleetOptions, RolloutFleet
from areno.rollouts.fleet.weight_transfer import WeightOptions
from areno.rollouts.shared_engine import SharedEngine
from areno.rollouts.staleness import StalenessManager
from areno.rollouts.tasks import Batch, EpisodePlan
from areno.rollouts.trajectory import Trajectory, reward_of, samples_of, train_sequences
from areno.rollouts.workflows.rlvr import extract_prompt, input_ids_of
from areno.serving.token_text import TokenTexts
from areno.storage.run_layout import ACTOR_MODELS
from areno.training import plain_objects
from areno.training.checkpoints import rollout_state
from areno.training.frequency import StepInfo
from areno.training.objectives.passes import Learner
from areno.training.objectives.policy import PolicyObjective, Prepared
from areno.training.reporter import StepOutcome
from areno.types import PARTS, TrainSequence, part_columns

_log = logging.getLogger(__name__)

_TIMED = {
    ("logprobs", ACTOR): "recompute_logp",
    ("values", update.CRITIC): "critic_values",
    ("advantages", ""): "compute_advantage",
    ("rewards", update.REWARD): "reward",
    ("train", ACTOR): "train_step",
    ("train", update.CRITIC): "critic_train_step",
}
"""Timer names of the stages of an update. For the log-probs of other roles, the timer name is ``{role}_logp``."""
_EVAL_AHEAD = 10**12


class PPOTrainer(ExperimentTrainer):
    """Trains with PPO, GRPO and related algorithms; see the module's docstring and :class:`ExperimentTrainer`."""

    config: PPOConfig
    best_metric = "eval-rollout/reward/avg"
    best_is_higher = True

    def __init__(
        self,
        config: PPOConfig,
        train_dataset: Sequence[Mapping[str, Any]] | None = None,
        valid_dataset: Sequence[Mapping[str, Any]] | None = None,
        *,
        workflow_is_named: bool = False,
    ) -> None:
        self._workflow_is_named = workflow_is_named
        self.fleet: RolloutFleet | SharedEngine | None = None
        self.dispatchers: list[BatchDispatcher] = []
        self.saved_roles = (ACTOR_MODELS, update.CRITIC) if config.critic is not None else (ACTOR_MODELS,)
        for problem in parser_problems(config.rollout.agent):
            raise UsageError(problem)
        super().__init__(config, train_dataset, valid_dataset)
        config = self.config
        try:
            self.loss = update.loss_of(config.actor, config.teacher)
            self.shaping = update.shaping_of(config.actor, config.reward_section)
            self.batching = engines.micro_batching(config.actor.mb_spec, tree=config.actor.enable_tree_training)
            self.ensure_roles()
            self.open_rollout()
            self._texts = TokenTexts(self.engine.tokenizer)
        except BaseException as error:
            self.close(error)
            raise

    def open_rollout(self) -> None:
        """Start the rollout replicas, and create the dispatcher of their episodes."""
        rollout = self.config.rollout
        self.fleet = self._start_fleet()
        self.client = EngineClient(
            self.fleet,
            seed=self.config.seed,
            request_timeout=rollout.request_timeout,
            request_retries=rollout.request_retries,
            enable_rollout_tracing=rollout.enable_rollout_tracing,
        )
        self.dispatcher = self._dispatcher()

    def _check_rows(self, train: Sequence[Any], valid: Sequence[Any] | None) -> None:
        if self._workflow_is_named:
            super()._check_rows(train, valid)

    @classmethod
    def check_first_row(cls, config: Any, name: str, rows: Sequence[Any]) -> None:
        """Check that the first row has a prompt, if the workflow is a built-in workflow."""
        if not config.built_in_workflow:
            return
        try:
            extract_prompt(rows[0])
        except DataError as error:
            raise DataError(f"{name}, row 1: {error}") from None

    def make_rows(self, train: Sequence[Any], valid: Sequence[Any] | None) -> tuple[RowSource, Sequence[Any] | None]:
        """Return the training prompts and the held-out prompts, without prompts longer than ``max_length``."""
        config, section = self.config, self.config.train_dataset

        def length(row: Any) -> int:
            return len(input_ids_of(extract_prompt(row), self.engine.tokenizer, False))

        longest = self._longest_prompt(section.max_length)
        rows, dropped = without_long(train, length, longest)
        if dropped:
            total = dropped + len(rows)
            _log.info("dropped %d of %d training prompts, because they exceed %s tokens", dropped, total, longest)
        if valid is not None and config.valid_dataset is not None:
            longest = self._longest_prompt(config.valid_dataset.max_length)
            valid, dropped = without_long(valid, length, longest)
            if dropped:
                _log.info("dropped %d held-out prompts longer than %s tokens", dropped, longest)
        if (config.recover.enabled or config.evaluator.keep_best) and len(rows):
            # Queued rows go into checkpoints to resume from; fail now rather than at the first one, which may be hours away.
            plain_objects.check(rows[0])
        return RowSource(rows, section, config.seed), valid

    def _longest_prompt(self, max_length: int | None) -> int | None:
        """Return ``max_length``, or less if the model's context would otherwise leave no room for an answer."""
        context = self.engine.context_length
        return max_length if max_length is None or context is None else min(max_length, context - 1)

    def ensure_roles(self) -> None:
        """Load the reference, critic, teacher and reward models that the configuration requires."""
        critic = self.config.critic
        optimizer = None
        if critic is not None and critic.optimizer is not None:
            config = engines.optimizer_of(critic)
            optimizer = {field.name: getattr(config, field.name) for field in fields(config)}
        self.engine.ensure_roles(update.roles_of(self.config, optimizer), self.resumed_from)

    def rollout_engine(self) -> tuple[str, EngineConfig]:
        """Return the model path and the configuration of a rollout engine."""
        config, actor = self.config, self.config.actor
        options = {"gpu": self.machine.gpus > 0, **self._engine_options(), **self._generation_options()}
        engine = engines.engine_config(actor, seed=config.seed, **options)
        return actor.path, replace(engine, trains="nothing", shares_device=shares_devices(config))

    def _make_engine(self, checkpoint: Path | None) -> Backend:
        self._server = engines.server_options(self.config, self.machine.gpus > 0)
        return super()._make_engine(checkpoint)

    def _engine_options(self) -> dict[str, Any]:
        routing = {"return_routed_experts": self.config.rollout.return_routed_experts}
        return routing | (self._generation_options() if takes_turns(self.config) else {})

    def _generation_options(self) -> dict[str, Any]:
        running = (self.config.rollout.max_concurrent_rollouts or 1) * self.config.gconfig.n_samples
        return {"max_running": max(running, 1), "decode": "auto", "speculate": self.config.rollout.speculate}

    def _start_fleet(self) -> RolloutFleet | SharedEngine:
        if takes_turns(self.config):
            return SharedEngine(self.engine)
        rollout, actor = self.config.rollout, self.config.actor
        parallel = ModelAllocation.from_str(rollout.backend, "rollout").parallel
        path, engine = self.rollout_engine()
        mode: Any = actor.weight_update_mode
        spec = rollout.scheduling_spec[0]
        options = FleetOptions(
            replicas=parallel.data,
            tp_size=parallel.tensor * parallel.pipeline,
            log_folder=self.run_dir.path,
            startup_timeout_s=rollout.setup_timeout,
            stall_s=engines.replica_stall_limit(rollout.request_timeout),
            stall_option="rollout.request_timeout to more than six times this duration",
            threads=spec.cpu,
            environment=spec.environment() or None,
            server=self._server,
            launcher=self.launcher,
            scales=True,
        )
        remote = self._server is not None and (self.launcher is not None or self._server.elsewhere)
        if remote and mode == "shm":
            mode = "disk"  # other machines cannot access shared memory
        folder = self.folders.checkpoints / ACTOR_MODELS if remote or mode == "disk" else None
        weights = WeightOptions(mode=mode, folder=folder)
        devices = None if self.launcher else engines.rollout_devices(self.config, self.machine.gpus)
        fleet = RolloutFleet(path, engine, options, weights, devices)
        if self.launcher is None:
            fleet.share_cores(actor.scheduling_spec[0].cpu)
        if actor.init_from_scratch:
            fleet.update_weights(self.engine, 0)
        return fleet

    def _dispatcher(self, evaluates: bool = False) -> BatchDispatcher:
        config, rollout = self.config, self.config.rollout
        size = len(self.eval_rows or ()) if evaluates else rollout.consumer_batch_size
        staleness = StalenessManager(
            max_concurrent_rollouts=rollout.max_concurrent_rollouts,
            consumer_batch_size=size,
            max_head_offpolicyness=_EVAL_AHEAD if evaluates else rollout.max_head_offpolicyness,
            replaces_rejected=evaluates or not config.dynamic_bs,
        )
        kind = "eval-rollout" if evaluates else "rollout"
        on_stale: Any = rollout.on_stale
        dispatcher = BatchDispatcher(
            self.client,
            staleness,
            seed=config.seed,
            dynamic_bs=config.dynamic_bs and not evaluates,
            queue_size=None if evaluates else rollout.queue_size,
            max_staleness=None if evaluates else rollout.max_staleness,
            on_stale=on_stale,
            stall_timeout_s=max(rollout.request_timeout, STALL_TIMEOUT_S),  # a tool may take longer than a request
            check_trajectory_format=rollout.check_trajectory_format,
            dump=TrajectoryDump(self.run_dir.path / kind, self.engine.tokenizer) if rollout.dump_to_file else None,
            listener=None if evaluates else self._trace_episode,
            on_wait=self.stop.check,  # a stop during the wait for a batch loses no work
            stops_on=(RewardError,) if config.reward_section.on_error == "stop" else (),
        )
        self.dispatchers.append(dispatcher)
        return dispatcher

    def _trace_episode(self, task: int, status: str, reason: str) -> None:
        """Write the status of an episode to the traces. Any thread may call this method."""
        tracing.instant(f"rollout {status}", Category.SCHEDULER, {"task": task})
        if status != "running":
            outcome: Any = status
            tracing.session_tracer().finalize(task, outcome, reason or None)

    def train(
        self,
        workflow: Any = None,
        eval_workflow: Any = None,
        workflow_kwargs: dict[str, Any] | None = None,
        eval_workflow_kwargs: dict[str, Any] | None = None,
        dynamic_filter_fn: Callable[[Trajectory], bool] | str | None = None,
        total_epochs: int | None = None,
    ) -> None:
        """Run the experiment.

        Args:
            workflow: workflow as an object, a class or a name. If None, the ``workflow`` section is used.
            eval_workflow: workflow of evaluations. If None, ``workflow`` is used, with the sampling parameters of the
                ``eval_gconfig`` section.
            workflow_kwargs: keyword arguments of ``workflow``.
            eval_workflow_kwargs: keyword arguments of the evaluation's workflow. If neither ``eval_workflow`` nor
                ``eval_workflow_kwargs`` is given, ``workflow_kwargs`` apply.
            dynamic_filter_fn: function that gets all samples of a group as one trajectory, and returns whether to train
                on the group. If None, the setting ``workflow.dynamic_filter_fn`` applies.
            total_epochs: number of epochs, instead of ``total_train_epochs``.

        Raises:
            RolloutStoppedError: too many consecutive episodes failed or were rejected, or a reward failed and
                ``reward.on_error`` is ``stop``.
            EngineError: a process failed permanently, or the run makes no progress.
        """
        self.plan_steps(total_epochs)
        self.workflow = workflow_of(self.config, workflow, workflow_kwargs, self.engine.tokenizer)
        if self.eval_rows is not None:
            chosen = (eval_workflow, eval_workflow_kwargs)
            if eval_workflow is None:
                chosen = (workflow, workflow_kwargs if eval_workflow_kwargs is None else eval_workflow_kwargs)
            self.eval_workflow = workflow_of(self.config, *chosen, self.engine.tokenizer, evaluates=True)
            self.eval_dispatcher = self._dispatcher(evaluates=True)
        self.accept = filter_of(self.config, dynamic_filter_fn)
        self.keep_rollouts(self.config.rollout.save_rollouts)
        self.fit()

    def run_step(self, at: StepInfo) -> StepOutcome:
        """Generate a batch, train on the batch, and send the new weights to the replicas."""
        self.display.phase("rollout")
        assert self.fleet is not None
        with self.timed("rollout"), self.fleet.generating():
            batch = self.dispatcher.prepare_batch(self.rows, self.workflow, self.accept)
        self._score_rewards(batch.trajectories)
        rows = train_sequences(batch.trajectories, next(iter(sorted(self.engine.eos_ids)), 0))
        numbers, sample = self._rollout_statistics(batch, rows), None
        if rows:
            numbers |= self.update(rows, at, batch.task_ids, batch.data)
            record = reward_records(batch.task_ids, rows[:1], self.engine.tokenizer)[0]
            sample = ShownSample(record.prompt, record.completion, rows[0].reward)
        with self.timed("update_weights"):
            report = self.fleet.update_weights(self.engine, at.global_step + 1)
        numbers["timeperf/rollout_pause"] = max(report.pauses_s.values(), default=0.0)
        self.dispatcher.set_version(at.global_step + 1)
        sequences = numbers.get(f"{self.section}/n_seqs", float(self.rows.batch_size))
        rewards = [row.reward for row in rows]
        return StepOutcome(rows, numbers, rewards=rewards, sequences=sequences, sample=sample)

    def _score_rewards(self, trajectories: Sequence[Trajectory]) -> None:
        if not self.config.reward_section.path or not trajectories:
            return
        tokens = [row["input_ids"] for trajectory in trajectories for row in samples_of(trajectory)]
        scores = iter(self.objective.rewards(tokens, lambda index: self.engine.tokenizer.decode(tokens[index])))
        for trajectory in trajectories:
            trajectory["rewards"] = torch.tensor([next(scores) for _ in trajectory["rewards"]])

    def known_names(self) -> dict[str, str]:
        """Return the full name of the statistic for each short name that the health monitor and the display use."""
        names = {"loss": "actor_loss/avg"} | {
            name: name for name in ("grad_norm", "update_skipped", "loss_scale", "logp_abs_diff_mean", "response_len")
        }
        names = {name: f"{self.section}/update/{statistic}" for name, statistic in names.items()}
        return names | {"reward_mean": "rollout/reward/avg"}

    def _rollout_statistics(self, batch: Batch, rows: Sequence[TrainSequence]) -> dict[str, float]:
        counts = self.dispatcher.statistics()
        numbers = {
            f"rollout/{name}": float(counts[name]) for name in ("accepted", "rejected", "failed", "filtered", "stale")
        }
        turns = update.turns_of(batch.trajectories)
        columns = {"reward": [row.reward for row in rows], "num_turns": turns, "staleness": batch.staleness}
        if self.config.actor.log_agent_stats:
            for key in self.config.actor.log_agent_stats_keys:
                required = self.state.step == 0  # later, all episodes of a batch may lack an optional number
                columns[f"agent/{key}"] = update.workflow_values(batch.trajectories, key, required=required)
        columns |= part_columns([row.reward for row in rows], PARTS)
        numbers |= in_scope("rollout", summaries({k: torch.tensor(v, dtype=torch.float64) for k, v in columns.items()}))
        return numbers

    def plan_steps(self, total_epochs: int | None = None) -> None:
        """Compute the number of steps and the learning-rate schedules, and create the objective."""
        super().plan_steps(total_epochs)
        actor, critic = self.config.actor, self.config.critic
        learners = [Learner(ACTOR, self._train_actor, actor.ppo_n_epochs, actor.ppo_n_minibatches)]
        if critic is not None and critic.optimizer is not None:
            self.critic_schedule = engines.schedule_of(critic.optimizer, self._total_steps)
            learners.append(Learner(update.CRITIC, self._train_critic, critic.ppo_n_epochs, critic.ppo_n_minibatches))
        self.objective = PolicyObjective(
            *(self.engine, update.settings_of(self.config, self.shaping, self.loss), learners),
            seed=self.config.seed,
            order="rows",
            around=lambda stage, role, _: self.timed(_TIMED.get((stage, role), f"{role}_logp")),
        )

    def prepare_rows(self, rows: list[TrainSequence]) -> Prepared:
        """Add all inputs of the loss, such as advantages, to the rows of a step."""
        return self.objective.prepare(rows)

    def update(
        self, rows: list[TrainSequence], at: StepInfo, prompts: Sequence[int], data: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, float]:
        """Run the update of a step, record samples, and return the statistics of the update.

        ``prompts`` contains the prompt index of each group. ``data`` contains the data row of each group, or is empty.
        """
        self.display.phase("train")
        observe([row.group for row in rows], [row.reward for row in rows], [[row] for row in rows])
        numbers = self._update(rows, at)
        described = (prompts, rows, self.engine.tokenizer, self._texts, self.token_records())
        self.run_dir.append_samples(row_records(at.global_step, *described, data))
        return numbers

    def _update(self, rows: list[TrainSequence], at: StepInfo) -> dict[str, float]:
        section = f"{self.section}/update"
        prepared = self.prepare_rows(rows)
        self.save_rows(rows, range(len(rows)))
        numbers = {f"{section}/compute_logp/{name}/avg": value for name, value in prepared.divergences.items()}
        scalars = {"mask_no_eos_with_zero": float(self.shaping.mask_no_eos_with_zero)}
        knobs = knobs_of(self.loss)
        if isinstance(knobs, PolicyLossConfig):
            scalars |= knobs.scalars()
        numbers |= in_scope(self.section, {**summaries(prepared.populations), **row_counts(rows), **scalars})
        numbers |= in_scope(section, version_statistics(rows, at.global_step + 1))
        if prepared.m2_masked is not None:
            numbers[f"{section}/m2_filtered_fraction"] = prepared.m2_masked
        if prepared.rows:
            for role, stats in self.objective.updates(prepared.rows, at.global_step):
                assert stats is not None
                numbers |= in_scope(section if role == ACTOR else "ppo_critic", stats)
            numbers[f"{section}/update_successful"] = 1.0 - numbers.get(f"{section}/update_skipped", 0.0)
        return numbers

    def _train_actor(self, rows: list[TrainSequence]) -> dict[str, float]:
        step = self.state.step + 1
        return self.optimize(rows, update.with_version(self.loss, step), self.batching, self.schedule.at(step))

    def _train_critic(self, rows: list[TrainSequence]) -> dict[str, float]:
        critic: Any = self.config.critic
        loss = with_names(value_loss_fn, CRITIC_NAMES, cliprange_value=critic.eps_clip, value_loss_coef=1.0)
        rate = self.critic_schedule.at(self.state.step + 1)
        return self.optimize(rows, loss, engines.micro_batching(critic.mb_spec), rate, update.CRITIC)

    def measure(self) -> dict[str, float]:
        """Run the evaluation workflow on the held-out rows, and return the metrics.

        Generation for training continues meanwhile.
        """
        assert self.eval_rows is not None
        rows = [self.eval_rows[index] for index in range(len(self.eval_rows))]
        assert self.fleet is not None
        with self.fleet.generating():
            batch = self.eval_dispatcher.run_rows(rows, EpisodePlan(self.eval_workflow), repeats=True)
        trajectories = batch.trajectories
        self._score_rewards(trajectories)
        samples = [row for t in trajectories for row in samples_of(t)]
        rewards = [reward_of(row) for row in samples]
        self._record_answers(batch)
        columns = {"reward": rewards, **part_columns(rewards, PARTS), "num_turns": update.turns_of(trajectories)}
        columns["seq_len"] = [float(len(row["input_ids"])) for row in samples]
        populations = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
        counts = {"n_prompts": float(len(trajectories)), "accepted": float(len(trajectories))}
        counts["rejected"] = float(len(rows) - len(trajectories))
        return in_scope("eval-rollout", {**summaries(populations), **counts})

    def _record_answers(self, batch: Batch) -> None:
        """Record one answer to each of up to ``EVAL_PROMPTS`` held-out prompts.

        Prompts whose episodes were rejected are skipped.
        """
        rows = train_sequences(batch.trajectories[:EVAL_PROMPTS], next(iter(sorted(self.engine.eos_ids)), 0))
        samples = EvalSamples()
        records = reward_records(batch.task_ids, rows, self.engine.tokenizer, batch.data)
        samples.add(records, [row.reward for row in rows])
        self.run_dir.append_eval_samples(samples.records(self.state.step))

    def rollout_state(self) -> Any:
        """Return the state of the dispatcher: waiting and running rows, unused trajectories, and counters."""
        return self.dispatcher.export_state()

    def load_part_states(self, parts: dict[str, Any], checkpoint: Path) -> None:
        """Restore the position in the training data, the weights of the replicas and the state of the dispatcher."""
        super().load_part_states(parts, checkpoint)
        assert self.fleet is not None
        self.fleet.update_weights(self.engine, self.state.step)
        self.dispatcher.load_state(rollout_state(checkpoint))

    def close(self, error: BaseException | None = None) -> None:
        """Close the dispatchers, then the replicas, and then everything that the base class opened."""
        with ExitStack() as stack:  # in reverse order, even if something fails
            stack.callback(super().close, error)
            if self.fleet is not None:
                stack.callback(self.fleet.close)
            for dispatcher in self.dispatchers:
                stack.callback(dispatcher.close)
        self.dispatchers = []
