"""Sections for data, saving, evaluation, recovery, statistics, traces, rewards and the workflow."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from areno.config.experiment.setting_declaration import Problems, ineffective, section, setting
from areno.config.experiment.worker_sections import SchedulingSpec
from areno.config.reward_weights import part_weights
from areno.errors import UsageError

SAVES_NOTHING = "off"
"""Mode of a disabled saver."""

LOADER = "loader"
"""Key of ``dataset_kwargs`` that specifies the user's own loader."""

_READS_ROWS = "the trainer's process reads the rows"
_service = partial(setting, no_effect=_READS_ROWS)


@dataclass
class TrainDatasetConfig:
    """The rows to train on."""

    split: str = setting("train", "Split of the dataset.")
    path: str = setting("", "Data file, folder or hub reference.", required=True)
    type: str = setting("", "Kind of experiment: rl, sft, rw (reward model) or dpo.", required=True)
    batch_size: int = setting(1, "Rows per step: prompts for RL, and pairs for rw and dpo.", minimum=1)
    shuffle: bool = setting(True, "Shuffle the rows each epoch, with the experiment's seed.")
    pin_memory: bool = _service(False, "Keep batches in pinned memory.")
    num_workers: int = _service(0, "Processes that prefetch rows; 0 reads rows in the trainer's process.", minimum=0)
    num_dataset_workers: int = _service(1, "Processes of a data service.", minimum=1)
    drop_last: bool = setting(True, "Drop an incomplete last batch.")
    max_length: int | None = setting(
        None, "Maximum tokens of a row (for RL, of its prompt); longer rows are skipped and counted.", minimum=1
    )
    dataset_kwargs: dict[str, Any] = setting(
        {}, "Your own dataset loader (key loader: file.py:NAME) and its additional arguments."
    )
    scheduling_spec: SchedulingSpec | None = section(
        None, "Resources of a data service's workers; null for no service.", no_effect=_READS_ROWS
    )
    setup_timeout: float = _service(120.0, "Timeout for a data service to start, in seconds.", above=0)


@dataclass
class ValidDatasetConfig(TrainDatasetConfig):
    """The held-out rows."""

    split: str = setting("test", "Split of the dataset.")
    shuffle: bool = setting(False, "Has no effect: an evaluation uses the rows in file order.")
    drop_last: bool = setting(False, "Has no effect: an evaluation uses all rows.")


@dataclass
class FrequencyConfig:
    """How often to save, evaluate or checkpoint: whenever any of the three intervals has passed."""

    experiment_name: str = setting(
        "", "Experiment name; set this name only at the top level.", inherits="experiment_name"
    )
    trial_name: str = setting("", "Trial name; set this name only at the top level.", inherits="trial_name")
    fileroot: str = setting("", "Root of the files.", inherits="cluster.fileroot", shown="cluster.fileroot")
    freq_epochs: int | None = setting(None, "Interval in epochs; null ignores epochs.", minimum=1)
    freq_steps: int | None = setting(None, "Interval in steps; null ignores steps.", minimum=1)
    freq_secs: int | None = setting(None, "Interval in seconds; null ignores time.", minimum=1)

    @property
    def has_frequency(self) -> bool:
        """Whether any interval is set."""
        return (self.freq_epochs, self.freq_steps, self.freq_secs) != (None, None, None)


@dataclass
class SaverConfig(FrequencyConfig):
    """Saved models, in Hugging Face format. Except in mode off, the last model is saved even without an interval."""

    mode: str = setting(
        "auto",
        "sync writes while training waits, async writes in the background, auto is async if the model can be copied, and off "
        "saves nothing, not even the last model.",
        choices=("auto", "sync", "async", SAVES_NOTHING),
    )

    def problems(self) -> Problems:
        """Yield the problems within the section."""
        if self.mode == SAVES_NOTHING:
            because = f"with mode {SAVES_NOTHING}; use only one of them"
            yield from ineffective(self, ("freq_epochs", "freq_steps", "freq_secs"), because)


@dataclass
class EvaluatorConfig(FrequencyConfig):
    """Evaluation on held-out rows."""

    eval_before_train: bool = setting(False, "Also evaluate before the first step.")
    keep_best: bool = setting(False, "Keep the checkpoint with the best evaluation, as recover/best.")
    early_stop_patience: int | None = setting(
        None,
        "Stop the run after this many consecutive evaluations without a new best result; null never stops the run.",
        minimum=1,
    )


@dataclass
class RecoverConfig(FrequencyConfig):
    """Recovery checkpoints, from which an interrupted run resumes."""

    mode: str = setting(
        "disabled",
        "on and auto write recovery checkpoints, and resume from the newest recovery checkpoint, if any; off and disabled do "
        "neither.",
        choices=("on", "off", "auto", "disabled"),
    )
    retries: int = setting(3, "With recovery checkpoints: maximum number of restarts after engine failures.", minimum=0)
    no_save_optim: bool = setting(False, "Do not save the optimizer in recovery checkpoints.")
    no_load_optim: bool = setting(False, "Resume with new optimizer states instead of the saved states.")

    @property
    def enabled(self) -> bool:
        """Whether recovery checkpoints are written and read."""
        return self.mode in ("on", "auto")


@dataclass
class WandBConfig:
    """Weights & Biases."""

    mode: str = setting(
        "disabled", "true means online, and false means disabled.", choices=("online", "offline", "disabled", "shared")
    )
    wandb_base_url: str = setting("", "Address of a self-hosted server.")
    wandb_api_key: str = setting("", "API key; empty uses WANDB_API_KEY or the key stored by `wandb login`.")
    entity: str | None = setting(None, "User or team.")
    project: str | None = setting(None, "Project; null uses the experiment's name.")
    name: str | None = setting(None, "Name of the run; null uses the trial's name.")
    job_type: str | None = setting(None, "Kind of run.")
    group: str | None = setting(None, "Group of runs; null uses the names of experiment and trial.")
    notes: str | None = setting(None, "Free text.")
    tags: list[str] | None = setting(None, "Tags.")
    config: dict[str, Any] | None = setting(None, "Configuration to show; null shows the experiment's configuration.")
    id_suffix: str | None = setting("train", "Suffix of the run's id, after the names of experiment and trial.")


@dataclass
class SwanlabConfig:
    """SwanLab."""

    project: str | None = setting(None, "Project; null uses the experiment's name.")
    name: str | None = setting(None, "Name of the run; null uses the trial's name.")
    config: dict[str, Any] | None = setting(None, "Configuration to show; null shows the experiment's configuration.")
    logdir: str | None = setting(None, "Folder of local logs; null puts the logs in the run directory.")
    mode: str = setting("disabled", "Where to log.", choices=("cloud", "local", "disabled", "offline"))
    api_key: str | None = setting(None, "API key for mode cloud.")


@dataclass
class TensorBoardConfig:
    """TensorBoard."""

    path: str | None = setting(None, "Folder of event files; null puts the files in the run directory.")


@dataclass
class TrackioConfig:
    """Trackio."""

    mode: str = setting("disabled", "Where to log.", choices=("disabled", "online", "local"))
    project: str | None = setting(None, "Project; null uses the experiment's name.")
    name: str | None = setting(None, "Name of the run; null uses the trial's name.")
    space_id: str | None = setting(None, "Hugging Face Space for mode online.")


@dataclass
class MLflowConfig:
    """MLflow."""

    mode: str = setting("disabled", "Whether to log.", choices=("enabled", "disabled"))
    tracking_uri: str | None = setting(
        None,
        "Address of a server, or a database such as sqlite:////data/mlflow.db; null uses MLFLOW_TRACKING_URI or, by default, "
        "mlflow.db in the current folder.",
    )
    experiment: str | None = setting(None, "Experiment in MLflow; null uses the experiment's name.")
    name: str | None = setting(None, "Name of the run; null uses the trial's name.")


@dataclass
class StatsLoggerConfig:
    """Statistics loggers."""

    experiment_name: str = setting(
        "", "Experiment name; set this name only at the top level.", inherits="experiment_name"
    )
    trial_name: str = setting("", "Trial name; set this name only at the top level.", inherits="trial_name")
    fileroot: str = setting("", "Root of the files.", inherits="cluster.fileroot", shown="cluster.fileroot")
    wandb: WandBConfig = section(WandBConfig, "Weights & Biases.")
    swanlab: SwanlabConfig = section(SwanlabConfig, "SwanLab.")
    tensorboard: TensorBoardConfig = section(TensorBoardConfig, "TensorBoard.")
    trackio: TrackioConfig = section(TrackioConfig, "Trackio.")
    mlflow: MLflowConfig = section(MLflowConfig, "MLflow.")


@dataclass
class SessionTracerConfig:
    """Traces of rollout sessions."""

    enabled: bool = setting(False, "Write session_tracer/ in the run directory.")
    flush_threshold: int = setting(256, "Write finished sessions in batches of this size; values below 1 mean 1.")


@dataclass
class PerfTracerConfig:
    """Chrome traces of the trainer's process."""

    experiment_name: str = setting(
        "", "Experiment name; set this name only at the top level.", inherits="experiment_name"
    )
    trial_name: str = setting("", "Trial name; set this name only at the top level.", inherits="trial_name")
    fileroot: str = setting("", "Root of the files.", inherits="cluster.fileroot", shown="cluster.fileroot")
    enabled: bool = setting(False, "Write traces.")
    save_interval: int = setting(1, "Write every N steps; values below 1 mean 1.")
    profile_steps: list[int] | None = setting(
        None, "Steps, counted from 0, that PyTorch's profiler records as well.", minimum=0
    )
    session_tracer: SessionTracerConfig | None = section(None, "Traces of rollout sessions.")


@dataclass
class MemoryProfilerConfig:
    """CUDA memory snapshots of the actor's ranks."""

    profile_steps: list[int] = setting([], "Steps to record, counted from 0.", minimum=0)
    max_entries: int = setting(100_000, "Maximum number of events in a snapshot.", minimum=1)


@dataclass
class RewardConfig:
    """The rewards of the built-in workflows: a function or a reward model."""

    fn: str = setting(
        "",
        "Reward function (file.py:NAME or module.NAME), called as (prompt, completion, prompt_ids, completion_ids, **row).",
    )
    weights: dict[str, Any] = setting({}, "Weights of the reward parts that fn returns; parts without a weight get 1.")
    normalize_parts: bool = setting(
        False, "Standardize each reward part over the samples of a prompt before weighting (GDPO)."
    )
    path: str = setting(
        "",
        "Folder or repo id of a reward model, which scores the answers instead of fn; only with workflow.path rlvr.",
    )
    on_error: str = setting(
        "drop",
        "What happens if fn raises or every attempt times out. drop: the episode is discarded, and the run ends only after "
        "many consecutive failures. stop: the run ends at once.",
        choices=("drop", "stop"),
    )
    timeout_seconds: float = setting(
        15.0,
        "Timeout of one reward call, in seconds. After a timeout, the worker process is killed and replaced.",
        above=0,
    )
    max_retries: int = setting(3, "Maximum retries of a reward after a timeout or the death of a worker.", minimum=0)
    max_workers: int | None = setting(None, "Worker processes; null uses half of the cores.", minimum=1)

    def problems(self) -> Problems:
        """Yield the problems with the weights."""
        try:
            part_weights(self.weights)
        except UsageError as error:
            yield "weights", str(error)


@dataclass
class WorkflowConfig:
    """The workflow, unless a program passes its own workflow to the trainer."""

    path: str = setting("rlvr", "rlvr, multi_turn, agent, or a class as file.py:NAME or module.NAME.")
    kwargs: dict[str, Any] = setting({}, "Arguments of the workflow, such as max_turns and turn_discount.")
    dynamic_filter_fn: str = setting(
        "",
        "Function (file.py:NAME or module.NAME) that receives a group's trajectory and returns whether to train on the group. "
        "Empty keeps all groups.",
    )
