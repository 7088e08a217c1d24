"""Makes the command-line options of vLLM and SGLang servers from the sections ``vllm`` and ``sglang``.

:mod:`areno.rollouts.servers.command_line` adds the program, the address and the worker extension to these options.

A setting becomes an option of the same name, with dashes instead of underscores. If the setting is true, the option has no
value. If the setting is false, null, "" or an empty list, the option is omitted. If the setting is a non-empty list, the
items become the values of the option. Options that a server has renamed, dropped or restricted are handled individually.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from areno.config.experiment.backend_sections import SGLangConfig, vLLMConfig
from areno.errors import UsageError

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for ``--max-lora-rank``."""


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
    """Return the command-line arguments of a vLLM or SGLang server.

    ``tensor`` and ``pipeline`` are the parallel sizes. ``adapter_rank`` is the rank of the adapters that the server will load.
    If ``adapter_rank`` is None, the adapter settings of ``section`` apply. For the other parameters, see
    :func:`vllm_arguments`.
    """
    sizes: tuple[tuple[str, int], ...]
    if adapter_rank is not None:
        section = replace(section, enable_lora=True, max_lora_rank=max(section.max_lora_rank or 0, adapter_rank))
    if isinstance(section, vLLMConfig):
        arguments = vllm_arguments(section, dtype=dtype, context_length=context_length, gpu=gpu)
        sizes = (("--tensor-parallel-size", tensor), ("--pipeline-parallel-size", pipeline))
    else:
        arguments = sglang_arguments(section, dtype=dtype, context_length=context_length)
        if adapter_rank is not None:
            arguments += ["--lora-target-modules", "all"]  # required, because the adapter does not exist at the start
        sizes = (("--tp-size", tensor), ("--pp-size", pipeline))
    return arguments + [word for name, size in sizes if size > 1 for word in (name, str(size))]


def vllm_arguments(section: vLLMConfig, *, dtype: str, context_length: int | None, gpu: bool) -> list[str]:
    """Return the command-line arguments that follow MODEL in ``vllm serve MODEL``.

    Args:
        section: the settings.
        dtype: dtype of the trainer. The server uses the same dtype if ``section.dtype`` has its default value.
        context_length: context length of the model in tokens, or None. ``max_model_len`` is at most this length, because
            otherwise vLLM does not start.
        gpu: whether the server runs on GPUs.

    Raises UsageError: a setting is invalid.
    """
    default = vLLMConfig()
    values = _values(section)
    values.pop("model")
    if section.dtype == default.dtype:
        values["dtype"] = dtype
    values["max_model_len"] = _smallest(section.max_model_len, context_length)
    if section.block_size == default.block_size:
        values["block_size"] = None  # let vLLM choose; on a CPU, vLLM does not start with 16
    if not gpu:
        values["gpu_memory_utilization"] = None  # on a CPU, VLLM_CPU_KVCACHE_SPACE sizes the KV cache instead
        # vLLM 0.32 crashes on a CPU at a chunked prefill of a request with a seed: "CPU Generator does not use offset".
        values["no_enable_chunked_prefill"] = True
        if section.enable_sleep_mode:
            raise UsageError("vllm.enable_sleep_mode=true: vLLM supports sleep mode only on GPUs; remove the setting")
    if section.enable_lora:
        values["max_lora_rank"] = _lora_rank(section.max_lora_rank)
    else:
        values |= {"max_lora_rank": None, "max_loras": None}
    return list(_options(values))


def _lora_rank(rank: int) -> int:
    sufficient = [accepted for accepted in _LORA_RANKS if accepted >= rank]
    if not sufficient:
        raise UsageError(f"vllm.max_lora_rank={rank}: vLLM accepts at most {_LORA_RANKS[-1]}; use a lower rank")
    return sufficient[0]


def sglang_arguments(section: SGLangConfig, *, dtype: str, context_length: int | None) -> list[str]:
    """Return the arguments of ``python -m sglang.launch_server`` (SGLang 0.5.23), without the model.

    Raises UsageError: the section sets an option that SGLang has dropped.
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
    for name, remedy in _DROPPED.items():
        if values.pop(name):
            raise UsageError(f"sglang.{name}: SGLang no longer has this option; {remedy}")
    if section.dtype == default.dtype:
        values["dtype"] = dtype
    if section.attention_backend == default.attention_backend:
        values["attention_backend"] = None  # the documented default requires a certain GPU; let SGLang choose
    values["context_length"] = _smallest(section.context_length, context_length)
    if not section.enable_lora:
        values |= dict.fromkeys(("max_lora_rank", "max_loaded_loras", "lora_paths", "lora_backend"))
    return list(_options(values))


_DROPPED = {
    "enable_ep_moe": "set sglang.ep_size instead",
    "torchao_config": "remove it",
    "enable_nan_detection": "remove it",
}


def _values(section: Any) -> dict[str, Any]:
    return {entry.name: getattr(section, entry.name) for entry in fields(section) if entry.name != "command"}


def _smallest(*limits: int | None) -> int | None:
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
