"""Sections around training: data, saving, evaluation, recovery, statistics, traces, rewards, workflow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from areno.config.experiment.settings import section, setting
from areno.config.experiment.worker_sections import SchedulingSpec

SAVES_NOTHING = "off"
"""Mode of a saver that saves nothing."""

LOADER = "loader"
"""Key of ``dataset_kwargs`` that names the user's own loader."""

_READS_ROWS = "the trainer's process reads the rows"
_service = partial(setting, no_effect=_READS_ROWS)


@dataclass
class TrainDatasetConfig:
    """The rows to train on."""

    split: str = setting("train", help="Split of the data set.")
    path: str = setting("", required=True, help="Data file, folder or hub reference.")
    type: str = setting("", required=True, help="What the rows are for: rl, sft, rw or dpo.")
    batch_size: int = setting(1, minimum=1, help="Rows per step; prompts for RL, pairs for rw and dpo.")
    shuffle: bool = setting(True, help="New random order each epoch, drawn from seed.")
    pin_memory: bool = _service(False, help="Hold batches in page-locked memory.")
    num_workers: int = _service(0, minimum=0, help="Processes that read rows ahead; 0 reads in the trainer.")
    num_dataset_workers: int = _service(1, minimum=1, help="Processes of a data service.")
    drop_last: bool = setting(True, help="Leave out an incomplete last batch.")
    max_length: int | None = setting(None, minimum=1, help="Longer rows, in tokens, are left out and counted.")
    dataset_kwargs: dict[str, Any] = setting({}, help="Further arguments of the data set's loader.")
    scheduling_spec: SchedulingSpec | None = section(
        None, help="What a data service's workers need; null has none.", no_effect=_READS_ROWS
    )
    setup_timeout: float = _service(120.0, above=0, help="Seconds that a data service may take to load.")


@dataclass
class ValidDatasetConfig(TrainDatasetConfig):
    """The held-out rows."""

    split: str = setting("test", help="Split of the data set.")
    shuffle: bool = setting(False, help="New random order each epoch, drawn from seed.")
    drop_last: bool = setting(False, help="Leave out an incomplete last batch.")


@dataclass
class FrequencyConfig:
    """When something happens: whichever of the three comes first, each counted on its own."""

    experiment_name: str = setting("", inherits="experiment_name", help="Written once, at the top.")
    trial_name: str = setting("", inherits="trial_name", help="Written once, at the top.")
    fileroot: str = setting("", inherits="cluster.fileroot", shown="cluster.fileroot", help="Root of its files.")
    freq_epochs: int | None = setting(None, minimum=1, help="Every so many epochs; null does not count them.")
    freq_steps: int | None = setting(None, minimum=1, help="Every so many steps; null does not count them.")
    freq_secs: int | None = setting(None, minimum=1, help="Every so many seconds; null does not count them.")

    @property
    def has_frequency(self) -> bool:
        """Whether it happens at all."""
        return (self.freq_epochs, self.freq_steps, self.freq_secs) != (None, None, None)


@dataclass
class SaverConfig(FrequencyConfig):
    """Checkpoints to keep, in Hugging Face format; the last model is saved also without a frequency."""

    mode: str = setting(
        "auto",
        choices=("auto", "sync", "async", SAVES_NOTHING),
        help="sync writes before training goes on, async in the background; auto is async where a model can be copied; off "
        "saves nothing, not even the last model.",
    )


@dataclass
class EvaluatorConfig(FrequencyConfig):
    """Evaluation on the held-out rows."""

    eval_before_train: bool = setting(False, help="Evaluate once before the first step.")
    keep_best: bool = setting(False, help="Keep the checkpoint with the best evaluation, as recover/best.")
    early_stop_patience: int | None = setting(
        None,
        minimum=1,
        help="End the run after so many evaluations in a row that were not the best one; null never does.",
    )


@dataclass
class RecoverConfig(FrequencyConfig):
    """Restart points: everything that an interrupted run needs to go on."""

    mode: str = setting(
        "disabled",
        choices=("on", "off", "auto", "disabled"),
        help="on and auto go on from the last restart point if there is one; off and disabled never do.",
    )
    retries: int = setting(3, minimum=0, help="How often a run that failed is started again.")
    no_save_optim: bool = setting(False, help="Leave the optimizer out of restart points.")
    no_load_optim: bool = setting(False, help="Go on with a fresh optimizer.")

    @property
    def enabled(self) -> bool:
        """Whether restart points are written and looked for."""
        return self.mode in ("on", "auto")


@dataclass
class WandBConfig:
    """Weights & Biases."""

    mode: str = setting(
        "disabled", choices=("online", "offline", "disabled", "shared"), help="true means online, false disabled."
    )
    wandb_base_url: str = setting("", help="Address of a server of your own.")
    wandb_api_key: str = setting("", help="API key; empty takes WANDB_API_KEY or what `wandb login` stored.")
    entity: str | None = setting(None, help="User or team.")
    project: str | None = setting(None, help="Project; null takes the experiment's name.")
    name: str | None = setting(None, help="Name of the run; null takes the trial's name.")
    job_type: str | None = setting(None, help="Kind of run.")
    group: str | None = setting(None, help="Group of runs; null takes experiment and trial.")
    notes: str | None = setting(None, help="Free text.")
    tags: list[str] | None = setting(None, help="Tags.")
    config: dict[str, Any] | None = setting(None, help="What to show as configuration; null shows this one.")
    id_suffix: str | None = setting("train", help="End of the run's id, after experiment and trial.")


@dataclass
class SwanlabConfig:
    """SwanLab."""

    project: str | None = setting(None, help="Project; null takes the experiment's name.")
    name: str | None = setting(None, help="Name of the run; null takes the trial's name.")
    config: dict[str, Any] | None = setting(None, help="What to show as configuration; null shows this one.")
    logdir: str | None = setting(None, help="Folder of local logs; null is in the run directory.")
    mode: str = setting("disabled", choices=("cloud", "local", "disabled", "offline"), help="Where it logs to.")
    api_key: str | None = setting(None, help="API key of mode cloud.")


@dataclass
class TensorBoardConfig:
    """TensorBoard."""

    path: str | None = setting(None, help="Folder of event files; null writes them into the run directory.")


@dataclass
class TrackioConfig:
    """Trackio."""

    mode: str = setting("disabled", choices=("disabled", "online", "local"), help="Where it logs to.")
    project: str | None = setting(None, help="Project; null takes the experiment's name.")
    name: str | None = setting(None, help="Name of the run; null takes the trial's name.")
    space_id: str | None = setting(None, help="Hugging Face Space of mode online.")


@dataclass
class StatsLoggerConfig:
    """Where statistics go besides the log."""

    experiment_name: str = setting("", inherits="experiment_name", help="Written once, at the top.")
    trial_name: str = setting("", inherits="trial_name", help="Written once, at the top.")
    fileroot: str = setting("", inherits="cluster.fileroot", shown="cluster.fileroot", help="Root of its files.")
    wandb: WandBConfig = section(WandBConfig, help="Weights & Biases.")
    swanlab: SwanlabConfig = section(SwanlabConfig, help="SwanLab.")
    tensorboard: TensorBoardConfig = section(TensorBoardConfig, help="TensorBoard.")
    trackio: TrackioConfig = section(TrackioConfig, help="Trackio.")


@dataclass
class SessionTracerConfig:
    """A record of each rollout session's life."""

    enabled: bool = setting(False, help="Write sessions.jsonl.")
    flush_threshold: int = setting(256, help="Write after so many finished sessions; 0 and less mean 1.")


@dataclass
class PerfTracerConfig:
    """A Chrome trace of what each process does when."""

    experiment_name: str = setting("", inherits="experiment_name", help="Written once, at the top.")
    trial_name: str = setting("", inherits="trial_name", help="Written once, at the top.")
    fileroot: str = setting("", inherits="cluster.fileroot", shown="cluster.fileroot", help="Root of its files.")
    enabled: bool = setting(False, help="Write traces.")
    save_interval: int = setting(1, help="Write every so many steps; 0 and less mean 1.")
    profile_steps: list[int] | None = setting(None, minimum=0, help="Steps that are also profiled by torch.")
    session_tracer: SessionTracerConfig | None = section(None, help="A record of each session's life.")


@dataclass
class MemoryProfilerConfig:
    """Snapshots of CUDA memory."""

    profile_steps: list[int] = setting([], minimum=0, help="Steps at which a snapshot is taken.")
    max_entries: int = setting(100_000, minimum=1, help="Most events of a snapshot.")


@dataclass
class RewardConfig:
    """The reward function, for experiments that are run without a program of their own."""

    fn: str = setting("", help="file.py:NAME or module.NAME; called as (prompt, completion, prompt_ids, ids, **row).")
    path: str = setting(
        "", help="Reward model in place of fn: folder or repo id. Scores the finished answers of workflow.path rlvr."
    )
    on_error: str = setting(
        "drop",
        choices=("drop", "stop"),
        help="Where fn fails for good: leave the episode out, and stop after many in a row; or stop at once.",
    )
    timeout_seconds: float = setting(15.0, above=0, help="Seconds for one reward; then its worker is killed.")
    max_retries: int = setting(3, minimum=0, help="How often a reward that was killed is tried again.")
    max_workers: int | None = setting(None, minimum=1, help="Worker processes; null takes half of the cores.")


@dataclass
class WorkflowConfig:
    """The workflow, for experiments that are run without a program of their own."""

    path: str = setting("rlvr", help="rlvr, multi_turn, agent, or a class as file.py:NAME or module.NAME.")
    kwargs: dict[str, Any] = setting({}, help="Its further arguments, such as max_turns and turn_discount.")
    dynamic_filter_fn: str = setting(
        "",
        help="file.py:NAME or module.NAME; gets a group's trajectory, and says whether it is trained on. Empty keeps all.",
    )
