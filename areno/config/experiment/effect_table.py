"""One row for each setting: the test that shows its effect, or the words with which it is refused. See `effects`.

Keys are ``Class.field``, with the class that declares the field first; ``Class.*`` stands for all fields of a class that
have no row of their own. Rows move from ``PENDING`` to ``EFFECTS`` when a test shows what they do.
"""

from __future__ import annotations

_SGLANG = "SGLang is not there yet; leave the section out (~sglang), and generate with rollout.backend=areno:dN"
_VLLM = "vLLM is not there yet; leave the section out (~vllm), and generate with rollout.backend=areno:dN"
_ARCHON = "the backend archon is not there yet; leave the section out, and train with fsdp:dN"
_MEGATRON = "the backend megatron is not there yet; leave the section out, and train with fsdp:dN or fsdp:dNtM"
_FP8 = "8-bit training is not there yet; leave it out, and train with dtype bfloat16"
_SLURM = "Slurm is not there yet; leave it out, and run on this machine with scheduler.type=local"
_RAY = "Ray is not there yet; leave it out, and run on this machine with scheduler.type=local"
_SERVICES = "services behind a gateway (_version v2) are not there yet; leave it out, and use _version v1"
_DATA_SERVICE = "a data service with workers of its own is not there yet; leave it out, the trainer reads the rows"
_FP16 = "training in fp16 with a loss scale is not there; leave it out, bfloat16 and float32 need none"
_REMOTE_SCHEDULER = "an external scheduling service is not there yet; leave it out, and use type local"
_REMOTE_REWARD = "an external reward service is not there yet; leave it out, and give a reward function"
_ZERO1 = "each rank holds whole weights and shards only the optimizer, so there is nothing to do; leave it out"
_OFFLOAD = (
    "moving parts to host memory is not there yet; leave it out, and use gradient_checkpointing or a smaller batch"
)
_STARTUP = "starting and loading have one limit; leave it out, and use setup_timeout"
_NAMES = "processes of one machine are the trainer's own and publish no addresses; leave it out"

REFUSED = {
    "SGLangConfig.*": _SGLANG,
    "vLLMConfig.*": _VLLM,
    "ArchonEngineConfig.*": _ARCHON,
    "ArchonFP8Config.*": _FP8,
    "MegatronEngineConfig.*": _MEGATRON,
    "DistributedDataParallelConfig.*": _MEGATRON,
    "FP8EngineConfig.*": _FP8,
    "BaseExperimentConfig.enable_offload": _OFFLOAD,
    "BaseExperimentConfig.memory_profiler": (
        "memory snapshots are not there yet; leave the section out, and see docs/memory.md for what a run needs"
    ),
    "MemoryProfilerConfig.*": "memory snapshots are not there yet; leave the section out",
    "TrainEngineConfig.use_kernels": "kernels of the hub in place of layers are not there yet; leave it out",
    "TrainEngineConfig.offload": _OFFLOAD,
    "TrainEngineConfig._version": _SERVICES,
    "TrainEngineConfig.admin_api_key": _SERVICES,
    "TrainEngineConfig.log_level": _SERVICES,
    "TrainEngineConfig.pad_to_maximum": "micro-batches are packed without padding; leave it out",
    "TrainEngineConfig.grad_reduce_dtype": "gradients are added up in float32 only; leave it out",
    "TrainEngineConfig.optimizer_dtype": "master weights and moments are float32 only; leave it out",
    "TrainEngineConfig.workers_ready_timeout": _STARTUP,
    "TeacherConfig.offload": _OFFLOAD,
    "FSDPEngineConfig.wrap_policy": _ZERO1,
    "FSDPWrapPolicy.*": _ZERO1,
    "FSDPEngineConfig.offload_params": _OFFLOAD,
    "FSDPEngineConfig.memory_efficient_load": "one rank that reads for all is not there yet; leave it out, each rank reads",
    "FSDPEngineConfig.per_layer_optim_step": _OFFLOAD,
    "FSDPEngineConfig.optim_step_prefetch_layers": _OFFLOAD,
    "FSDPEngineConfig.shard_vision_across_sp": "vision models are not there yet; leave it out",
    "OptimizerConfig.initial_loss_scale": _FP16,
    "OptimizerConfig.min_loss_scale": _FP16,
    "OptimizerConfig.loss_scale_window": _FP16,
    "OptimizerConfig.hysteresis": _FP16,
    "GenerationHyperparameters.use_beam_search": "beam search is not there; leave it out, and sample or use greedy",
    "InferenceEngineConfig.return_routed_experts": "expert routing is not returned yet; leave it out",
    "InferenceEngineConfig._version": _SERVICES,
    "InferenceEngineConfig.model": _SERVICES,
    "InferenceEngineConfig.routing_strategy": _SERVICES,
    "InferenceEngineConfig.poll_interval": _SERVICES,
    "InferenceEngineConfig.admin_api_key": _SERVICES,
    "InferenceEngineConfig.workers_ready_timeout": _STARTUP,
    "InferenceEngineConfig.pause_grace_period": (
        "a weight update stops generation between two tokens and drops no request, so nothing is waited for; leave it out"
    ),
    "InferenceEngineConfig.api_url": "generating with an outside server is not there yet; leave it out, and use areno:dN",
    "InferenceEngineConfig.provider_api_key": "generating with an outside server is not there yet; leave it out",
    "TrainDatasetConfig.pin_memory": "batches are token lists that need no page-locked memory; leave it out",
    "TrainDatasetConfig.num_workers": "rows are read in the trainer's process; leave it out",
    "TrainDatasetConfig.num_dataset_workers": _DATA_SERVICE,
    "TrainDatasetConfig.scheduling_spec": _DATA_SERVICE,
    "TrainDatasetConfig.setup_timeout": _DATA_SERVICE,
    "ClusterSpecConfig.n_nodes": "more than one machine is not there yet; use 1",
    "ClusterSpecConfig.cluster_name": "clusters are not there yet; leave it out, there is only this machine",
    "NameResolveConfig.nfs_record_root": _NAMES,
    "NameResolveConfig.etcd3_addr": "name resolving by etcd is not there yet; leave it out",
    "NameResolveConfig.ray_actor_name": "name resolving by Ray is not there yet; leave it out",
    "AgentConfig.admin_api_key": "only the trainer opens and ends sessions, so that no key is needed; leave it out",
    "SchedulerConfig.endpoint": _REMOTE_SCHEDULER,
    "SchedulerConfig.deploy_mode": _REMOTE_SCHEDULER,
    "SchedulerConfig.functioncall_service_domain": _REMOTE_REWARD,
    "SchedulerConfig.reward_functioncall_config": _REMOTE_REWARD,
    "SchedulerConfig.reward_model_path": _REMOTE_REWARD,
    "SchedulerConfig.reward_model_service_url": _REMOTE_REWARD,
    "SchedulingSpec.gpu": "pods are not there yet; leave it out, each worker takes the device of its rank",
    "SchedulingSpec.mem": "memory is not limited per worker yet; leave it out",
    "SchedulingSpec.port_count": "workers on one machine ask the system for ports as they need them; leave it out",
    "SchedulingSpec.image": "containers are not there yet; leave it out",
    "SchedulingSpec.task_type": "worker and engine are one process here; leave it out",
    "SchedulingSpec.cmd": "areno starts its workers itself; leave it out",
    "SchedulingSpec.srun_additional_args": _SLURM,
    "SchedulingSpec.additional_bash_cmds": _SLURM,
    "SchedulingSpec.container_type": _SLURM,
    "SchedulingSpec.mount": _SLURM,
    "SchedulingSpec.nodelist": _SLURM,
    "SchedulingSpec.exclude": _SLURM,
    "SchedulingSpec.ray_placement_strategy": _RAY,
}
"""Settings of which only the default is accepted."""

REFUSED_VALUES: dict[str, dict[str, str]] = {
    "NameResolveConfig.type": {
        "memory": _NAMES,
        "etcd3": "name resolving by etcd is not there yet; leave it out",
        "ray": "name resolving by Ray is not there yet; leave it out",
    },
    "SchedulerConfig.type": {
        "ray": "Ray is not there yet; use local, which runs on this machine",
        "slurm": "Slurm is not there yet; use local, which runs on this machine",
    },
    "OptimizerConfig.type": {
        "adam_bf16": "moments in bf16 are not there yet; use adam, whose moments are in fp32",
    },
    "AgentConfig.mode": {
        "online": "sessions from outside (online) are not there yet; use inline or subproc with an agent of yours",
    },
}
"""Single values that are refused, of settings that otherwise work."""

_CHECKS = "tests/config/experiment/test_checks.py::"
_LOADER = "tests/config/experiment/test_loader.py::"

EFFECTS: dict[str, str] = {
    "BaseExperimentConfig.experiment_name": _LOADER + "test_names_and_root_are_written_once",
    "BaseExperimentConfig.trial_name": _LOADER + "test_names_and_root_are_written_once",
    "BaseExperimentConfig.tokenizer_path": _LOADER + "test_an_unset_setting_takes_what_it_inherits",
    "BaseExperimentConfig.allocation_mode": _CHECKS + "test_allocation_mode_gives_each_role_its_backend",
    "TrainEngineConfig.experiment_name": _CHECKS + "test_a_section_cannot_have_another_name",
    "TrainEngineConfig.trial_name": _CHECKS + "test_a_section_cannot_have_another_name",
    "InferenceEngineConfig.experiment_name": _CHECKS + "test_a_section_cannot_have_another_name",
    "InferenceEngineConfig.trial_name": _CHECKS + "test_a_section_cannot_have_another_name",
    "InferenceEngineConfig.fileroot": _CHECKS + "test_only_checkpoints_may_have_another_root",
    "FrequencyConfig.experiment_name": _CHECKS + "test_a_section_cannot_have_another_name",
    "FrequencyConfig.trial_name": _CHECKS + "test_a_section_cannot_have_another_name",
    "StatsLoggerConfig.experiment_name": _CHECKS + "test_a_section_cannot_have_another_name",
    "StatsLoggerConfig.trial_name": _CHECKS + "test_a_section_cannot_have_another_name",
    "StatsLoggerConfig.fileroot": _CHECKS + "test_only_checkpoints_may_have_another_root",
    "PerfTracerConfig.experiment_name": _CHECKS + "test_a_section_cannot_have_another_name",
    "PerfTracerConfig.trial_name": _CHECKS + "test_a_section_cannot_have_another_name",
    "PerfTracerConfig.fileroot": _CHECKS + "test_only_checkpoints_may_have_another_root",
    "TrainDatasetConfig.type": _LOADER + "test_the_type_of_the_data_says_which_experiment_it_is",
    "ClusterSpecConfig.n_gpus_per_node": "tests/config/experiment/test_machine.py::test_ranks_must_fit_the_devices",
    "SchedulingSpec.cpu": "tests/config/experiment/test_machine.py::test_cores_are_shared_by_the_processes",
    "InferenceEngineConfig.consumer_batch_size": _CHECKS + "test_one_step_takes_one_batch",
    "InferenceEngineConfig.lora_name": _CHECKS + "test_adapter_settings_of_rollout_are_those_of_the_actor",
    "InferenceEngineConfig.use_lora": _CHECKS + "test_adapter_settings_of_rollout_are_those_of_the_actor",
    "NormConfig.group_size": _CHECKS + "test_groups_are_the_answers_to_one_prompt",
    "TrainEngineConfig.is_critic": _CHECKS + "test_each_role_is_the_kind_of_model_that_it_must_be",
    "PPOActorConfig.max_new_tokens": _CHECKS + "test_what_the_actor_repeats_must_be_equal",
}
"""The test that shows what a setting does."""

PENDING = {
    *(
        f"BaseExperimentConfig.{name}"
        for name in (
            "cluster",
            "seed",
            "total_train_epochs",
            "total_train_steps",
            "total_train_n_seqs",
            "train_dataset",
            "valid_dataset",
            "saver",
            "evaluator",
            "stats_logger",
            "perf_tracer",
            "recover",
            "sglang",
            "vllm",
            "scheduler",
        )
    ),
    "PPOConfig.*",
    "SFTConfig.*",
    "RWConfig.*",
    "DPOConfig.*",
    "TrainEngineConfig.*",
    "PPOActorConfig.*",
    "PPOCriticConfig.*",
    "DPOEngineConfig.*",
    "TeacherConfig.*",
    "OptimizerConfig.*",
    "MicroBatchSpec.*",
    "NormConfig.*",
    "RejectionSamplingConfig.*",
    "FSDPEngineConfig.*",
    "GenerationHyperparameters.*",
    "InferenceEngineConfig.*",
    "AgentConfig.*",
    "TrainDatasetConfig.*",
    "ClusterSpecConfig.*",
    "NameResolveConfig.*",
    "SchedulerConfig.*",
    "SchedulingSpec.*",
    "SchedulingStrategy.*",
    "FrequencyConfig.*",
    "SaverConfig.*",
    "EvaluatorConfig.*",
    "RecoverConfig.*",
    "StatsLoggerConfig.*",
    "WandBConfig.*",
    "SwanlabConfig.*",
    "TensorBoardConfig.*",
    "TrackioConfig.*",
    "PerfTracerConfig.*",
    "SessionTracerConfig.*",
    "RewardConfig.*",
    "WorkflowConfig.*",
}
"""Settings that are read by parts that are being built; `areno.config.experiment.effects.pending` lists them one by one."""
