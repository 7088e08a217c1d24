"""What the machine decides where no option does: the device, how many of them, how many share a copy of the model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from areno.config.paths import base_of
from areno.config.train_options import TrainOptions

HEADS = ("num_attention_heads", "num_key_value_heads")
"""What ranks that share a copy of a model divide."""

_NODE, _NODE_TP = 8, 4
NO_MPS = "Apple's GPU is not used: PyTorch has no float64 there, in which losses are summed; training runs on the CPU"


def with_layout(options: TrainOptions, gpus: int) -> TrainOptions:
    """Fill in ``--world-size`` and ``--tp-size`` where they are not given, on a machine with so many ``gpus``.

    All visible GPUs are used; eight of them hold two copies of the model, if it can be divided. On a CPU, and with
    ``--device cuda:N``, there is one rank. A resumed run keeps the layout that it was stored with.
    """
    if options.resume is not None or resolved_device(options.device, gpus) != "cuda":
        return options
    world, tp = options.world_size, options.tp_size
    if "world_size" not in options.explicit:
        world = max(gpus - rollout_ranks(options), 1)
    if "tp_size" not in options.explicit and world == _NODE and not (options.fsdp or options.load_in_4bit):
        tp = 1 if options.ckpt and heads_problem(_model_config(options.ckpt), _NODE_TP, "") else _NODE_TP
    return replace(options, world_size=world, tp_size=tp)


def _model_config(place: str) -> Mapping[str, Any]:
    """The ``config.json`` of a language model, or of an adapter's base model; {} where it is not here or unreadable."""
    try:
        config = json.loads((Path(base_of(place)).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # `ckpt_problem` says so
        return {}
    return config | (config.get("text_config") or {}) if isinstance(config, dict) else {}


def heads_problem(config: Mapping[str, Any], tp_size: int, place: str) -> str:
    """Why ``tp_size`` ranks cannot share the attention heads (`HEADS`) of a model; empty if they can."""
    for name in HEADS:
        heads = config.get(name)
        if isinstance(heads, int) and heads % tp_size:
            fitting = " or ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            return f"--tp-size {tp_size}: {place} has {name} {heads}, which {tp_size} ranks cannot share; use {fitting}"
    return ""


def rollout_ranks(options: TrainOptions) -> int:
    """Devices of the rollout processes."""
    starts = options.uses_replicas and not options.rollout_url
    return options.rollout_replicas * options.tp_size if starts else 0


def rollout_gpu_problem(options: TrainOptions, gpus: int) -> str:
    """Why rollout processes find no GPUs behind those of training; empty if they do, or compute on the CPU."""
    ranks, device = rollout_ranks(options), resolved_device(options.device, gpus)
    first = _first_gpu(device)
    if not ranks or not device.startswith("cuda") or first + options.world_size + ranks <= gpus:
        return ""
    return (
        f"--rollout-replicas {options.rollout_replicas}: training on {options.world_size} GPUs "
        f"(--world-size) from GPU {first} on and rollout on {ranks} need more than the {gpus} of this machine; use fewer, or "
        "leave --rollout and --rollout-backend out"
    )


def resolved_device(device: str, gpus: int) -> str:
    """What ``--device`` stands for on a machine with so many GPUs."""
    return device if device != "auto" else "cuda" if gpus else "cpu"


def _first_gpu(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def runtime_of(options: TrainOptions, gpus: int) -> dict[str, str]:
    """Device, dtype and layout of a run as they are used, by name."""
    device = resolved_device(options.device, gpus)
    usual = "float32" if device == "cpu" else "bfloat16"
    return {
        "device": device,
        "dtype": usual if options.dtype == "auto" else options.dtype,
        "world_size": str(options.world_size),
        "tp_size": str(options.tp_size),
        "dp_size": str(options.world_size // options.tp_size),
    }


def shards_tensor_parallel() -> bool:
    """Whether the installed transformers lets FSDP shard the parts of tensor parallelism."""
    return tuple(map(int, version("transformers").split(".")[:2])) >= (5, 23)


def gpu_problem(device: str, ranks: int, gpus: int, chosen: Sequence[int] | None = None) -> str:
    """Why ranks cannot have a GPU each; empty if they can, or compute on the CPU.

    Rank 0 is on ``device``, which is resolved, and the others take the following GPUs, or each rank that of ``chosen``.
    """
    if not device.startswith("cuda"):
        return ""
    if not gpus:
        return f"--device {device}: PyTorch sees no GPU here; use --device cpu, or run `areno check` for the reason"
    first = _first_gpu(device)
    wanted = chosen or range(first, first + ranks)
    if max(wanted) < gpus:
        return ""
    remedy = f"use --world-size {gpus - first}" if 0 < gpus - first < ranks else "name GPUs from 0 on"
    return (
        f"--world-size {ranks}: this machine has {gpus} GPU{'s' * (gpus != 1)}, and the ranks would take GPU "
        f"{', '.join(map(str, wanted))}; {remedy}, or use --device cpu"
    )
