"""The local backend runs areno's engine, in this process or on several ranks."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from areno.api.arguments import as_list, integer, of_type, real
from areno.api.backend.base import ArenoConfig
from areno.config.machine import gpu_problem
from areno.engine.backend import Backend
from areno.engine.device import rank_devices
from areno.engine.engine_config import EngineConfig
from areno.engine.model.adapter import AdapterOptions
from areno.engine.parallel.group import open_engine
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.workers import STALL_S
from areno.engine.train.optimizer import OptimizerOptions
from areno.errors import UsageError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Check = Callable[[str, Any], object]


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def _choice(*allowed: str) -> Check:
    def check(name: str, value: Any) -> None:
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")

    return check


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _fraction(name: str, value: Any) -> None:
    if not 0 <= real(name, value) < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


def _pair_of_fractions(name: str, value: Any) -> None:
    values = as_list(name, value, "two numbers")
    if len(values) != 2:
        raise ValueError(f"{name} must be two numbers, got {value!r}")
    for part in values:
        _fraction(name, part)


def _devices(name: str, value: Any) -> None:
    for number in as_list(name, value, "device numbers"):
        integer(name, number, 0)


_TEXT: Check = partial(of_type, kind=str)
_COUNT: Check = integer
_FROM_0: Check = partial(integer, minimum=0)
_NOT_NEGATIVE: Check = partial(real, minimum=0)
_POSITIVE: Check = partial(real, above=0)

_RUNTIME: Mapping[str, Check] = {
    "attn_backend": _choice("flash", "native"),
    "activation_checkpointing": _or_none(_flag),
    "tree_training": _flag,
    "offload_activations": _flag,
    "keep_rollout_state": _flag,
    "eager_decode": _flag,
    "speculate": _FROM_0,
    "return_routed_experts": _flag,
    "kv_cache_tokens": _or_none(_COUNT),
    "prefix_cache_tokens": _or_none(_FROM_0),
    "device": _TEXT,
    "dtype": _TEXT,
    "trust_remote_code": _flag,
    "trains": _choice("policy", "reward", "nothing"),
    "stall_timeout_s": _POSITIVE,
}
"""Keys of ``ArenoConfig.runtime``, and the function that checks the value of each key."""

_OPTIMIZER: Mapping[str, Check] = {
    "lr": _NOT_NEGATIVE,
    "min_lr": _NOT_NEGATIVE,
    "lr_decay_steps": _FROM_0,
    "lr_warmup_steps": _FROM_0,
    "lr_decay_style": _choice("constant", "linear", "cosine"),
    "betas": _pair_of_fractions,
    "eps": _POSITIVE,
    "weight_decay": _NOT_NEGATIVE,
    "grad_clip_norm": _or_none(_POSITIVE),
    "adam_8bit": _flag,
    "sgd": _flag,
    "offload": _flag,
}
_LORA: Mapping[str, Check] = {
    "rank": _FROM_0,
    "alpha": _or_none(_POSITIVE),
    "dropout": _fraction,
    "load_in_4bit": _flag,
    "seed": partial(integer, minimum=-(2**63)),
    "adapter_path": _or_none(_TEXT),
}
_FIELDS: Mapping[str, Check] = {
    "model_path": _or_none(_TEXT),
    "tp_size": _COUNT,
    "dp_size": _or_none(_COUNT),
    "devices": _or_none(_devices),
    "dummy_load": _flag,
    "max_running_prompts": _COUNT,
    "decode_progress_interval_s": _NOT_NEGATIVE,
    "fsdp": _flag,
}


def check_optimizer(owner: str, values: Any) -> None:
    """Check the values of optimizer options. Unknown keys are ignored.

    ``owner`` is the name of the options in error messages, such as ``ModelRole('critic').optimizer``. Raises TypeError or
    ValueError if a value is invalid.
    """
    _check_values(owner, values, _OPTIMIZER)


def _check_values(owner: str, values: Any, table: Mapping[str, Check]) -> None:
    of_type(owner, values, dict)
    for key in filter(table.__contains__, values):
        table[key](f"{owner} {key}", values[key])


def _check_config(config: ArenoConfig) -> None:
    try:
        for name, check in _FIELDS.items():
            check(f"ArenoConfig.{name}", getattr(config, name))
        for part, table in (("runtime", _RUNTIME), ("optimizer", _OPTIMIZER), ("lora", _LORA)):
            values = getattr(config, part)
            if values is not None:
                _check_values(f"ArenoConfig.{part}", values, table)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    unknown = sorted(set(config.runtime or {}) - set(_RUNTIME))
    if unknown:
        raise UsageError(
            f"ArenoConfig.runtime has no key {', '.join(unknown)}; use only the keys {', '.join(sorted(_RUNTIME))}"
        )


def prepare(model_path: str, world_size: int, config: ArenoConfig) -> Callable[[], Backend]:
    """Check a configuration, and return a function that loads the engine.

    Raises UsageError if the configuration is invalid.
    """
    _check_config(config)
    layout = Layout.of(world_size, config.tp_size, config.dp_size, config.fsdp)
    engine_config = _engine_config(config)
    engine_config.random_path = (config.model_path or model_path) if config.dummy_load else None
    devices = rank_devices(engine_config.device, world_size, torch.cuda.device_count(), config.devices)
    stall_s = float((config.runtime or {}).get("stall_timeout_s", STALL_S))
    return partial(open_engine, config.model_path or model_path, engine_config, layout, devices, stall_s)


def _engine_config(config: ArenoConfig) -> EngineConfig:
    runtime = dict(config.runtime or {})
    runtime.pop("stall_timeout_s", None)
    if config.lora is not None and runtime.get("trains") == "nothing":
        raise UsageError(
            "ArenoConfig.lora has no effect if ArenoConfig.runtime['trains'] is `nothing`; pass the adapter folder "
            "as `model_path`"
        )
    device = _device(runtime.pop("device", "auto"), config.devices)
    dtype = _dtype(runtime.pop("dtype", "auto"), device)
    return EngineConfig(
        device=device,
        dtype=dtype,
        optimizer=OptimizerOptions.of(config.optimizer or {}, "ArenoConfig.optimizer"),
        adapter=None if config.lora is None else AdapterOptions.of(config.lora, "ArenoConfig.lora"),
        max_running=config.max_running_prompts,
        decode_progress_interval_s=config.decode_progress_interval_s,
        decode="eager" if runtime.pop("eager_decode", False) else "auto",
        **runtime,
    )


def _device(name: str, devices: list[int] | None) -> torch.device:
    available = torch.cuda.is_available()
    if name == "auto":
        name = f"cuda:{devices[0] if devices else 0}" if available else "cpu"
    if not available and (problem := gpu_problem(name, 1, 0)):
        raise UsageError(problem)
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"the runtime device {name!r} is unknown; use auto, cpu, cuda or cuda:N") from error


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise UsageError(f"--dtype {name} is unknown; use one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
