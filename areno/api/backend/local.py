"""The local backend: areno's own engine, in this process or on ranks of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from areno.api.backend.base import ArenoConfig
from areno.api.backend.checks import check_config
from areno.config.machine import gpu_problem
from areno.engine.backend import Backend
from areno.engine.device import rank_devices
from areno.engine.engine_config import EngineConfig
from areno.engine.model.adapter import AdapterOptions
from areno.engine.parallel.group import open_engine
from areno.engine.parallel.peers import Layout
from areno.engine.parallel.workers import STALL_S
from areno.engine.train.optimizer import OptimizerConfig
from areno.errors import UsageError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def prepare(model_path: str, world_size: int, config: ArenoConfig) -> Callable[[], Backend]:
    """Check a configuration, with UsageError for what cannot work; the engine is loaded by what is returned."""
    check_config(config)
    layout = Layout.of(world_size, config.tp_size, config.dp_size, config.fsdp)
    engine_config = _engine_config(config)
    devices = rank_devices(engine_config.device, world_size, torch.cuda.device_count(), config.devices)
    stall_s = float((config.runtime or {}).get("stall_timeout_s", STALL_S))
    return partial(open_engine, config.model_path or model_path, engine_config, layout, devices, stall_s)


def _engine_config(config: ArenoConfig) -> EngineConfig:
    runtime = dict(config.runtime or {})
    runtime.pop("stall_timeout_s", None)
    if config.lora is not None and runtime.get("trains") == "nothing":
        raise UsageError("ArenoConfig.lora has no effect where nothing is trained; give an adapter as the model's path")
    device = _device(runtime.pop("device", "auto"), config.devices)
    dtype = _dtype(runtime.pop("dtype", "auto"), device)
    return EngineConfig(
        device=device,
        dtype=dtype,
        optimizer=OptimizerConfig.of(config.optimizer or {}, "ArenoConfig.optimizer"),
        adapter=None if config.lora is None else AdapterOptions.of(config.lora, "ArenoConfig.lora"),
        max_running=config.max_running_prompts,
        dummy_load=config.dummy_load,
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
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise UsageError(f"--dtype {name}: use one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
