"""Configuration sections for data, saving, evaluation, recovery, statistics, traces, rewards and the workflow."""

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

_READS_ROWS = "the trainer process reads the rows itself"
_service = partial(setting, no_effect=_READS_ROWS)


@dataclass
class TrainDatasetConfig:
    """The rows to train on."""

    split: str = setting("train", "Split of the dataset.")
    path: str = setting("", "Dataset: a file, a folder or a hub reference.", required=True)
    type: str = setting("", "Kind of experiment: rl, sft, rw (reward model) or dpo.", required=True)
    batch_size: int = setting(1, "Number of rows per step: prompts for rl, pairs for rw and dpo.", minimum=1)
    shuffle: bool = setting(
        True, "Shuffle the rows before each epoch. The order depends on the top-level setting `seed`."
    )
    pin_memory: bool = _service(False, "Keep batches in pinned memory.")
    num_workers: int = _service(0, "Number of processes that prefetch rows.", minimum=0)
    num_dataset_workers: int = _service(1, "Number of processes of AReaL's data service.", minimum=1)
    drop_last: bool = setting(True, "Drop an incomplete last batch.")
    max_length: int | None = setting(
        None,
        "Maximum number of tokens per row (for type rl: per prompt). areno skips longer rows and logs their number.",
        minimum=1,
    )
    dataset_kwargs: dict[str, Any] = setting(
        {},
        "The key `loader` specifies your own dataset loader, as file.py:NAME. All other keys are additional arguments of "
        "this loader.",
    )
    scheduling_spec: SchedulingSpec | None = section(
        None, "Resources of the workers of AReaL's data service.", no_effect=_READS_ROWS
    )
    setup_timeout: float = _service(120.0, "Seconds that AReaL's data service may take to start.", above=0)


@dataclass
class ValidDatasetConfig(TrainDatasetConfig):
    """The held-out rows for evaluation."""

    split: str = setting("test", "Split of the dataset.")
    shuffle: bool = setting(False, "Has no effect: an evaluation uses the rows in file order.")
    drop_last: bool = setting(False, "Has no effect: an evaluation uses all rows.")


@dataclass
class FrequencyConfig:
    """Intervals of an action, such as saving or evaluating. The action runs whenever one of the intervals (in epochs, steps or
    seconds) has passed.
    """

    experiment_name: str = setting(
        "", "Experiment name. Set the top-level setting `experiment_name` instead.", inherits="experiment_name"
    )
    trial_name: str = setting("", "Trial name. Set the top-level setting `trial_name` instead.", inherits="trial_name")
    fileroot: str = setting(
        "", "Root folder of the run's files.", inherits="cluster.fileroot", shown="cluster.fileroot"
    )
    freq_epochs: int | None = setting(
        None, "Run the action every N epochs (null: epochs do not trigger the action).", minimum=1
    )
    freq_steps: int | None = setting(
        None, "Run the action every N steps (null: steps do not trigger the action).", minimum=1
    )
    freq_secs: int | None = setting(
        None, "Run the action every N seconds (null: time does not trigger the action).", minimum=1
    )

    @property
    def has_frequency(self) -> bool:
        """Whether ``freq_epochs``, ``freq_steps`` or ``freq_secs`` is set."""
        return (self.freq_epochs, self.freq_steps, self.freq_secs) != (None, None, None)


@dataclass
class SaverConfig(FrequencyConfig):
    """Saving of models in Hugging Face format. The last model is always saved, unless `mode` is off."""

    mode: str = setting(
        "auto",
        "Write each model while training waits (sync), write a copy of the model in the background (async), or save "
        "no models (off). auto: async if the model is on one device and has no adapter, else sync.",
        choices=("auto", "sync", "async", SAVES_NOTHING),
    )

    def problems(self) -> Problems:
        """Yield the problems with settings of this section."""
        if self.mode == SAVES_NOTHING:
            because = f"with mode {SAVES_NOTHING}; remove the setting, or change mode"
            yield from ineffective(self, ("freq_epochs", "freq_steps", "freq_secs"), because)


@dataclass
class EvaluatorConfig(FrequencyConfig):
    """Evaluation on held-out rows."""

    eval_before_train: bool = setting(False, "Also evaluate before the first step.")
    keep_best: bool = setting(False, "Keep the checkpoint with the best evaluation (in the folder recover/best).")
    early_stop_patience: int | None = setting(
        None,
        "Stop the run after this many consecutive evaluations without a new best result. If null, the run "
        "never stops early.",
        minimum=1,
    )


@dataclass
class RecoverConfig(FrequencyConfig):
    """Recovery checkpoints, from which an interrupted run resumes."""

    mode: str = setting(
        "disabled",
        "Write recovery checkpoints, and resume from the newest checkpoint if one exists (on or auto), or do neither "
        "(off or disabled).",
        choices=("on", "off", "auto", "disabled"),
    )
    retries: int = setting(
        3, "Maximum number of restarts after engine failures. Restarts need recovery checkpoints.", minimum=0
    )
    no_save_optim: bool = setting(False, "Omit the optimizer states from recovery checkpoints.")
    no_load_optim: bool = setting(False, "Resume with new optimizer states instead of the saved states.")

    @property
    def enabled(self) -> bool:
        """Whether recovery checkpoints are written and read."""
        return self.mode in ("on", "auto")


@dataclass
class WandBConfig:
    """Weights & Biases."""

    mode: str = setting(
        "disabled",
        "Mode of Weights & Biases. true means online, and false means disabled.",
        choices=("online", "offline", "disabled", "shared"),
    )
    wandb_base_url: str = setting("", "Address of a self-hosted server.")
    wandb_api_key: str = setting("", "API key. If empty, WANDB_API_KEY or the key stored by `wandb login` applies.")
    entity: str | None = setting(None, "User or team.")
    project: str | None = setting(None, "Project (default: the name of the experiment).")
    name: str | None = setting(None, "Name of the run (default: the name of the trial).")
    job_type: str | None = setting(None, "Kind of run.")
    group: str | None = setting(None, "Group of runs (default: the names of experiment and trial).")
    notes: str | None = setting(None, "Free text.")
    tags: list[str] | None = setting(None, "Tags.")
    config: dict[str, Any] | None = setting(
        None, "Configuration to log (default: the configuration of the experiment)."
    )
    id_suffix: str | None = setting("train", "Suffix of the run's id, after the names of experiment and trial.")


@dataclass
class SwanlabConfig:
    """SwanLab."""

    project: str | None = setting(None, "Project (default: the name of the experiment).")
    name: str | None = setting(None, "Name of the run (default: the name of the trial).")
    config: dict[str, Any] | None = setting(
        None, "Configuration to log (default: the configuration of the experiment)."
    )
    logdir: str | None = setting(None, "Folder of local logs. If null, the logs are in the run directory.")
    mode: str = setting("disabled", "Where to log.", choices=("cloud", "local", "disabled", "offline"))
    api_key: str | None = setting(None, "API key for mode cloud.")


@dataclass
class TensorBoardConfig:
    """TensorBoard."""

    path: str | None = setting(None, "Folder of event files. If null, the files are in the run directory.")


@dataclass
class TrackioConfig:
    """Trackio."""

    mode: str = setting("disabled", "Where to log.", choices=("disabled", "online", "local"))
    project: str | None = setting(None, "Project (default: the name of the experiment).")
    name: str | None = setting(None, "Name of the run (default: the name of the trial).")
    space_id: str | None = setting(None, "Hugging Face Space for mode online.")


@dataclass
class MLflowConfig:
    """MLflow."""

    mode: str = setting("disabled", "Whether to log.", choices=("enabled", "disabled"))
    tracking_uri: str | None = setting(
        None,
        "Address of a server, or a database such as sqlite:////data/mlflow.db. If null, MLFLOW_TRACKING_URI "
        "applies, or else mlflow.db in the current folder.",
    )
    experiment: str | None = setting(None, "Experiment in MLflow (default: experiment_name).")
    name: str | None = setting(None, "Name of the run (default: the name of the trial).")


@dataclass
class StatsLoggerConfig:
    """Where statistics are logged."""

    experiment_name: str = setting(
        "", "Experiment name. Set the top-level setting `experiment_name` instead.", inherits="experiment_name"
    )
    trial_name: str = setting("", "Trial name. Set the top-level setting `trial_name` instead.", inherits="trial_name")
    fileroot: str = setting(
        "", "Root folder of the run's files.", inherits="cluster.fileroot", shown="cluster.fileroot"
    )
    wandb: WandBConfig = section(WandBConfig, "Weights & Biases.")
    swanlab: SwanlabConfig = section(SwanlabConfig, "SwanLab.")
    tensorboard: TensorBoardConfig = section(TensorBoardConfig, "TensorBoard.")
    trackio: TrackioConfig = section(TrackioConfig, "Trackio.")
    mlflow: MLflowConfig = section(MLflowConfig, "MLflow.")


@dataclass
class SessionTracerConfig:
    """Traces of rollout sessions."""

    enabled: bool = setting(False, "Write the traces to session_tracer/ in the run directory.")
    flush_threshold: int = setting(
        256, "Number of finished sessions that are written together. Values below 1 count as 1."
    )


@dataclass
class PerfTracerConfig:
    """Chrome traces of the trainer process."""

    experiment_name: str = setting(
        "", "Experiment name. Set the top-level setting `experiment_name` instead.", inherits="experiment_name"
    )
    trial_name: str = setting("", "Trial name. Set the top-level setting `trial_name` instead.", inherits="trial_name")
    fileroot: str = setting(
        "", "Root folder of the run's files.", inherits="cluster.fileroot", shown="cluster.fileroot"
    )
    enabled: bool = setting(False, "Write traces.")
    save_interval: int = setting(1, "Write the traces every N steps. Values below 1 count as 1.")
    profile_steps: list[int] | None = setting(
        None, "Steps to record with PyTorch's profiler, counted from 0.", minimum=0
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
        "Reward function, as file.py:NAME or module.NAME. The call is fn(prompt, completion, prompt_ids, "
        "completion_ids, **row).",
    )
    weights: dict[str, Any] = setting(
        {}, "Weights of the reward parts that fn returns. The default weight of a part is 1."
    )
    normalize_parts: bool = setting(
        False, "Standardize each reward part over the samples of a prompt before weighting (GDPO)."
    )
    path: str = setting(
        "",
        "Reward model to use instead of the function fn: a folder or a repo id. Only the workflow rlvr supports a reward "
        "model.",
    )
    on_error: str = setting(
        "drop",
        "Action if fn raises an error or every attempt times out: end the run (stop) or discard the episode "
        "(drop). With drop, the run ends only after many consecutive failures.",
        choices=("drop", "stop"),
    )
    timeout_seconds: float = setting(
        15.0,
        "Timeout in seconds of one reward call. After a timeout, areno kills and replaces the worker process.",
        above=0,
    )
    max_retries: int = setting(
        3, "Maximum number of retries of a reward call after a timeout or a crash of the worker.", minimum=0
    )
    max_workers: int | None = setting(
        None, "Number of worker processes. If null, areno starts one process per two CPU cores.", minimum=1
    )

    def problems(self) -> Problems:
        """Yield the problem with ``weights``, if any."""
        try:
            part_weights(self.weights)
        except UsageError as error:
            yield "weights", str(error)


@dataclass
class WorkflowConfig:
    """The workflow that runs the episodes. A workflow that a program passes to the trainer takes precedence."""

    path: str = setting(
        "rlvr", "The workflow: rlvr, multi_turn, agent, or your own class as file.py:NAME or module.NAME."
    )
    kwargs: dict[str, Any] = setting({}, "Arguments of the workflow, such as max_turns and turn_discount.")
    dynamic_filter_fn: str = setting(
        "",
        "Filter function, as file.py:NAME or module.NAME. The function gets a group's samples as one "
        "dictionary of tensors, and returns whether to train on the group. If empty, there is no filter function.",
    )
