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
    """Settings of every experiment."""

    experiment_name: str = setting("", "Name of the experiment. The name must not contain _ or /.", required=True)
    trial_name: str = setting("", "Name of the trial. The name must not contain - or /.", required=True)
    cluster: ClusterSpecConfig = section(ClusterSpecConfig, "The machines and the folder that they share.")
    allocation_mode: str = setting(
        "",
        "Several `backend` settings in one string. For example, areno:d1+fsdp:d1 sets rollout.backend to areno:d1 and "
        "actor.backend to fsdp:d1.",
    )
    seed: int = setting(1, "Random seed for the data order and sampling.", minimum=0, maximum=2**32 - 1)
    enable_offload: bool = setting(
        False,
        "Allow engines on GPUs to offload data to host memory.",
        no_effect="each engine and each optimizer has its own `offload` setting",
    )
    total_train_epochs: int = setting(1, "Number of passes over the training rows.", minimum=1)
    total_train_steps: int | None = setting(
        None, "Stop after this many steps. If null, train for all epochs.", minimum=1
    )
    total_train_n_seqs: int | None = setting(
        None,
        "Number of sequences to train on. The run stops after the step that reaches this number. If null, "
        "train for all epochs.",
        minimum=1,
    )
    tokenizer_path: str = setting(
        "",
        "Path of the tokenizer. The path must equal actor.path, because areno uses only the tokenizer in the model's folder.",
        inherits="actor.path",
        shown="actor.path",
    )
    train_dataset: TrainDatasetConfig = section(TrainDatasetConfig, "The rows to train on.")
    valid_dataset: ValidDatasetConfig | None = section(
        None, "Held-out rows for evaluation. If null, the run has no evaluation."
    )
    saver: SaverConfig = section(SaverConfig, "How and when to save models.")
    evaluator: EvaluatorConfig = section(EvaluatorConfig, "When to evaluate.")
    stats_logger: StatsLoggerConfig = section(StatsLoggerConfig, "Where to log statistics.")
    perf_tracer: PerfTracerConfig | None = section(
        None, "Performance traces of the trainer process. If null, no traces are written."
    )
    memory_profiler: MemoryProfilerConfig | None = section(
        None, "CUDA memory snapshots of the actor's ranks. If null, no snapshots are taken."
    )
    recover: RecoverConfig = section(RecoverConfig, "Recovery checkpoints.")
    sglang: SGLangConfig = section(SGLangConfig, "Options of SGLang servers.")
    vllm: vLLMConfig = section(vLLMConfig, "Options of vLLM servers.")
    scheduler: SchedulerConfig = section(SchedulerConfig, "The scheduler that starts worker processes.")
    launcher: dict[str, Any] = setting(
        {},
        "Resources for the launchers of earlier AReaL versions.",
        no_effect="areno's schedulers need no launcher",
    )
    explicit_paths = frozenset[str]()
    """Dotted paths of the settings that were set when the configuration was built. This attribute is not a setting."""

    @classmethod
    def dependent_defaults(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that depend on ``values``, the settings that the user set.

        The keys of ``values`` and of the returned dict are dotted paths.
        """
        return {}


@dataclass
class PPOConfig(BaseExperimentConfig):
    """PPO, GRPO and other policy-gradient algorithms. The settings of ``actor`` select the algorithm. PPO also needs a
    ``critic``.
    """

    gconfig: GenerationHyperparameters = section(GenerationHyperparameters, "Sampling parameters for training.")
    eval_gconfig: GenerationHyperparameters | None = section(
        None, "Sampling parameters for evaluation. If null, gconfig applies."
    )
    rollout: InferenceEngineConfig = section(InferenceEngineConfig, "The inference engine.")
    actor: PPOActorConfig = section(PPOActorConfig, "The trained policy.")
    ref: PPOActorConfig | None = section(
        None, "A frozen reference policy for KL terms. If null, there is no reference."
    )
    critic: PPOCriticConfig | None = section(None, "A value model. If null, there is no critic.")
    teacher: TeacherConfig | None = section(None, "A teacher model for distillation. If null, there is no teacher.")
    async_training: bool | None = setting(
        None,
        "Deprecated: use rollout.max_head_offpolicyness instead. If set, async_training must be true when "
        "rollout.max_head_offpolicyness is above 0, and false otherwise.",
    )
    dynamic_bs: bool = setting(
        False,
        "Do not generate replacements for groups that a filter rejects. Batches then contain only the accepted "
        "groups and differ in size.",
    )
    success_rate_lb: float | None = setting(
        None,
        "Filter out prompts whose mean reward is below this value. If null, there is no lower bound.",
        minimum=0,
        maximum=1,
    )
    success_rate_ub: float | None = setting(
        None,
        "Filter out prompts whose mean reward is above this value. If null, there is no upper bound.",
        minimum=0,
        maximum=1,
    )
    reward: RewardConfig = section(RewardConfig, "The reward function or the reward model.")
    workflow: WorkflowConfig = section(WorkflowConfig, "The workflow that turns a prompt into a trajectory.")

    @property
    def workflow_section(self) -> WorkflowConfig:
        """The section ``workflow``.

        If a subclass declares ``workflow`` as a string, the string is the ``path`` of the returned section.
        """
        value: Any = self.workflow
        if isinstance(value, WorkflowConfig):
            return value
        return WorkflowConfig(path=value) if value and isinstance(value, str) else WorkflowConfig()

    @property
    def built_in_workflow(self) -> str:
        """Name of the built-in workflow, ``rlvr`` or ``multi_turn``; empty if the user's workflow or an agent replaces it."""
        path = self.workflow_section.path
        return "" if self.rollout.agent.agent_cls_path or path not in ("rlvr", "multi_turn") else path

    @property
    def reward_section(self) -> RewardConfig:
        """The section ``reward``.

        If a subclass declares ``reward`` as a string, the string is the ``fn`` of the returned section.
        """
        value: Any = self.reward
        if isinstance(value, RewardConfig):
            return value
        return RewardConfig(fn=value) if isinstance(value, str) else RewardConfig()

    @classmethod
    def dependent_defaults(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the default 0 for ``actor.kl_ctl`` if ``ref`` is missing or ``actor.kl_loss_coef`` is set; else return {}."""
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

    actor: TrainEngineConfig = section(TrainEngineConfig, "The trained model.")


@dataclass
class RWConfig(BaseExperimentConfig):
    """Reward-model training on preference pairs."""

    actor: TrainEngineConfig = section(
        TrainEngineConfig, "The trained model. A reward model needs a scalar head, so is_critic must be true."
    )


@dataclass
class DPOConfig(BaseExperimentConfig):
    """Preference optimization without a reward model, such as DPO and IPO."""

    actor: DPOEngineConfig = section(DPOEngineConfig, "The trained policy.")
    ref: DPOEngineConfig = section(DPOEngineConfig, "The frozen reference policy.")


EXPERIMENTS: dict[str, type[BaseExperimentConfig]] = {
    "rl": GRPOConfig,
    "sft": SFTConfig,
    "rw": RWConfig,
    "dpo": DPOConfig,
}
"""The configuration class of each ``train_dataset.type``."""
