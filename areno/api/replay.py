"""Runs ``areno replay`` on a run of ``areno train``: the algorithm's trainer repeats updates on recorded rows."""

import time
from collections.abc import Iterator
from typing import Any

import torch

from areno.api.run_training import locked_run, make_loop, make_trainer, run_loop
from areno.api.trainers.policy_only import PolicyOnlyTrainer
from areno.api.trainers.rollout_trainer import RolloutTrainer
from areno.config.algorithms import get_algorithm
from areno.config.all_train_options import TrainOptions
from areno.config.replayed import ReplayOptions
from areno.errors import UsageError
from areno.loss_fns.shaping import Credits
from areno.observability.display import ProgressDisplay
from areno.observability.logs import setup_logging
from areno.observability.samples import observe, row_records
from areno.storage.run_dir import RunDirectory
from areno.storage.run_status import recorded_status
from areno.training.frequency import StepInfo
from areno.training.loop import PlannedStep
from areno.training.replay import RecordedStep
from areno.training.reporter import StepOutcome
from areno.types import TrainSequence


class ReplayTrainer(RolloutTrainer):
    """Mixin for the trainer class of an algorithm. The combined class trains on recorded rows instead of new samples."""

    replay: RecordedStep
    keeps: bool  # write a checkpoint after the last update

    def load_models(self) -> None:
        """Load the models of the algorithm. No reward model is loaded, because the recorded rows include rewards."""
        self.load_roles(self.roles())

    def prepare(self) -> None:
        """Create the objective, and set the current step to the step in which the rows were recorded.

        The weights come from the newest checkpoint before this step, or from the initial model. They may therefore be older
        than the weights with which the run trained this step.
        """
        self.prepare_updates()
        self.state.step = self.replay.step
        self._stats: dict[str, float] = {}

    def total_steps(self) -> int:
        """Return the step number at which the replay ends.

        This is the step in which the rows were recorded, plus the number of updates to run.
        """
        return self.replay.step + self.replay.updates

    def steps(self) -> Iterator[PlannedStep]:
        """Yield one training step for each update that the replay runs. All updates use the same recorded rows."""
        rows, state = self.replay.saved.rows, self.state
        for step in range(self.replay.step, self.total_steps()):
            yield PlannedStep(rows, StepInfo(state.epoch, state.epoch_step, step, 2**62, 2**62), state.position)

    def run_step(self, batch: Any) -> StepOutcome:
        """Run one update on the recorded rows.

        Before the first update of the replay, the rows get the loss inputs that were not recorded or must be recomputed, such
        as reference log-probs.
        """
        timings: dict[str, float] = {}
        if self.state.step == self.replay.step:
            self._stats = self._timed("advantage", timings, self._prepared, batch)
        observe([row.group for row in batch], [row.reward for row in batch], [[row] for row in batch])
        stats = self._timed("train", timings, self.update, batch) | self._stats
        prompts, tokenizer = range(max(row.group for row in batch) + 1), self.instance.get_tokenizer()
        described = (prompts, batch, tokenizer, self._texts, self.token_records())
        self.run_dir.append_samples(row_records(self.state.step, *described))
        firsts = self.replay.firsts()
        groups, rewards = [row.group for row in firsts], [row.reward for row in firsts]
        return StepOutcome(rows=batch, groups=groups, stats=stats, timings=timings, rewards=rewards)

    def _prepared(self, rows: list[TrainSequence]) -> dict[str, float]:
        """Add the missing loss inputs to the recorded rows. Return statistics if advantages were recomputed, otherwise {}."""
        self._seconds.clear()
        has_all = self.objective.settings.critic is None or all(row.returns for row in rows)
        if has_all and not self.replay.reshapes:
            self.objective.complete(rows)
            return {}
        credits = None
        if isinstance(self, PolicyOnlyTrainer):
            firsts, samples = self.replay.firsts(), self.replay.saved.samples
            numbers = {sample: number for number, sample in enumerate(dict.fromkeys(samples))}
            owners = [[numbers[sample]] * len(row.tokens) for sample, row in zip(samples, rows, strict=True)]
            credits = Credits([row.reward for row in firsts], [row.group for row in firsts], owners)
        return self.row_statistics(self.objective.prepare(rows, credits))

    def checkpoint(self) -> None:
        """Write a checkpoint if :func:`run_replay` was called with ``keeps=True``; otherwise do nothing."""
        if self.keeps:
            super().checkpoint()


def prepared(options: ReplayOptions, replay: RecordedStep) -> RecordedStep:
    """Adapt a recorded step to the options in which the replay differs from the recorded run, such as ``--ref-ckpt``.

    Raises UsageError if required data was not recorded, or if the replay's algorithm does not train on rollouts.
    """
    recorded, config = options.recorded, options.replayed
    kind = get_algorithm(config.algo).resolve_trainer_cls()
    if not issubclass(kind, RolloutTrainer):
        raise UsageError(
            f"--algo {config.algo}: the trainer {kind.__name__} does not train on rollouts, so its steps cannot be "
            "replayed; use an algorithm that trains on rollouts"
        )
    if config.reward_weights != recorded.reward_weights:
        replay = replay.weighed(config.reward_weights)
    if config.ref_ckpt != recorded.ref_ckpt:
        replay.forget("ref_logprobs")
    if not options.changes_advantages:
        return replay
    if config.turn_discount is not None:
        raise UsageError(
            "with --turn-discount, a replay cannot recompute the advantages, because the rewards of turns are not recorded; "
            "remove the options that affect the advantages, such as --advantage"
        )
    return replay.reshaped(", ".join(options.changes), by_group=issubclass(kind, PolicyOnlyTrainer))


def run_replay(config: TrainOptions, replay: RecordedStep, keeps: bool) -> list[dict[str, Any]]:
    """Run the updates of a replay in a new run directory, and return the metrics of each update.

    Args:
        config: the options of the replay.
        replay: the recorded rows, and the checkpoint to start from.
        keeps: whether to write a checkpoint after the last update.

    Raises:
        StopRequested: a signal stopped the replay.
    """
    spec = get_algorithm(config.algo)
    run_dir, start = RunDirectory(config.run_path).create(), time.perf_counter()
    with locked_run(config), setup_logging(run_dir, level="error"), recorded_status(run_dir):
        trainer = make_trainer(config, spec.trains, replay.checkpoint)
        try:
            trainer.init()
            torch.manual_seed(config.seed)
            bases = (ReplayTrainer, spec.resolve_trainer_cls())
            kind = type("Replaying", bases, {"replay": replay, "keeps": keeps})
            loop = make_loop(config, trainer, [], kind)
            loop.resumed_from, loop.report.display = replay.checkpoint, ProgressDisplay()
            run_loop(config, loop, run_dir, start)
        finally:
            trainer.close()
    return run_dir.read_metrics()[-replay.updates :]
