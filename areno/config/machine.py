"""What the machine decides where no option does: the device, how many of them, how many share a copy of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from areno.config.model_files import heads_problem, model_config
from areno.config.train_options import TrainOptions

_NODE, _NODE_TP = 8, 4


def with_layout(options: TrainOptions, gpus: int) -> TrainOptions:
    """Fill in ``--world-size`` and ``--tp-size`` where they are not given, on a machine with so many ``gpus``.

    All visible GPUs are used; eight of them hold two copies of the model, if it can be divided. On a CPU, and with
    ``--device cuda:N``, there is one rank. A resumed run keeps the layout that it was stored with."""
    if options.resume is not None:
        return options
    world, tp = options.world_size, options.tp_size
    on_gpus = resolved_device(options.device, gpus) == "cuda"
    if "world_size" not in options.explicit and on_gpus:
        world = max(gpus - rollout_ranks(options), 1)
    if "tp_size" not in options.explicit and on_gpus and world == _NODE and not (options.fsdp or options.load_in_4bit):
        config = model_config(options.ckpt) if options.ckpt else {}
        tp = 1 if heads_problem(config, _NODE_TP, "") else _NODE_TP
    return replace(options, world_size=world, tp_size=tp)


def rollout_ranks(options: TrainOptions) -> int:
    """Devices of the rollout processes."""
    return options.rollout_replicas * options.tp_size if options.rollout == "async" else 0


def rollout_gpu_problem(options: TrainOptions, gpus: int) -> str:
    """Say why rollout processes find no GPUs behind those of training; empty if they do, or compute on the CPU."""
    ranks, device = rollout_ranks(options), resolved_device(options.device, gpus)
    first = int(device.partition(":")[2] or 0)
    if not ranks or not device.startswith("cuda") or first + options.world_size + ranks <= gpus:
        return ""
    return (
        f"--rollout async with --rollout-replicas {options.rollout_replicas}: training on {options.world_size} GPUs "
        f"(--world-size) from GPU {first} on and rollout on {ranks} need more than the {gpus} of this machine; use fewer, or "
        "--rollout sync"
    )


def resolved_device(device: str, gpus: int) -> str:
    """What ``--device`` stands for on a machine with so many GPUs."""
    return device if device != "auto" else "cuda" if gpus else "cpu"


def resolved_dtype(dtype: str, device: str) -> str:
    """What ``--dtype`` stands for on a device."""
    return dtype if dtype != "auto" else "float32" if device == "cpu" else "bfloat16"


def runtime_of(options: TrainOptions, gpus: int) -> dict[str, str]:
    """Device, dtype and layout of a run as they are used, by name."""
    device = resolved_device(options.device, gpus)
    return {
        "device": device,
        "dtype": resolved_dtype(options.dtype, device),
        "world_size": str(options.world_size),
        "tp_size": str(options.tp_size),
        "dp_size": str(options.world_size // options.tp_size),
    }


def gpu_problem(device: str, ranks: int, gpus: int, chosen: Sequence[int] | None = None) -> str:
    """Why ranks cannot have a GPU each; empty if they can, or compute on the CPU.

    Rank 0 is on ``device``, which is resolved, and the others take the following GPUs, or each rank that of ``chosen``."""
    if not device.startswith("cuda"):
        return ""
    if not gpus:
        return f"--device {device}: PyTorch sees no GPU here; use --device cpu, or run `areno check` for the reason"
    first = int(device.partition(":")[2] or 0)
    wanted = chosen or range(first, first + ranks)
    if max(wanted) < gpus:
        return ""
    remedy = f"use --world-size {gpus - first}" if 0 < gpus - first < ranks else "name GPUs from 0 on"
    return (
        f"--world-size {ranks}: this machine has {gpus} GPU{'s' * (gpus != 1)}, and the ranks would take GPU "
        f"{', '.join(map(str, wanted))}; {remedy}, or use --device cpu"
    )
