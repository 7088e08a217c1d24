"""Sections around training: data, saving, evaluation, recovery, statistics, traces, rewards, workflow."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from areno.config.experiment.settings import Problems, idle, section, setting
from areno.config.experiment.worker_sections import SchedulingSpec
from areno.config.reward_weights import part_weights
from areno.errors import UsageError

SAVES_NOTHING = "off"
"""Mode of a saver that saves nothing."""

LOADER = "loader"
"""Key of ``dataset_kwargs`` that names the user's own loader."""

_READS_ROWS = "the trainer's process reads the rows"
_service = partial(setting, no_effect=_READS_ROWS)


@dataclass
class TrainDatasetConfig:
    """The rows to train on."""

    split: str = setting("train", "Split of the data set.")
    path: str = setting("", "Data file, folder or hub reference.", required=True)
    type: str = setting("", "What the rows are for: rl, sft, rw or dpo.", required=True)
    batch_size: int = setting(1, "Rows per step; prompts for RL, pairs for rw and dpo.", minimum=1)
    shuffle: bool = setting(True, "New random order each epoch, drawn from seed.")
    pin_memory: bool = _service(False, "Hold batches in page-locked memory.")
    num_workers: int = _service(0, "Processes that read rows ahead; 0 reads in the trainer.", minimum=0)
    num_dataset_workers: int = _service(1, "Processes of a data service.", minimum=1)
    drop_last: bool = setting(True, "Leave out an incomplete last batch.")
    max_length: int | None = setting(None, "Longer rows, in tokens, are left out and counted.", minimum=1)
    dataset_kwargs: dict[str, Any] = setting({}, "Further arguments of the data set's loader.")
    scheduling_spec: SchedulingSpec | None = section(
        None, "What a data service's workers need; null has none.", no_effect=_READS_ROWS
    )
    setup_timeout: float = _service(120.0, "Seconds that a data service may take to load.", above=0)


@dataclass
class ValidDatasetConfig(TrainDatasetConfig):
    """The held-out rows."""

    split: str = setting("test", "Split of the data set.")
    shuffle: bool = setting(False, "New random order each epoch, drawn from seed.")
    drop_last: bool = setting(False, "Leave out an incomplete last batch.")


@dataclass
class FrequencyConfig:
    """When something happens: whichever of the three comes first, each counted on its own."""

    experiment_name: str = setting("", "Written once, at the top.", inherits="experiment_name")
    trial_name: str = setting("", "Written once, at the top.", inherits="trial_name")
    fileroot: str = setting("", "Root of its files.", inherits="cluster.fileroot", shown="cluster.fileroot")
    freq_epochs: int | None = setting(None, "Every so many epochs; null does not count them.", minimum=1)
    freq_steps: int | None = setting(None, "Every so many steps; null does not count them.", minimum=1)
    freq_secs: int | None = setting(None, "Every so many seconds; null does not count them.", minimum=1)

    @property
    def has_frequency(self) -> bool:
        """Whether it happens at all."""
        return (self.freq_epochs, self.freq_steps, self.freq_secs) != (None, None, None)


@dataclass
class SaverConfig(FrequencyConfig):
    """Checkpoints to keep, in Hugging Face format; the last model is saved also without a frequency."""

    mode: str = setting(
        "auto",
        "sync writes before training goes on, async in the background; auto is async where a model can be copied; off "
        "saves nothing, not even the last model.",
        choices=("auto", "sync", "async", SAVES_NOTHING),
    )

    def problems(self) -> Problems:
        """What is wrong within the section."""
        if self.mode == SAVES_NOTHING:
            because = f"with mode {SAVES_NOTHING}; leave one of the two out"
            yield from idle(self, ("freq_epochs", "freq_steps", "freq_secs"), because)


@dataclass
class EvaluatorConfig(FrequencyConfig):
    """Evaluation on the held-out rows."""

    eval_before_train: bool = setting(False, "Evaluate once before the first step.")
    keep_best: bool = setting(False, "Keep the checkpoint with the best evaluation, as recover/best.")
    early_stop_patience: int | None = setting(
        None, "End the run after so many evaluations in a row that were not the best one; null never does.", minimum=1
    )


@dataclass
class RecoverConfig(FrequencyConfig):
    """Restart points: everything that an interrupted run needs to go on."""

    mode: str = setting(
        "disabled",
        "on and auto go on from the last restart point if there is one; off and disabled never do.",
        choices=("on", "off", "auto", "disabled"),
    )
    retries: int = setting(3, "How often a run that failed is started again.", minimum=0)
    no_save_optim: bool = setting(False, "Leave the optimizer out of restart points.")
    no_load_optim: bool = setting(False, "Go on with a fresh optimizer.")

    @property
    def enabled(self) -> bool:
        """Whether restart points are written and looked for."""
        return self.mode in ("on", "auto")


@dataclass
class WandBConfig:
    """Weights & Biases."""

    mode: str = setting(
        "disabled", "true means online, false disabled.", choices=("online", "offline", "disabled", "shared")
    )
    wandb_base_url: str = setting("", "Address of a server of your own.")
    wandb_api_key: str = setting("", "API key; empty takes WANDB_API_KEY or what `wandb login` stored.")
    entity: str | None = setting(None, "User or team.")
    project: str | None = setting(None, "Project; null takes the experiment's name.")
    name: str | None = setting(None, "Name of the run; null takes the trial's name.")
    job_type: str | None = setting(None, "Kind of run.")
    group: str | None = setting(None, "Group of runs; null takes experiment and trial.")
    notes: str | None = setting(None, "Free text.")
    tags: list[str] | None = setting(None, "Tags.")
    config: dict[str, Any] | None = setting(None, "What to show as configuration; null shows this one.")
    id_suffix: str | None = setting("train", "End of the run's id, after experiment and trial.")


@dataclass
class SwanlabConfig:
    """SwanLab."""

    project: str | None = setting(None, "Project; null takes the experiment's name.")
    name: str | None = setting(None, "Name of the run; null takes the trial's name.")
    config: dict[str, Any] | None = setting(None, "What to show as configuration; null shows this one.")
    logdir: str | None = setting(None, "Folder of local logs; null is in the run directory.")
    mode: str = setting("disabled", "Where it logs to.", choices=("cloud", "local", "disabled", "offline"))
    api_key: str | None = setting(None, "API key of mode cloud.")


@dataclass
class TensorBoardConfig:
    """TensorBoard."""

    path: str | None = setting(None, "Folder of event files; null writes them into the run directory.")


@dataclass
class TrackioConfig:
    """Trackio."""

    mode: str = setting("disabled", "Where it logs to.", choices=("disabled", "online", "local"))
    project: str | None = setting(None, "Project; null takes the experiment's name.")
    name: str | None = setting(None, "Name of the run; null takes the trial's name.")
    space_id: str | None = setting(None, "Hugging Face Space of mode online.")


@dataclass
class StatsLoggerConfig:
    """Where statistics go besides the log."""

    experiment_name: str = setting("", "Written once, at the top.", inherits="experiment_name")
    trial_name: str = setting("", "Written once, at the top.", inherits="trial_name")
    fileroot: str = setting("", "Root of its files.", inherits="cluster.fileroot", shown="cluster.fileroot")
    wandb: WandBConfig = section(WandBConfig, "Weights & Biases.")
    swanlab: SwanlabConfig = section(SwanlabConfig, "SwanLab.")
    tensorboard: TensorBoardConfig = section(TensorBoardConfig, "TensorBoard.")
    trackio: TrackioConfig = section(TrackioConfig, "Trackio.")


@dataclass
class SessionTracerConfig:
    """A record of each rollout session's life."""

    enabled: bool = setting(False, "Write sessions.jsonl.")
    flush_threshold: int = setting(256, "Write after so many finished sessions; 0 and less mean 1.")


@dataclass
class PerfTracerConfig:
    """A Chrome trace of what each process does when."""

    experiment_name: str = setting("", "Written once, at the top.", inherits="experiment_name")
    trial_name: str = setting("", "Written once, at the top.", inherits="trial_name")
    fileroot: str = setting("", "Root of its files.", inherits="cluster.fileroot", shown="cluster.fileroot")
    enabled: bool = setting(False, "Write traces.")
    save_interval: int = setting(1, "Write every so many steps; 0 and less mean 1.")
    profile_steps: list[int] | None = setting(None, "Steps that are also profiled by torch.", minimum=0)
    session_tracer: SessionTracerConfig | None = section(None, "A record of each session's life.")


@dataclass
class MemoryProfilerConfig:
    """Snapshots of CUDA memory."""

    profile_steps: list[int] = setting([], "Steps at which a snapshot is taken.", minimum=0)
    max_entries: int = setting(100_000, "Most events of a snapshot.", minimum=1)


@dataclass
class RewardConfig:
    """The reward function, for experiments that are run without a program of their own."""

    fn: str = setting("", "file.py:NAME or module.NAME; called as (prompt, completion, prompt_ids, ids, **row).")
    weights: dict[str, Any] = setting({}, "Weights of the named parts that fn returns; 1 where a part is not named.")
    normalize_parts: bool = setting(False, "Standardise each part among a prompt's samples, then weight it (GDPO).")
    path: str = setting(
        "", "Reward model in place of fn: folder or repo id. Scores the finished answers of workflow.path rlvr."
    )
    on_error: str = setting(
        "drop",
        "Where fn fails for good: leave the episode out, and stop after many in a row; or stop at once.",
        choices=("drop", "stop"),
    )
    timeout_seconds: float = setting(15.0, "Seconds for one reward; then its worker is killed.", above=0)
    max_retries: int = setting(3, "How often a reward that was killed is tried again.", minimum=0)
    max_workers: int | None = setting(None, "Worker processes; null takes half of the cores.", minimum=1)

    def problems(self) -> Problems:
        """What is wrong with the weights."""
        try:
            part_weights(self.weights)
        except UsageError as error:
            yield "weights", str(error)


@dataclass
class WorkflowConfig:
    """The workflow, for experiments that are run without a program of their own."""

    path: str = setting("rlvr", "rlvr, multi_turn, agent, or a class as file.py:NAME or module.NAME.")
    kwargs: dict[str, Any] = setting({}, "Its further arguments, such as max_turns and turn_discount.")
    dynamic_filter_fn: str = setting(
        "",
        "file.py:NAME or module.NAME; gets a group's trajectory, and says whether it is trained on. Empty keeps all.",
    )
