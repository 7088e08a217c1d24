"""The configurations of whole experiments: PPO and its family, SFT, reward model, DPO."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areno.config.experiment.engine_sections import (
    DPOEngineConfig,
    PPOActorConfig,
    PPOCriticConfig,
    TeacherConfig,
    TrainEngineConfig,
)
from areno.config.experiment.foreign_sections import SGLangConfig, vLLMConfig
from areno.config.experiment.generation_sections import GenerationHyperparameters, InferenceEngineConfig
from areno.config.experiment.run_sections import (
    EvaluatorConfig,
    MemoryProfilerConfig,
    PerfTracerConfig,
    RecoverConfig,
    RewardConfig,
    SaverConfig,
    StatsLoggerConfig,
    TrainDatasetConfig,
    ValidDatasetConfig,
    WorkflowConfig,
)
from areno.config.experiment.settings import section, setting
from areno.config.experiment.worker_sections import ClusterSpecConfig, SchedulerConfig


@dataclass
class BaseExperimentConfig:
    """What every experiment has."""

    experiment_name: str = setting("", "Name of the experiment, without _ and /.", required=True)
    trial_name: str = setting("", "Name of the trial, without - and /.", required=True)
    cluster: ClusterSpecConfig = section(ClusterSpecConfig, "The machines, and the folder that they share.")
    allocation_mode: str = setting(
        "", "All backends in one text, such as areno:d1+fsdp:d1; it is translated to each section's backend."
    )
    seed: int = setting(1, "Fixes the data order and every random draw.", minimum=0, maximum=2**32 - 1)
    enable_offload: bool = setting(
        False,
        "GPU only: let engines keep data in host memory.",
        no_effect="offload of each engine and of each optimizer says what waits in host memory",
    )
    total_train_epochs: int = setting(1, "Passes over the training rows.", minimum=1)
    total_train_steps: int | None = setting(None, "End after so many steps; null goes by epochs.", minimum=1)
    total_train_n_seqs: int | None = setting(
        None, "End after the step in which so many sequences were trained on; null goes by epochs.", minimum=1
    )
    tokenizer_path: str = setting("", "Folder or repo id of the tokenizer.", inherits="actor.path", shown="actor.path")
    train_dataset: TrainDatasetConfig = section(TrainDatasetConfig, "The rows to train on.")
    valid_dataset: ValidDatasetConfig | None = section(None, "The held-out rows; null evaluates nothing.")
    saver: SaverConfig = section(SaverConfig, "Checkpoints to keep.")
    evaluator: EvaluatorConfig = section(EvaluatorConfig, "When to evaluate.")
    stats_logger: StatsLoggerConfig = section(StatsLoggerConfig, "Where statistics go.")
    perf_tracer: PerfTracerConfig | None = section(None, "Traces of what each process does; null writes none.")
    memory_profiler: MemoryProfilerConfig | None = section(None, "Snapshots of CUDA memory; null takes none.")
    recover: RecoverConfig = section(RecoverConfig, "Restart points.")
    sglang: SGLangConfig = section(SGLangConfig, "SGLang servers.")
    vllm: vLLMConfig = section(vLLMConfig, "vLLM servers.")
    scheduler: SchedulerConfig = section(SchedulerConfig, "Who starts the worker processes.")
    launcher: dict[str, Any] = setting(
        {},
        "Resources for the launchers of earlier versions.",
        no_effect="the scheduler of this machine needs no launcher",
    )

    @classmethod
    def dependent_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that depend on ``given``, the settings of the file and the overrides; all by dotted path."""
        return {}


@dataclass
class PPOConfig(BaseExperimentConfig):
    """PPO, GRPO and the other policy-gradient algorithms: the knobs of ``actor`` make the difference."""

    gconfig: GenerationHyperparameters = section(GenerationHyperparameters, "How answers are sampled.")
    eval_gconfig: GenerationHyperparameters | None = section(
        None, "How answers are sampled in evaluation; null takes gconfig."
    )
    rollout: InferenceEngineConfig = section(InferenceEngineConfig, "The engine that generates.")
    actor: PPOActorConfig = section(PPOActorConfig, "The policy.")
    ref: PPOActorConfig | None = section(None, "A frozen policy that the actor is held to; null has none.")
    critic: PPOCriticConfig | None = section(None, "A value model; null has none.")
    teacher: TeacherConfig | None = section(None, "A policy to learn from; null has none.")
    async_training: bool | None = setting(
        None, "Of earlier versions: must agree with rollout.max_head_offpolicyness, which decides; null asks nothing."
    )
    dynamic_bs: bool = setting(
        False, "End a batch when accepted and rejected groups together make batch_size, and train on fewer."
    )
    success_rate_lb: float | None = setting(
        None, "Leave out prompts whose mean reward is below this; null sets no bound.", minimum=0, maximum=1
    )
    success_rate_ub: float | None = setting(
        None, "Leave out prompts whose mean reward is above this; null sets no bound.", minimum=0, maximum=1
    )
    reward: RewardConfig = section(RewardConfig, "The reward function and its deadline, or the reward model.")
    workflow: WorkflowConfig = section(WorkflowConfig, "How a prompt becomes a trajectory.")

    @property
    def workflow_section(self) -> WorkflowConfig:
        """``workflow``; where a subclass has a field of its own under that name, the defaults, with its text as the path."""
        own: Any = self.workflow
        if isinstance(own, WorkflowConfig):
            return own
        return WorkflowConfig(path=own) if own and isinstance(own, str) else WorkflowConfig()

    @property
    def reward_section(self) -> RewardConfig:
        """``reward``; where a subclass has a field of its own under that name, the defaults, with its text as the function."""
        own: Any = self.reward
        if isinstance(own, RewardConfig):
            return own
        return RewardConfig(fn=own) if isinstance(own, str) else RewardConfig()

    @classmethod
    def dependent_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Without a reference, or with one for the loss, there is no KL in the reward: an unset ``actor.kl_ctl`` is 0."""
        has_ref = any((path == "ref" and value is not None) or path.startswith("ref.") for path, value in given.items())
        return {} if has_ref and "actor.kl_loss_coef" not in given else {"actor.kl_ctl": 0.0}


@dataclass
class GRPOConfig(PPOConfig):
    """The same under the name that most examples use."""


@dataclass
class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning."""

    actor: TrainEngineConfig = section(TrainEngineConfig, "The model.")


@dataclass
class RWConfig(BaseExperimentConfig):
    """Training a reward model on pairs."""

    actor: TrainEngineConfig = section(TrainEngineConfig, "The model; needs is_critic.")


@dataclass
class DPOConfig(BaseExperimentConfig):
    """Learning from pairs without a reward model: DPO, IPO."""

    actor: DPOEngineConfig = section(DPOEngineConfig, "The policy.")
    ref: DPOEngineConfig = section(DPOEngineConfig, "The frozen policy that it starts from.")


EXPERIMENTS: dict[str, type[BaseExperimentConfig]] = {
    "rl": GRPOConfig,
    "sft": SFTConfig,
    "rw": RWConfig,
    "dpo": DPOConfig,
}
"""The configuration class of each ``train_dataset.type``."""
