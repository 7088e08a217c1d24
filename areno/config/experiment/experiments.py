"""The configurations of whole experiments: PPO and its family, SFT, reward model, DPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areno.config.experiment.engine_sections import (
    NO_OFFLOAD,
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

    experiment_name: str = setting("", required=True, help="Name of the experiment, without _ and /.")
    trial_name: str = setting("", required=True, help="Name of the trial, without - and /.")
    cluster: ClusterSpecConfig = section(ClusterSpecConfig, help="The machines, and the folder that they share.")
    allocation_mode: str = setting(
        "", help="All backends in one text, such as areno:d1+fsdp:d1; it is translated to each section's backend."
    )
    seed: int = setting(1, minimum=0, maximum=2**32 - 1, help="Fixes the data order and every random draw.")
    enable_offload: bool = setting(
        False, help="Let engines give device memory back while others compute.", refused=NO_OFFLOAD
    )
    total_train_epochs: int = setting(1, minimum=1, help="Passes over the training rows.")
    total_train_steps: int | None = setting(None, minimum=1, help="End after so many steps; null goes by epochs.")
    total_train_n_seqs: int | None = setting(
        None, minimum=1, help="End after the step in which so many sequences were trained on; null goes by epochs."
    )
    tokenizer_path: str = setting(
        "", inherits="actor.path", shown="actor.path", help="Folder or repo id of the tokenizer."
    )
    train_dataset: TrainDatasetConfig = section(TrainDatasetConfig, help="The rows to train on.")
    valid_dataset: ValidDatasetConfig | None = section(None, help="The held-out rows; null evaluates nothing.")
    saver: SaverConfig = section(SaverConfig, help="Checkpoints to keep.")
    evaluator: EvaluatorConfig = section(EvaluatorConfig, help="When to evaluate.")
    stats_logger: StatsLoggerConfig = section(StatsLoggerConfig, help="Where statistics go.")
    perf_tracer: PerfTracerConfig | None = section(None, help="Traces of what each process does; null writes none.")
    memory_profiler: MemoryProfilerConfig | None = section(None, help="Snapshots of CUDA memory; null takes none.")
    recover: RecoverConfig = section(RecoverConfig, help="Restart points.")
    sglang: SGLangConfig = section(SGLangConfig, help="SGLang servers.")
    vllm: vLLMConfig = section(vLLMConfig, help="vLLM servers.")
    scheduler: SchedulerConfig = section(SchedulerConfig, help="Who starts the worker processes.")
    launcher: dict[str, Any] = setting(
        {},
        help="Resources for the launchers of earlier versions.",
        no_effect="the scheduler of this machine needs no launcher",
    )

    @classmethod
    def dependent_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that depend on ``given``, the settings of the file and the overrides; all by dotted path."""
        return {}


@dataclass
class PPOConfig(BaseExperimentConfig):
    """PPO, GRPO and the other policy-gradient algorithms: the knobs of ``actor`` make the difference."""

    gconfig: GenerationHyperparameters = section(GenerationHyperparameters, help="How answers are sampled.")
    eval_gconfig: GenerationHyperparameters | None = section(
        None, help="How answers are sampled in evaluation; null takes gconfig."
    )
    rollout: InferenceEngineConfig = section(InferenceEngineConfig, help="The engine that generates.")
    actor: PPOActorConfig = section(PPOActorConfig, help="The policy.")
    ref: PPOActorConfig | None = section(None, help="A frozen policy that the actor is held to; null has none.")
    critic: PPOCriticConfig | None = section(None, help="A value model; null has none.")
    teacher: TeacherConfig | None = section(None, help="A policy to learn from; null has none.")
    async_training: bool | None = setting(
        None,
        help="Of earlier versions: must agree with rollout.max_head_offpolicyness, which decides; null asks nothing.",
    )
    dynamic_bs: bool = setting(
        False, help="End a batch when accepted and rejected groups together make batch_size, and train on fewer."
    )
    success_rate_lb: float | None = setting(
        None, minimum=0, maximum=1, help="Leave out prompts whose mean reward is below this; null sets no bound."
    )
    success_rate_ub: float | None = setting(
        None, minimum=0, maximum=1, help="Leave out prompts whose mean reward is above this; null sets no bound."
    )
    reward: RewardConfig = section(RewardConfig, help="The reward function and its deadline, or the reward model.")
    workflow: WorkflowConfig = section(WorkflowConfig, help="How a prompt becomes a trajectory.")

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

    actor: TrainEngineConfig = section(TrainEngineConfig, help="The model.")


@dataclass
class RWConfig(BaseExperimentConfig):
    """Training a reward model on pairs."""

    actor: TrainEngineConfig = section(TrainEngineConfig, help="The model; needs is_critic.")


@dataclass
class DPOConfig(BaseExperimentConfig):
    """Learning from pairs without a reward model: DPO, IPO."""

    actor: DPOEngineConfig = section(DPOEngineConfig, help="The policy.")
    ref: DPOEngineConfig = section(DPOEngineConfig, help="The frozen policy that it starts from.")


EXPERIMENTS: dict[str, type[BaseExperimentConfig]] = {
    "rl": GRPOConfig,
    "sft": SFTConfig,
    "rw": RWConfig,
    "dpo": DPOConfig,
}
"""The configuration class of each ``train_dataset.type``."""
