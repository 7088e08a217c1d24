"""Command lines of inference servers from their sections.

A setting is an option of the same name with dashes: true is the option alone; false, null and nothing leave it out; a list is
its items. What is not so, because a server has renamed or dropped it, or takes it under conditions, is said here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from areno.config.experiment.foreign_sections import SGLangConfig, vLLMConfig
from areno.errors import UsageError

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM takes for ``--max-lora-rank``."""


def server_arguments(
    section: vLLMConfig | SGLangConfig,
    *,
    dtype: str,
    context_length: int | None,
    gpu: bool,
    tensor: int = 1,
    pipeline: int = 1,
    adapter_rank: int | None = None,
) -> list[str]:
    """Arguments of a server of the section's product; see :func:`vllm_arguments` and :func:`sglang_arguments`.

    ``tensor`` and ``pipeline`` are the devices that share a model; with ``adapter_rank`` it takes adapters of that rank.
    """
    sizes: tuple[tuple[str, int], ...]
    if isinstance(section, vLLMConfig):
        if adapter_rank is not None:
            section = replace(section, enable_lora=True, max_lora_rank=max(section.max_lora_rank, adapter_rank))
        arguments = vllm_arguments(section, dtype=dtype, context_length=context_length, gpu=gpu)
        sizes = (("--tensor-parallel-size", tensor), ("--pipeline-parallel-size", pipeline))
    else:
        arguments = sglang_arguments(section, dtype=dtype, context_length=context_length)
        sizes = (("--tp-size", tensor), ("--pp-size", pipeline))
    return arguments + [word for name, size in sizes if size > 1 for word in (name, str(size))]


def vllm_arguments(section: vLLMConfig, *, dtype: str, context_length: int | None, gpu: bool) -> list[str]:
    """Arguments of ``vllm serve`` behind the model's name.

    Args:
        section: the settings.
        dtype: of the trainer, taken unless the section has another than its default.
        context_length: the model's; vLLM refuses to start with more.
        gpu: the server computes on GPUs.

    Raises UsageError: a setting cannot work.
    """
    default = vLLMConfig()
    values = _values(section)
    values.pop("model")
    if section.dtype == default.dtype:
        values["dtype"] = dtype
    values["max_model_len"] = _least(section.max_model_len, context_length)
    if section.block_size == default.block_size:
        values["block_size"] = None  # vLLM chooses; on a CPU it does not start with 16
    if not gpu:
        values["gpu_memory_utilization"] = None  # VLLM_CPU_KVCACHE_SPACE says how much there is
        # A prompt in chunks ends vLLM 0.32 on a CPU where its request has a seed: "CPU Generator does not use offset".
        values["no_enable_chunked_prefill"] = True
        if section.enable_sleep_mode:
            raise UsageError("vllm.enable_sleep_mode=true: vLLM has it on GPUs only; leave it out")
    if section.enable_lora:
        values["max_lora_rank"] = _lora_rank(section.max_lora_rank)
    else:
        values |= {"max_lora_rank": None, "max_loras": None}
    return list(_options(values))


def _lora_rank(rank: int) -> int:
    """The least that vLLM takes and that is enough."""
    enough = [taken for taken in _LORA_RANKS if taken >= rank]
    if not enough:
        raise UsageError(f"vllm.max_lora_rank={rank}: vLLM takes at most {_LORA_RANKS[-1]}")
    return enough[0]


def sglang_arguments(section: SGLangConfig, *, dtype: str, context_length: int | None) -> list[str]:
    """Arguments of ``python -m sglang.launch_server``, beside the model, as SGLang 0.5.23 takes them.

    Raises UsageError: a setting has no successor there.
    """
    default = SGLangConfig()
    values = _values(section)
    values.pop("model_path")
    for name in ("cuda_graph_max_bs", "cuda_graph_bs"):
        values[f"{name}_decode"] = values.pop(name)
    if values.pop("disable_cuda_graph"):
        values |= {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
    if values.pop("enable_dp_attention"):
        values["attn_dp_size"] = values.pop("dp_size")
    if values.pop("enable_multithread_load"):
        values["model_loader_extra_config"] = '{"enable_multithread_load": true}'
    for name, remedy in _GONE.items():
        if values.pop(name):
            raise UsageError(f"sglang.{name}: SGLang no longer has this option; {remedy}")
    if section.dtype == default.dtype:
        values["dtype"] = dtype
    if section.attention_backend == default.attention_backend:
        values["attention_backend"] = None  # the page's is for one kind of GPU; SGLang chooses
    values["context_length"] = _least(section.context_length, context_length)
    if not section.enable_lora:
        values |= dict.fromkeys(("max_lora_rank", "max_loaded_loras", "lora_paths", "lora_backend"))
    return list(_options(values))


_GONE = {
    "enable_ep_moe": "set sglang.ep_size instead",
    "torchao_config": "leave it out",
    "enable_nan_detection": "leave it out",
}


def _values(section: Any) -> dict[str, Any]:
    return {entry.name: getattr(section, entry.name) for entry in fields(section) if entry.name != "command"}


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _options(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            yield option
        elif isinstance(value, list):
            yield from (option, *map(str, value)) if value else ()
        elif value is not None and value is not False and value != "":
            yield from (option, str(value))
