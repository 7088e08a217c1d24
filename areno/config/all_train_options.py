"""`TrainOptions`: all options of ``areno train``, and properties that are derived from these options."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areno.config.rollout_options import RolloutOptions, TuningOptions
from areno.config.run_options import BasicOptions, CheckpointOptions, EvaluationOptions, ObservabilityOptions
from areno.config.train_options import LoraOptions, UpdateOptions
from areno.errors import ArenoError

OUTPUT_DIRECTORIES = ("run_dir", "save_path", "metrics_log_dir")
"""Names of the options that set an output directory."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(
    ObservabilityOptions,
    EvaluationOptions,
    CheckpointOptions,
    LoraOptions,
    UpdateOptions,
    TuningOptions,
    RolloutOptions,
    BasicOptions,
):
    """All options of ``areno train``; ``dataclasses.replace`` makes a changed copy.

    ``explicit`` contains the names of the options that a flag or the ``--config`` file sets. ``extra`` contains the values of
    the options that the algorithm declares.
    """

    explicit: frozenset[str] = frozenset()
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def run_path(self) -> Path:
        """The run directory. Raises ArenoError if ``run_dir`` is not set."""
        if self.run_dir is None:
            raise ArenoError("run_dir is not set; set run_dir, or call areno.config.resume.apply_resume(options) first")
        return Path(self.run_dir)

    @property
    def checkpoint_path(self) -> Path:
        """Folder that contains the checkpoints: ``--save-path``, or by default ``checkpoints`` in the run directory."""
        return Path(self.save_path) if self.save_path else self.run_path / "checkpoints"

    @property
    def events_path(self) -> Path:
        """TensorBoard directory: ``--metrics-log-dir``, or by default ``events`` in the run directory."""
        return Path(self.metrics_log_dir) if self.metrics_log_dir else self.run_path / "events"

    @property
    def recomputes(self) -> bool | None:
        """Whether the backward pass recomputes activations; None lets the engine decide according to free memory."""
        undecided = self.activation_checkpointing and "activation_checkpointing" not in self.explicit
        return None if undecided else self.activation_checkpointing

    @property
    def uses_replicas(self) -> bool:
        """Whether rollouts run in separate processes."""
        return self.rollout == "async" or self.rollout_backend != "areno"

    @property
    def most_behind(self) -> int:
        """Maximum staleness: number of updates between the weights that sampled a token and the weights being trained."""
        return self.max_staleness if self.rollout == "async" else 0

    @property
    def running_sequences(self) -> int:
        """Maximum number of sequences generated concurrently."""
        return self.max_running_prompts or self.batch_size * self.n_samples
