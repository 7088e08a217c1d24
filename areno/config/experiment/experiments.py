"""Configurations of experiments: PPO and its variants, SFT, reward models and DPO."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areno.config.experiment.backend_sections import SGLangConfig, vLLMConfig
from areno.config.experiment.engine_sections import (
    DPOEngineConfig,
    PPOActorConfig,
    PPOCriticConfig,
    TeacherConfig,
    TrainEngineConfig,
)
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
from areno.config.experiment.setting_declaration import section, setting
from areno.config.experiment.worker_sections import ClusterSpecConfig, SchedulerConfig


@dataclass
class BaseExperimentConfig:
    """Settings that all kinds of experiments share."""

    experiment_name: str = setting("", "Name of the experiment; must not contain _ or /.", required=True)
    trial_name: str = setting("", "Name of the trial; must not contain - or /.", required=True)
    cluster: ClusterSpecConfig = section(ClusterSpecConfig, "The machines and their shared folder.")
    allocation_mode: str = setting(
        "", "Backends of several sections in one string, such as areno:d1+fsdp:d1 for rollout and actor."
    )
    seed: int = setting(1, "Seed of the data order and all sampling.", minimum=0, maximum=2**32 - 1)
    enable_offload: bool = setting(
        False,
        "GPU only: let engines keep data in host memory.",
        no_effect="the setting offload of each engine and optimizer decides which data is kept in host memory",
    )
    total_train_epochs: int = setting(1, "Passes over the training rows.", minimum=1)
    total_train_steps: int | None = setting(None, "Stop after this many steps; null trains for all epochs.", minimum=1)
    total_train_n_seqs: int | None = setting(
        None,
        "Stop after the step at which this many sequences have been trained on; null trains for all epochs.",
        minimum=1,
    )
    tokenizer_path: str = setting(
        "", "Tokenizer, which must be the model's own tokenizer.", inherits="actor.path", shown="actor.path"
    )
    train_dataset: TrainDatasetConfig = section(TrainDatasetConfig, "The rows to train on.")
    valid_dataset: ValidDatasetConfig | None = section(None, "The held-out rows; null disables evaluation.")
    saver: SaverConfig = section(SaverConfig, "Saved models.")
    evaluator: EvaluatorConfig = section(EvaluatorConfig, "When to evaluate.")
    stats_logger: StatsLoggerConfig = section(StatsLoggerConfig, "Statistics loggers.")
    perf_tracer: PerfTracerConfig | None = section(
        None, "Performance traces of the trainer's process; null writes no traces."
    )
    memory_profiler: MemoryProfilerConfig | None = section(
        None, "CUDA memory snapshots of the actor's ranks; null takes none."
    )
    recover: RecoverConfig = section(RecoverConfig, "Recovery checkpoints.")
    sglang: SGLangConfig = section(SGLangConfig, "SGLang servers.")
    vllm: vLLMConfig = section(vLLMConfig, "vLLM servers.")
    scheduler: SchedulerConfig = section(SchedulerConfig, "The scheduler that starts worker processes.")
    launcher: dict[str, Any] = setting(
        {},
        "Resources for the launchers of earlier AReaL versions.",
        no_effect="areno's schedulers need no launcher",
    )
    explicit_paths = frozenset[str]()
    """Dotted paths of the settings in the tree from which the configuration was built. This attribute is not a setting."""

    @classmethod
    def dependent_defaults(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on ``values``, the settings that the user sets. Both dicts are keyed by dotted path."""
        return {}


@dataclass
class PPOConfig(BaseExperimentConfig):
    """PPO (with ``critic``), GRPO and other policy-gradient algorithms, selected by settings of ``actor``."""

    gconfig: GenerationHyperparameters = section(GenerationHyperparameters, "Sampling of answers.")
    eval_gconfig: GenerationHyperparameters | None = section(
        None, "Sampling of answers in evaluation; null uses gconfig."
    )
    rollout: InferenceEngineConfig = section(InferenceEngineConfig, "The inference engine.")
    actor: PPOActorConfig = section(PPOActorConfig, "The policy.")
    ref: PPOActorConfig | None = section(None, "A frozen reference policy for KL terms; null for no reference.")
    critic: PPOCriticConfig | None = section(None, "A value model; null for no critic.")
    teacher: TeacherConfig | None = section(None, "A teacher for distillation; null for no teacher.")
    async_training: bool | None = setting(
        None,
        "Deprecated. This setting must agree with rollout.max_head_offpolicyness, which takes effect instead; null "
        "skips the check.",
    )
    dynamic_bs: bool = setting(
        False,
        "Complete a batch when accepted and rejected groups together reach batch_size, and train on the accepted "
        "groups only.",
    )
    success_rate_lb: float | None = setting(
        None, "Filter out prompts whose mean reward is below this value; null sets no bound.", minimum=0, maximum=1
    )
    success_rate_ub: float | None = setting(
        None, "Filter out prompts whose mean reward is above this value; null sets no bound.", minimum=0, maximum=1
    )
    reward: RewardConfig = section(RewardConfig, "The reward function and its timeout, or the reward model.")
    workflow: WorkflowConfig = section(WorkflowConfig, "The workflow that turns a prompt into a trajectory.")

    @property
    def workflow_section(self) -> WorkflowConfig:
        """The section ``workflow``. A subclass may use a string instead, which becomes the section's ``path``."""
        value: Any = self.workflow
        if isinstance(value, WorkflowConfig):
            return value
        return WorkflowConfig(path=value) if value and isinstance(value, str) else WorkflowConfig()

    @property
    def built_in_workflow(self) -> str:
        """The built-in workflow, ``rlvr`` or ``multi_turn``. Empty if an agent or the user's own workflow runs the episodes."""
        path = self.workflow_section.path
        return "" if self.rollout.agent.agent_cls_path or path not in ("rlvr", "multi_turn") else path

    @property
    def reward_section(self) -> RewardConfig:
        """The section ``reward``. A subclass may use a string instead, which becomes the section's ``fn``."""
        value: Any = self.reward
        if isinstance(value, RewardConfig):
            return value
        return RewardConfig(fn=value) if isinstance(value, str) else RewardConfig()

    @classmethod
    def dependent_defaults(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Set the default of ``actor.kl_ctl`` to 0 if there is no reference or ``actor.kl_loss_coef`` is set."""
        has_ref = any(
            (path == "ref" and value is not None) or path.startswith("ref.") for path, value in values.items()
        )
        return {} if has_ref and "actor.kl_loss_coef" not in values else {"actor.kl_ctl": 0.0}


@dataclass
class GRPOConfig(PPOConfig):
    """PPOConfig under the name that most examples use."""


@dataclass
class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning."""

    actor: TrainEngineConfig = section(TrainEngineConfig, "The model.")


@dataclass
class RWConfig(BaseExperimentConfig):
    """Reward-model training on preference pairs."""

    actor: TrainEngineConfig = section(TrainEngineConfig, "The model; needs is_critic=true.")


@dataclass
class DPOConfig(BaseExperimentConfig):
    """Preference optimization without a reward model, such as DPO and IPO."""

    actor: DPOEngineConfig = section(DPOEngineConfig, "The policy.")
    ref: DPOEngineConfig = section(DPOEngineConfig, "The frozen reference policy.")


EXPERIMENTS: dict[str, type[BaseExperimentConfig]] = {
    "rl": GRPOConfig,
    "sft": SFTConfig,
    "rw": RWConfig,
    "dpo": DPOConfig,
}
"""The configuration class of each ``train_dataset.type``."""
