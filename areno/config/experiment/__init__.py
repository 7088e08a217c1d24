"""Declares, loads and checks the configurations of experiments: YAML files and ``key=value`` overrides. Imports no torch.

Declarations:

- ``experiments``: the top level of each kind of experiment; ``setting_declaration``: how a setting is declared.
- ``engine_sections``: ``actor``, ``critic``, ``ref``, ``teacher``; ``generation_sections``: ``gconfig``, ``rollout``, agents.
- ``optimization_sections``: optimizer, microbatches and normalization, within the sections of models.
- ``run_sections``: data, saving, evaluation, logging, rewards; ``worker_sections``: cluster and scheduler.
- ``backend_sections``: ``sglang``, ``vllm``, ``archon``, ``megatron``.

Loading and checks:

- ``loader``: loads an experiment from a command line; ``tree``: untyped values; ``build``: typed values.
- ``legacy``: keys of AReaL's early command line; ``machine``: defaults that depend on the machine; ``saving``: writes YAML.
- ``checks``: checks of the experiment as a whole; ``path_checks``: checks of files; ``notices``: settings without effect.
- ``allocation``: the grammar of ``backend``; ``backends``: checks of backends; ``roles``: where each role runs.
- ``named_algorithm``: the setting ``actor.algorithm``; ``server_arguments``: command lines of inference servers.
"""

from areno.config.experiment.engine_sections import (
    DPOEngineConfig,
    PPOActorConfig,
    PPOCriticConfig,
    TeacherConfig,
    TrainEngineConfig,
)
from areno.config.experiment.experiments import (
    EXPERIMENTS,
    BaseExperimentConfig,
    DPOConfig,
    GRPOConfig,
    PPOConfig,
    RWConfig,
    SFTConfig,
)
from areno.config.experiment.generation_sections import AgentConfig, GenerationHyperparameters, InferenceEngineConfig
from areno.config.experiment.loader import (
    config_from,
    experiment_class,
    load_expr_config,
    parse_cli_args,
    settled,
    to_structured_cfg,
)
from areno.config.experiment.optimization_sections import MicroBatchSpec, NormConfig, OptimizerConfig
from areno.config.experiment.saving import conf_as_dict, save_config
from areno.config.policy_loss_options import RejectionSamplingConfig

__all__ = [
    "EXPERIMENTS",
    "AgentConfig",
    "BaseExperimentConfig",
    "DPOConfig",
    "DPOEngineConfig",
    "GRPOConfig",
    "GenerationHyperparameters",
    "InferenceEngineConfig",
    "MicroBatchSpec",
    "NormConfig",
    "OptimizerConfig",
    "PPOActorConfig",
    "PPOConfig",
    "PPOCriticConfig",
    "RWConfig",
    "RejectionSamplingConfig",
    "SFTConfig",
    "TeacherConfig",
    "TrainEngineConfig",
    "conf_as_dict",
    "config_from",
    "experiment_class",
    "load_expr_config",
    "parse_cli_args",
    "save_config",
    "settled",
    "to_structured_cfg",
]
