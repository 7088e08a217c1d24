"""Describes the environment of a run for ``environment.json``: package versions, processor, memory and devices.

Only sources that are fast to read are used: package metadata, ``/proc``, and PyTorch if another module has imported PyTorch.
"""

import importlib.metadata
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

from areno import __version__
from areno.cores import usable_cores
from areno.machine_memory import total_bytes

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "peft",
    "bitsandbytes",
    "torchao",
    "vllm",
    "ray",
    "numpy",
)


def environment() -> dict[str, Any]:
    """Return a description of the machine and the software of this process, in JSON types. Sizes are in bytes."""
    return {
        "areno": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": socket.gethostname(),
        "cpu": processor(),
        "cores": usable_cores(),
        "memory_bytes": total_bytes(),
        **_gpus(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "recorded": time.time(),
    }


def processor() -> str:
    """Return the name of the processor with its vector instructions, such as ``AMD EPYC (AVX2, AVX-512)``."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags", "").split()
    known = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX"}
    labels = [label for flag, label in known.items() if flag in flags]
    return f"{name} ({', '.join(labels)})" if labels else name


def _gpus() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {"gpus": []}
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {"gpus": [gpu.name for gpu in gpus], "gpu_memory_bytes": min(gpu.total_memory for gpu in gpus)}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
