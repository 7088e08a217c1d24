"""Configuration sections for SGLang and vLLM servers, and for the training backends Archon and Megatron.

All sections keep AReaL's defaults, so that YAML files for AReaL can be loaded. If ``backend`` names Archon or Megatron, areno's
engine trains instead. The engine uses the parallel sizes in ``backend``, such as ``megatron:d2p2``, and the settings that have
an equivalent in areno. Requesting FP8 is an error. Other settings have no effect.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from areno.config.experiment.setting_declaration import Problems, changed, section, setting

UNUSED_BACKEND = "section of an unused backend"
OWN_ENGINE = "areno's own engine replaces this backend"
_RECOMPUTES = "gradient_checkpointing controls recomputation"
_STATES = (
    "gradients and master weights are float32; the dtype of the moments depends on optimizer.type and optimizer_dtype"
)
_SHARDED_STATES = "optimizer states are always sharded across data-parallel ranks"
_ROUTER = "routers compute in the same dtypes as in transformers"
_EXCHANGE = "tokens are dispatched to experts by all-to-all"
_SGLANG = "SGLang's server option of the same name."
_sglang = partial(setting, help=_SGLANG)
_VLLM = "vLLM's server option of the same name."
_vllm = partial(setting, help=_VLLM)
_ARCHON = "Archon's setting of the same name."
_archon = partial(setting, help=_ARCHON, no_effect=OWN_ENGINE)
_MEGATRON = "The Megatron backend's setting of the same name."
_megatron = partial(setting, help=_MEGATRON, no_effect=OWN_ENGINE)
_fp8 = partial(setting, no_effect=OWN_ENGINE, help="Transformer Engine's FP8 setting of the same name.")

NO_STAGES = "there is only one pipeline stage, because `backend` sets no pipeline size such as p2"
ZERO_BUBBLE = "areno uses Interleaved1F1B instead; zero-bubble schedules split the backward pass, and areno does not"
_DETERMINISTIC = "deterministic algorithms of PyTorch are used"
_NO_FP8 = "FP8 training is not supported; remove the setting (areno then trains in actor.dtype)"
_ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")


@dataclass(frozen=True)
class Stages:
    """How layers are assigned to pipeline stages."""

    interleaved: bool = False  # each stage has several model chunks (ranges of consecutive layers)
    runs: int | None = None  # model chunks per stage; None: derived from the other fields
    layers_per_run: int | None = None
    less: tuple[int, int] = (0, 0)  # by how many layers the first and the last chunk are shorter than the others


@dataclass
class SGLangConfig:
    """Command-line options of SGLang servers. ``model_path`` has no effect, because servers load ``actor.path``."""

    model_path: str = _sglang("")
    random_seed: int = _sglang(1)
    skip_tokenizer_init: bool = _sglang(False)
    disable_cuda_graph: bool = _sglang(False)
    disable_radix_cache: bool = _sglang(True)
    disable_cuda_graph_padding: bool = _sglang(False)
    enable_nccl_nvls: bool = _sglang(False)
    disable_outlines_disk_cache: bool = _sglang(False)
    disable_custom_all_reduce: bool = _sglang(False)
    disable_overlap_schedule: bool = _sglang(False)
    enable_mixed_chunk: bool = _sglang(False)
    enable_dp_attention: bool = _sglang(False)
    enable_ep_moe: bool = _sglang(False)
    enable_torch_compile: bool = _sglang(False)
    torch_compile_max_bs: int = _sglang(32)
    cuda_graph_max_bs: int | None = _sglang(None)
    cuda_graph_bs: list[int] | None = setting(None, _SGLANG)
    torchao_config: str = _sglang("")
    enable_nan_detection: bool = _sglang(False)
    enable_p2p_check: bool = _sglang(False)
    triton_attention_reduce_in_fp32: bool = _sglang(False)
    triton_attention_num_kv_splits: int = _sglang(8)
    num_continuous_decode_steps: int = _sglang(1)
    enable_memory_saver: bool = _sglang(False)
    allow_auto_truncate: bool = _sglang(False)
    attention_backend: str | None = _sglang("fa3")
    enable_multimodal: bool = _sglang(
        False, refused="images are not supported; remove the setting, and train a text model"
    )
    sampling_backend: str | None = _sglang(None)
    context_length: int | None = _sglang(32768)
    mem_fraction_static: float | None = _sglang(0.9)
    max_running_requests: int | None = _sglang(None)
    chunked_prefill_size: int | None = _sglang(-1)
    max_prefill_tokens: int = _sglang(32768)
    schedule_policy: str = _sglang("lpm")
    schedule_conservativeness: float = _sglang(1.0)
    cpu_offload_gb: int = _sglang(0)
    dtype: str = _sglang("bfloat16")
    kv_cache_dtype: str = _sglang("auto")
    dp_size: int = _sglang(1)
    ep_size: int = _sglang(1)
    enable_lora: bool | None = _sglang(None)
    max_lora_rank: int | None = _sglang(None)
    max_loaded_loras: int = _sglang(8)
    lora_paths: list[str] | None = setting(None, _SGLANG)
    lora_backend: str = _sglang("triton")
    log_level: str = _sglang("warning")
    log_level_http: str | None = _sglang("warning")
    log_requests: bool = _sglang(False)
    log_requests_level: int = _sglang(0)
    show_time_cost: bool = _sglang(False)
    enable_metrics: bool = _sglang(True)
    decode_log_interval: int = _sglang(1)
    enable_multithread_load: bool = _sglang(False)
    enable_return_routed_experts: bool = _sglang(False)
    command: str = setting(
        "",
        "Command that starts a server, such as PATH/python -m sglang.launch_server. If empty, areno starts "
        "the installed SGLang.",
    )

    def problems(self) -> Problems:
        """Yield the problems with settings of this section."""
        yield from _command_problems(self.command)


@dataclass
class vLLMConfig:  # noqa: N801
    """Command-line options of vLLM servers. ``model`` has no effect, because servers load ``actor.path``."""

    model: str = _vllm("")
    seed: int = _vllm(1)
    skip_tokenizer_init: bool = _vllm(False)
    enforce_eager: bool = _vllm(False)
    dtype: str = _vllm("bfloat16")
    distributed_executor_backend: str = _vllm("mp")
    max_num_seqs: int = _vllm(256)
    block_size: int = _vllm(16)
    cpu_offload_gb: float = _vllm(0.0)
    disable_sliding_window: bool = _vllm(True)
    max_model_len: int | None = _vllm(32768)
    no_enable_chunked_prefill: bool = _vllm(False)
    no_enable_prefix_caching: bool = _vllm(True)
    gpu_memory_utilization: float = _vllm(0.9)
    worker_extension_cls: str = _vllm("")
    enable_sleep_mode: bool = _vllm(False)
    uvicorn_log_level: str = _vllm("warning")
    gdn_prefill_backend: str | None = _vllm(None, choices=("triton", "flashinfer"))
    enable_lora: bool = _vllm(False)
    max_lora_rank: int = _vllm(16)
    max_loras: int = _vllm(8)
    lora_modules: list[str] | None = setting(None, _VLLM)
    command: str = setting(
        "", "Command that starts a server, such as PATH/vllm serve. If empty, areno starts the installed vLLM."
    )

    def problems(self) -> Problems:
        """Yield the problems with settings of this section."""
        yield from _command_problems(self.command)


def _command_problems(command: str) -> Problems:
    try:
        shlex.split(command)
    except ValueError as error:
        yield "command", f"{command!r} is not a valid command line: {error}; check its quotes"


@dataclass
class ArchonFP8Config:
    """FP8 training, which areno does not support. If ``actor.backend`` is archon, ``mode`` must be ``disabled``."""

    mode: str = _archon("disabled", choices=("disabled", "blockwise"))
    exclude_modules: list[str] = setting(["output", "router", "score"], _ARCHON, no_effect=OWN_ENGINE)
    include_experts: bool = _archon(False)
    use_triton: bool = _archon(True)


@dataclass
class ArchonEngineConfig:
    """Settings of the backend archon."""

    attn_type: str = _archon("varlen", choices=("varlen", "sdpa", "tree"))
    offload_params: bool = setting(
        False,
        "For training on a GPU: keep sharded parameters in host memory, and copy the parameters of each layer to the GPU when "
        "they are needed.",
    )
    enable_compile: bool = _archon(False)
    ac_mode: str = _archon("selective", choices=("none", "full", "selective", "memory_budget"))
    selective_ac_option: str = _archon("op")
    ac_memory_budget: float = _archon(0.5)
    ac_preserve_rng_state: bool = _archon(False)
    ac_debug: bool = _archon(False)
    pp_schedule: str = setting(
        "Interleaved1F1B",
        "Pipeline schedule. Zero-bubble schedules run as Interleaved1F1B. If pp_layers_per_stage is null, Interleaved1F1B has "
        "two model chunks per stage (one if layers are too few or PyTorch is too old).",
        choices=("1F1B", "Interleaved1F1B", *_ZERO_BUBBLE),
    )
    pp_layers_per_stage: int | None = setting(
        None,
        "Number of layers per model chunk with pipeline parallelism. If null, the schedule determines this number.",
        minimum=1,
    )
    pp_first_stage_less_layers: int = setting(
        1,
        "Number of layers by which the first model chunk is shorter than the others, to compensate for the embedding.",
        minimum=0,
    )
    pp_last_stage_less_layers: int = setting(
        1,
        "Number of layers by which the last model chunk is shorter than the others, to compensate for the output layer.",
        minimum=0,
    )
    reshard_after_forward_policy: str = setting(
        "default",
        "Whether to free the gathered weights of a layer between the forward and the backward pass. `default` "
        "frees these weights if there is no pipeline parallelism, and otherwise keeps them.",
        choices=("default", "always", "never"),
    )
    fp8_config: ArchonFP8Config = section(
        ArchonFP8Config,
        "FP8 training, which areno does not support. If `actor.backend` is archon, fp8_config.mode must be `disabled`.",
        no_effect=OWN_ENGINE,
    )
    use_deterministic_algorithms: bool = setting(
        False,
        "Use PyTorch's deterministic algorithms. PyTorch warns about operations that have no deterministic algorithm.",
    )
    moe_router_dtype: str | None = _archon("fp32", choices=("fp32",))

    @property
    def stages(self) -> Stages:
        """Pipeline stages."""
        less = self.pp_first_stage_less_layers, self.pp_last_stage_less_layers
        return Stages(self.pp_schedule != "1F1B", None, self.pp_layers_per_stage, less)

    def reshards(self, pipeline: int) -> bool:
        """Whether a layer's gathered weights are freed between the forward and the backward pass.

        ``pipeline``: number of pipeline stages.
        """
        policy = self.reshard_after_forward_policy
        return pipeline == 1 if policy == "default" else policy == "always"

    def unused(self, pipeline: int, sharded: bool) -> Iterator[tuple[str, str]]:
        """Yield each setting that has no effect, and the reason. ``pipeline``: number of pipeline stages."""
        names = [name for name in vars(self) if name.startswith("pp_")]
        if pipeline == 1:
            yield from ((name, NO_STAGES) for name in changed(self, names))
        elif self.pp_schedule in _ZERO_BUBBLE:
            yield "pp_schedule", ZERO_BUBBLE

    def mapped(self, sharded: bool) -> Iterator[tuple[str, str]]:
        """Yield the settings of this section that areno's engine applies. Settings whose value is the default are omitted.

        Each setting is a pair: its name, and a description of what it changes. ``sharded``: whether weights are sharded.
        """
        if self.reshard_after_forward_policy != "default":
            frees = self.reshard_after_forward_policy == "always"
            yield (
                "reshard_after_forward_policy",
                f"gathered weights are {'freed' if frees else 'kept'} after the forward pass",
            )
        if self.offload_params and sharded:
            yield "offload_params", "parameters are kept in host memory, as with fsdp.offload_params"
        if self.use_deterministic_algorithms:
            yield "use_deterministic_algorithms", _DETERMINISTIC

    def unsupported(self) -> Iterator[str]:
        """Yield requested features that areno's engine does not support, with the reasons."""
        if self.fp8_config.mode != "disabled":
            yield f"fp8_config.mode {self.fp8_config.mode}: {_NO_FP8}"


@dataclass
class DistributedDataParallelConfig:
    """Settings of Megatron's data parallelism."""

    grad_reduce_in_fp32: bool = _megatron(True)
    overlap_grad_reduce: bool = _megatron(False)
    overlap_param_gather: bool = _megatron(False)
    align_param_gather: bool = _megatron(False)
    use_distributed_optimizer: bool = setting(True, _MEGATRON, no_effect=_SHARDED_STATES)
    check_for_nan_in_grad: bool = _megatron(False)
    bucket_size: int | None = _megatron(None)
    average_in_collective: bool = _megatron(False)
    fp8_param_gather: bool = _megatron(False)


@dataclass
class FP8EngineConfig:
    """Settings of FP8 training with Transformer Engine, which areno does not support.

    With the backend megatron, setting this section is an error. With any other backend, the section has no effect.
    """

    mode: str = _fp8("e4m3")
    recipe: str = _fp8("delayed")
    param: bool = _fp8(False)
    margin: int = _fp8(0)
    amax_history_len: int = _fp8(1)
    amax_compute_algo: str = _fp8("most_recent")
    wgrad: bool = _fp8(True)
    dot_product_attention: bool = _fp8(False)
    multi_head_attention: bool = _fp8(False)
    tp_only_amax_red: bool = _fp8(False)
    first_last_layers_bf16: bool = _fp8(False)
    num_layers_at_start_in_bf16: int = _fp8(1)
    num_layers_at_end_in_bf16: int = _fp8(1)
    direct_convert: bool = _fp8(True)


@dataclass
class MegatronEngineConfig:
    """Settings of the backend megatron."""

    wrap_with_ddp: bool = _megatron(True)
    use_torch_fsdp2: bool = setting(False, "Shard weights and gradients, as fsdp.shard_weights does.")
    use_custom_fsdp: bool = setting(False, "Same as use_torch_fsdp2.")
    ddp: DistributedDataParallelConfig = section(
        DistributedDataParallelConfig, "Data parallelism.", no_effect=OWN_ENGINE
    )
    virtual_pipeline_parallel_size: int = setting(
        1,
        "Number of model chunks per pipeline stage. A chunk is a range of consecutive layers.",
        minimum=1,
    )
    overlap_param_gather_with_optimizer_step: bool = _megatron(False)
    use_precision_aware_optimizer: bool = setting(False, _MEGATRON, no_effect=_STATES)
    main_grads_dtype: str = setting("float32", _MEGATRON, no_effect=_STATES)
    main_params_dtype: str = setting("float32", _MEGATRON, no_effect=_STATES)
    exp_avg_dtype: str = setting("float32", _MEGATRON, no_effect=_STATES)
    exp_avg_sq_dtype: str = setting("float32", _MEGATRON, no_effect=_STATES)
    async_save: bool = _megatron(False)
    use_checkpoint_opt_param_scheduler: bool = _megatron(True)
    use_deterministic_algorithms: bool = setting(
        False,
        "Use PyTorch's deterministic algorithms. PyTorch warns about operations that have no deterministic algorithm.",
    )
    recompute_granularity: str | None = setting("full", _MEGATRON, no_effect=_RECOMPUTES)
    recompute_method: str | None = setting("uniform", _MEGATRON, no_effect=_RECOMPUTES)
    recompute_num_layers: int | None = setting(1, _MEGATRON, no_effect=_RECOMPUTES)
    distribute_saved_activations: bool | None = setting(None, _MEGATRON, no_effect=_RECOMPUTES)
    recompute_modules: list[str] | None = setting(None, _MEGATRON, no_effect=_RECOMPUTES)
    moe_router_dtype: str | None = setting("fp32", _MEGATRON, no_effect=_ROUTER)
    moe_shared_expert_overlap: bool = _megatron(False)
    moe_enable_deepep: bool = setting(False, _MEGATRON, no_effect=_EXCHANGE)
    moe_token_dispatcher_type: str = setting("alltoall", _MEGATRON, no_effect=_EXCHANGE)
    moe_permute_fusion: bool = _megatron(False)
    fp8_config: FP8EngineConfig | None = section(
        None,
        "FP8 training, which areno does not support. If `actor.backend` is megatron, setting this section is an error.",
        no_effect=OWN_ENGINE,
    )
    bridge_type: str = _megatron("mbridge", choices=("mbridge", "megatron-bridge"))
    use_mbridge_save: bool = _megatron(False)
    use_bridge_for_update_weights: bool = _megatron(False)

    @property
    def stages(self) -> Stages:
        """Pipeline stages."""
        return Stages(self.virtual_pipeline_parallel_size > 1, self.virtual_pipeline_parallel_size)

    @staticmethod
    def reshards(pipeline: int) -> bool:
        """Whether a layer's gathered weights are freed between the forward and the backward pass."""
        return True

    @property
    def shards_weights(self) -> bool:
        """Whether the section requests sharded weights and gradients."""
        return self.use_torch_fsdp2 or self.use_custom_fsdp

    def unused(self, pipeline: int, sharded: bool) -> Iterator[tuple[str, str]]:
        """Yield each setting that has no effect, and the reason.

        ``pipeline``: number of pipeline stages. ``sharded``: whether weights are sharded.
        """
        if pipeline == 1 and self.virtual_pipeline_parallel_size > 1:
            yield "virtual_pipeline_parallel_size", NO_STAGES
        if not sharded:
            names = ("use_torch_fsdp2", "use_custom_fsdp")
            yield from ((name, "the actor's weights are not sharded in this run") for name in changed(self, names))

    def mapped(self, sharded: bool) -> Iterator[tuple[str, str]]:
        """Yield the settings of this section that areno's engine applies. Settings whose value is the default are omitted.

        Each setting is a pair: its name, and a description of what it changes. ``sharded``: whether weights are sharded.
        """
        if (runs := self.virtual_pipeline_parallel_size) > 1:
            yield "virtual_pipeline_parallel_size", f"each stage has {runs} model chunks"
        for name in ("use_torch_fsdp2", "use_custom_fsdp"):
            if getattr(self, name) and sharded:
                yield name, "weights are sharded (same effect as fsdp.shard_weights)"
        if self.use_deterministic_algorithms:
            yield "use_deterministic_algorithms", _DETERMINISTIC

    def unsupported(self) -> Iterator[str]:
        """Yield requested features that areno's engine does not support, with the reasons."""
        if self.fp8_config is not None:
            yield f"fp8_config: {_NO_FP8}"
