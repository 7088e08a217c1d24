"""Settings that this version cannot follow, and settings that change nothing here. See `effects`.

Keys are ``Class.field``, with the class that declares the field first; ``Class.*`` stands for all fields of a class.
Every other setting takes effect.
"""

from __future__ import annotations

_SERVICES = "services behind a gateway (_version v2) are not supported; remove it, or write _version=v1"
_OFFLOAD = (
    "moving whole models to host memory is not supported; remove it, and use gradient_checkpointing, offload_activations or "
    "optimizer.offload"
)
_REMOTE_REWARD = (
    "an external reward service is not supported; remove it, and write reward.fn=file.py:NAME or reward.path=MODEL"
)

REFUSED = {
    "BaseExperimentConfig.enable_offload": _OFFLOAD,
    "TrainEngineConfig.use_kernels": "kernels of the hub in place of layers are not supported; remove it",
    "TrainEngineConfig.offload": _OFFLOAD,
    "TrainEngineConfig._version": _SERVICES,
    "TrainEngineConfig.grad_reduce_dtype": "gradients are added up in float32 only; remove it",
    "TrainEngineConfig.optimizer_dtype": "master weights and moments are float32 only; remove it",
    "TeacherConfig.offload": _OFFLOAD,
    "FSDPEngineConfig.wrap_policy": "decoder layers are wrapped one by one; remove it",
    "FSDPWrapPolicy.*": "decoder layers are wrapped one by one; remove it",
    "FSDPEngineConfig.offload_params": _OFFLOAD,
    "FSDPEngineConfig.memory_efficient_load": "each rank reads the weights itself; remove it",
    "FSDPEngineConfig.per_layer_optim_step": "states do not travel layer by layer; write optimizer.offload=true instead",
    "FSDPEngineConfig.shard_vision_across_sp": "vision models are not supported; remove it",
    "SGLangConfig.enable_multimodal": "images are not supported; remove it, and train a model of text on rows of text",
    "GenerationHyperparameters.use_beam_search": "beam search is not supported; remove it, and sample or use greedy",
    "InferenceEngineConfig.return_routed_experts": "expert routing is not returned; remove it",
    "InferenceEngineConfig._version": _SERVICES,
    "InferenceEngineConfig.api_url": "generating with an outside server is not supported; remove it, and use areno:dN",
    "InferenceEngineConfig.provider_api_key": "generating with an outside server is not supported; remove it",
    "ClusterSpecConfig.n_nodes": "several machines are not supported; write cluster.n_nodes=1",
    "SchedulerConfig.functioncall_service_domain": _REMOTE_REWARD,
    "SchedulerConfig.reward_functioncall_config": _REMOTE_REWARD,
    "SchedulerConfig.reward_model_path": _REMOTE_REWARD,
    "SchedulerConfig.reward_model_service_url": _REMOTE_REWARD,
}
"""Settings of which only the default is accepted, and the value that the format documents as its default."""

REFUSED_VALUES: dict[str, dict[str, str]] = {
    "SchedulerConfig.type": {
        "ray": "Ray is not supported; write scheduler.type=local, which runs on this machine",
        "slurm": "Slurm is not supported; write scheduler.type=local, which runs on this machine",
    },
    "NameResolveConfig.type": {
        "etcd3": "names for several machines are not supported; write cluster.name_resolve.type=nfs",
        "ray": "names for several machines are not supported; write cluster.name_resolve.type=nfs",
    },
    "OptimizerConfig.type": {
        "adam_bf16": "moments in bf16 are not supported; write type=adam, whose moments are in fp32",
    },
    "AgentConfig.mode": {
        "online": "sessions from outside (online) are not supported; write mode=inline or mode=subproc, with an agent of yours",
    },
}
"""Single values that are refused, of settings that otherwise work."""

_BACKEND = "the section of a backend that is not used"
_V2 = "read by services of _version v2 only"
_ONE_MACHINE = "the processes of one machine need no name service"
_WORKERS = "areno starts its processes on this machine itself"
_CLUSTER = "read by Slurm and Ray only"
_ROWS = "the trainer's process reads the rows"
_FP16 = "read by fp16 training only; bfloat16 and float32 have no loss scale"

HARMLESS = {
    "SGLangConfig.*": _BACKEND,
    "vLLMConfig.*": _BACKEND,
    "ArchonEngineConfig.*": _BACKEND,
    "ArchonFP8Config.*": _BACKEND,
    "MegatronEngineConfig.*": _BACKEND,
    "DistributedDataParallelConfig.*": _BACKEND,
    "FP8EngineConfig.*": _BACKEND,
    "BaseExperimentConfig.launcher": "the scheduler of this machine needs no launcher",
    "TrainEngineConfig.admin_api_key": _V2,
    "TrainEngineConfig.log_level": _V2,
    "TrainEngineConfig.disable_dropout": "training never drops, because rollout does not",
    "TrainEngineConfig.pad_to_maximum": "micro-batches are packed, which needs no padding",
    "TrainEngineConfig.workers_ready_timeout": "setup_timeout limits starting and loading together",
    "FSDPEngineConfig.optim_step_prefetch_layers": "read with per_layer_optim_step only",
    "OptimizerConfig.initial_loss_scale": _FP16,
    "OptimizerConfig.min_loss_scale": _FP16,
    "OptimizerConfig.loss_scale_window": _FP16,
    "OptimizerConfig.hysteresis": _FP16,
    "InferenceEngineConfig.model": _V2,
    "InferenceEngineConfig.routing_strategy": _V2,
    "InferenceEngineConfig.poll_interval": _V2,
    "InferenceEngineConfig.admin_api_key": _V2,
    "InferenceEngineConfig.workers_ready_timeout": "setup_timeout limits starting and loading together",
    "InferenceEngineConfig.pause_grace_period": "a weight update stops generation between two tokens and drops no request",
    "TrainDatasetConfig.pin_memory": _ROWS,
    "TrainDatasetConfig.num_workers": _ROWS,
    "TrainDatasetConfig.num_dataset_workers": _ROWS,
    "TrainDatasetConfig.scheduling_spec": _ROWS,
    "TrainDatasetConfig.setup_timeout": _ROWS,
    "ClusterSpecConfig.cluster_name": _ONE_MACHINE,
    "NameResolveConfig.nfs_record_root": _ONE_MACHINE,
    "NameResolveConfig.etcd3_addr": _ONE_MACHINE,
    "NameResolveConfig.ray_actor_name": _ONE_MACHINE,
    "AgentConfig.admin_api_key": "only the trainer opens and ends sessions, which needs no key",
    "SchedulerConfig.endpoint": _WORKERS,
    "SchedulerConfig.deploy_mode": _WORKERS,
    "SchedulingSpec.gpu": _WORKERS,
    "SchedulingSpec.mem": _WORKERS,
    "SchedulingSpec.port_count": _WORKERS,
    "SchedulingSpec.task_type": _WORKERS,
    "SchedulingSpec.cmd": _WORKERS,
    "SchedulingSpec.image": _CLUSTER,
    "SchedulingSpec.srun_additional_args": _CLUSTER,
    "SchedulingSpec.additional_bash_cmds": "read by Slurm only; run these commands yourself, before the experiment",
    "SchedulingSpec.container_type": _CLUSTER,
    "SchedulingSpec.mount": _CLUSTER,
    "SchedulingSpec.nodelist": _CLUSTER,
    "SchedulingSpec.exclude": _CLUSTER,
    "SchedulingSpec.ray_placement_strategy": _CLUSTER,
}
"""Settings of which every value is accepted, because none changes what a run does here; with the reason."""
