"""Replays an experiment for ``areno replay``: its trainer makes updates on recorded rows, without a rollout engine."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from areno.config.experiment.experiments import PPOConfig
from areno.config.experiment.loader import experiment_class, load_expr_config
from areno.config.experiment.setting_declaration import walk
from areno.config.tracking import SERVICES
from areno.engine.backend import Backend
from areno.errors import UsageError
from areno.experiments.folders import ExperimentFolders
from areno.experiments.trainers.experiment import ExperimentTrainer
from areno.experiments.trainers.rl import PPOTrainer
from areno.experiments.trainers.update import shaping_of
from areno.loss_fns.shaping import untruncated
from areno.observability.display import ProgressDisplay
from areno.observability.logs import setup_logging
from areno.storage.run_layout import CONFIG
from areno.storage.run_status import recorded_status
from areno.training.checkpoints import Checkpoints
from areno.training.frequency import StepInfo
from areno.training.loop import PlannedStep
from areno.training.objectives.policy import Prepared
from areno.training.replay import RecordedStep
from areno.training.reporter import StepOutcome
from areno.types import TrainSequence

_NOT_REPEATED = (
    *("valid_dataset=null", "eval_gconfig=null", "evaluator.eval_before_train=false", "evaluator.keep_best=false"),
    *("evaluator.early_stop_patience=null", *(f"evaluator.freq_{u}=null" for u in ("epochs", "steps", "secs"))),
    *("rollout.save_rollouts=null", "rollout.dump_to_file=false", "perf_tracer=null"),
    *("memory_profiler=null", "stats_logger.tensorboard.path=null"),
    *(f"stats_logger.{service}.mode=disabled" for service in SERVICES),
)
"""Overrides that disable evaluation, dumps, profiling and tracking services in a replay."""
_KEEPS_NOTHING = (
    "recover.mode=disabled",
    "saver.mode=off",
    *(f"saver.freq_{u}=null" for u in ("epochs", "steps", "secs")),
)


class ReplayPPOTrainer(PPOTrainer):
    """Trains on the recorded rows of a replay, without generation."""

    def __init__(self, config: PPOConfig, replay: RecordedStep) -> None:
        self.replay = replay
        super().__init__(config, workflow_is_named=True)

    def find_checkpoint(self, checkpoints: Checkpoints) -> Path | None:
        """Return the checkpoint from which the replay starts; None for the initial model."""
        return self.replay.checkpoint

    def _make_engine(self, checkpoint: Path | None) -> Backend:
        return ExperimentTrainer._make_engine(self, checkpoint)  # without inference servers

    def open_rollout(self) -> None:
        """Start no rollout, because nothing is generated."""

    def rollout_state(self) -> Any:
        """Return None, because nothing is generated."""
        return None

    def load_part_states(self, parts: dict[str, Any], checkpoint: Path) -> None:
        """Restore only the position in the training data."""
        ExperimentTrainer.load_part_states(self, parts, checkpoint)

    def prepare(self) -> None:
        """Set the step count to the recorded step, because the checkpoint may be from an earlier step."""
        self.state.step = self.replay.step

    def data_size(self) -> dict[str, int]:
        """Return an empty dict, because a replay trains only on the rows of one step, not on the datasets."""
        return {}

    def total_steps(self) -> int:
        """Return the number of steps before the recorded step plus the number of the replay's updates."""
        return self.replay.step + self.replay.updates

    def steps(self) -> Iterator[PlannedStep]:
        """Yield the updates, which all train on the same rows."""
        per_epoch = self.rows.steps_per_epoch
        for step in range(self.replay.step, self.total_steps()):
            at = StepInfo(*divmod(step, per_epoch), step, per_epoch, self.total_steps())
            yield PlannedStep(at, at)

    def run_step(self, at: StepInfo) -> StepOutcome:
        """Run one update on the recorded rows."""
        rows = self.replay.saved.rows
        numbers = self.update(rows, at, range(max(row.group for row in rows) + 1))
        return StepOutcome(rows, numbers, rewards=[row.reward for row in rows])

    def prepare_rows(self, rows: list[TrainSequence]) -> Prepared:
        """Prepare the rows of an update.

        All updates train on the same rows. Before the first update, missing inputs of the loss, such as reference log-probs,
        are added to the rows. Advantages and returns are recomputed in two cases: if the replay changes the rewards or the
        reward shaping, or if the experiment has a critic but some recorded rows have no returns.
        """
        if self.state.step == self.replay.step:
            has_all = self.config.critic is None or all(row.returns for row in rows)
            if self.replay.reshapes or not has_all:
                return super().prepare_rows(rows)
            self.objective.complete(rows)
        return Prepared(untruncated(rows) if self.shaping.mask_no_eos_with_zero else rows)


def replay_config(run: Path, settings: Sequence[str], out: Path, keeps: bool) -> tuple[PPOConfig, PPOConfig]:
    """Load the configuration of a run and the configuration of its replay.

    The replay applies ``settings`` and writes below ``out``. ``keeps`` is whether the replay saves models and recovery
    checkpoints.

    Raises:
        UsageError: a setting is invalid, or the experiment has no rollout.
    """
    words = ["--config", str(run / CONFIG)]
    kind = experiment_class(words)
    if not issubclass(kind, PPOConfig):
        raise UsageError(
            f"{run} has no rollout, so there are no samples to replay; to repeat steps with other settings, start an "
            "experiment and set actor.path to a model that was saved before these steps"
        )
    recorded, _ = load_expr_config(words, kind)
    replayed, _ = load_expr_config([*words, *settings, *_NOT_REPEATED, *(() if keeps else _KEEPS_NOTHING)], kind)
    for _, _, section in walk(replayed):
        if hasattr(section, "fileroot"):
            section.fileroot = str(out)
    return recorded, replayed


def prepared(recorded: PPOConfig, replayed: PPOConfig, replay: RecordedStep) -> RecordedStep:
    """Recompute or drop recorded values that depend on settings changed by the replay, and return the recorded step.

    Raises UsageError if the settings need data that was not recorded.
    """
    before, after = (config.reward_section.weights for config in (recorded, replayed))
    replay = replay.weighed(after) if after != before else replay
    for section, column in (("ref", "ref_logprobs"), ("teacher", "teacher_logprobs")):
        paths = {getattr(getattr(config, section), "path", None) for config in (recorded, replayed)}
        if len(paths) > 1:
            replay.forget(column)
    shapings = [shaping_of(config.actor, config.reward_section) for config in (recorded, replayed)]
    changed = after != before or shapings[0] != shapings[1]
    return replay.reshaped(because="changed reward or advantage settings", by_group=True) if changed else replay


def run_replay(config: PPOConfig, replay: RecordedStep) -> list[dict[str, Any]]:
    """Run the updates of a replay, and return the statistics of each update. Raises StopRequested after a signal."""
    run_dir = ExperimentFolders.of(config).create()
    with setup_logging(run_dir, level="error"), recorded_status(run_dir), ReplayPPOTrainer(config, replay) as trainer:
        trainer.report.display = ProgressDisplay()
        trainer.plan_steps()
        with trainer.stop.signals():
            trainer.fit()
    return run_dir.read_metrics()[-replay.updates :]
