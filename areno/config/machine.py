"""Defaults that depend on the machine: device, number of devices, and tensor-parallel size."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from areno.config.all_train_options import TrainOptions
from areno.config.packages import transformers_problem
from areno.config.paths import base_of

HEADS = ("num_attention_heads", "num_key_value_heads")
"""Entries of a model's configuration whose values must be divisible by the tensor-parallel size."""

_NODE, _NODE_TP = 8, 4
NO_MPS = "Apple GPUs are not supported, because MPS lacks float64, in which areno sums losses; training runs on the CPU"


def with_layout(options: TrainOptions, gpus: int) -> TrainOptions:
    """Choose ``--world-size`` and ``--tp-size`` on a machine with ``gpus`` GPUs, unless these options are set.

    The options are returned unchanged if the run uses a CPU, if ``--device cuda:N`` is set, or if the run is resumed.

    Otherwise, an unset ``--world-size`` becomes ``gpus`` minus :func:`rollout_ranks`, rounded down to a multiple of
    ``--tp-size`` if that is set. Then an unset ``--tp-size`` becomes 4 if all of these conditions hold, and 1 otherwise:

    - ``--world-size`` (set or chosen) is 8.
    - Neither ``--fsdp`` nor ``--load-in-4bit`` is set.
    - The GPUs that training does not use suffice for rollout processes with ``--tp-size 4``.
    - The model's ``config.json`` and the installed transformers support a tensor-parallel size of 4.
    """
    if options.resume is not None or resolved_device(options.device, gpus) != "cuda":
        return options
    world, tp = options.world_size, options.tp_size
    if "world_size" not in options.explicit:
        world = max(gpus - rollout_ranks(options), 1)
        world -= world % tp if world > tp else 0
    if "tp_size" not in options.explicit and world == _NODE and not (options.fsdp or options.load_in_4bit):
        suffices = rollout_ranks(replace(options, tp_size=_NODE_TP)) <= max(gpus - world, 0)
        divisible = not tensor_parallel_problem() and (not options.ckpt or _divisible(options.ckpt, _NODE_TP))
        tp = _NODE_TP if suffices and divisible else 1
    return replace(options, world_size=world, tp_size=tp)


def _divisible(model: str, tp_size: int) -> bool:
    """Whether a model supports tensor parallelism with ``tp_size`` ranks. True if the model's configuration cannot be read."""
    config = _model_config(model)
    return not config or (not heads_problem(config, tp_size, "") and _has_tensor_plan(str(config.get("model_type"))))


def _has_tensor_plan(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING  # slow import, rarely needed

    known = model_type in CONFIG_MAPPING
    return known and bool(getattr(CONFIG_MAPPING[model_type], "base_model_tp_plan", None))


def _model_config(model: str) -> Mapping[str, Any]:
    """Read the ``config.json`` of a model, or of an adapter's base model. Return {} if the file cannot be read."""
    from huggingface_hub import hf_hub_download

    base = base_of(model)
    try:
        file = Path(base, "config.json") if Path(base).is_dir() else Path(hf_hub_download(base, "config.json"))
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # reported later
        return {}
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def heads_problem(config: Mapping[str, Any], tp_size: int, model: str) -> str:
    """Return an error message if the number of query or key-value heads is not divisible by ``tp_size``; otherwise empty."""
    for name in HEADS:
        heads = config.get(name)
        if isinstance(heads, int) and heads % tp_size:
            divisors = " or ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            return (
                f"--tp-size {tp_size}: {model} has {name} {heads}, which is not divisible by {tp_size}; use {divisors}"
            )
    return ""


def rollout_ranks(options: TrainOptions) -> int:
    """Return the number of devices that the rollout processes of this run need."""
    starts = options.uses_replicas and not options.rollout_url
    return options.rollout_replicas * options.tp_size if starts else 0


def rollout_gpu_problem(options: TrainOptions, gpus: int) -> str:
    """Return why the GPUs do not suffice for training and rollout; empty if the GPUs suffice. Always empty on a CPU."""
    ranks, device = rollout_ranks(options), resolved_device(options.device, gpus)
    first = _first_gpu(device)
    if not ranks or not device.startswith("cuda") or first + options.world_size + ranks <= gpus:
        return ""
    return (
        f"--rollout-replicas {options.rollout_replicas}: training needs {options.world_size} GPUs (--world-size), "
        f"starting with GPU {first}, and rollout needs {ranks} more, but this machine has {gpus} GPUs; lower "
        "--world-size or --rollout-replicas, or remove --rollout and --rollout-backend to generate on the training GPUs"
    )


def resolved_device(device: str, gpus: int) -> str:
    """Resolve ``--device auto`` on a machine with ``gpus`` GPUs."""
    return device if device != "auto" else "cuda" if gpus else "cpu"


def _first_gpu(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def runtime_of(options: TrainOptions, gpus: int) -> dict[str, str]:
    """Return a dict with the device, dtype and parallel sizes of a run; ``auto`` is replaced by the actual value."""
    device = resolved_device(options.device, gpus)
    default_dtype = "float32" if device == "cpu" else "bfloat16"
    return {
        "device": device,
        "dtype": default_dtype if options.dtype == "auto" else options.dtype,
        "world_size": str(options.world_size),
        "tp_size": str(options.tp_size),
        "dp_size": str(options.world_size // options.tp_size),
    }


def tensor_parallel_problem(fsdp: bool = False) -> str:
    """Return why the installed transformers does not support tensor parallelism; empty if it is supported.

    If ``fsdp`` is true, the result is about tensor parallelism together with FSDP.
    """
    if fsdp:
        return transformers_problem("tensor parallelism together with FSDP", 5, 23)
    return transformers_problem("tensor parallelism", 5, 21)


def gpu_problem(device: str, ranks: int, gpus: int, chosen: Sequence[int] | None = None) -> str:
    """Return why some rank would have no GPU; empty if every rank has a GPU. Always empty on a CPU.

    The ranks use consecutive GPUs, starting with the GPU of ``device``. If ``chosen`` is set, ``chosen`` lists the GPU of each
    rank instead.
    """
    if not device.startswith("cuda"):
        return ""
    if not gpus:
        return f"--device {device}: PyTorch finds no GPU on this machine; use --device cpu, or run `areno check` for details"
    first = _first_gpu(device)
    indices = chosen or range(first, first + ranks)
    if max(indices) < gpus:
        return ""
    remedy = f"use --world-size {gpus - first}" if 0 < gpus - first < ranks else f"use GPU numbers below {gpus}"
    return (
        f"--world-size {ranks}: this machine has {gpus} GPU{'s' * (gpus != 1)}, but the ranks would use GPU "
        f"{', '.join(map(str, indices))}; {remedy}, or use --device cpu"
    )
