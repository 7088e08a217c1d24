"""``areno env``: reports hardware, packages and environment as text or JSON, for bug reports and ``areno check``.

The command works even if torch is broken, because each package is imported separately and failed imports are reported.
"""

import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areno import __version__
from areno.config.parser import TypedParser
from areno.config.paths import RUNS_ROOT
from areno.cores import usable_cores
from areno.machine_memory import free_bytes

REQUIRED = {
    "torch": "2.11",
    "transformers": "5.17",
    "tokenizers": "0.22",
    "safetensors": "0.5",
    "httpx": "0.27",
    "huggingface-hub": "1.0",
    "cloudpickle": "3.0",
    "datasets": "4.0",
    "jinja2": "3.1",
    "numpy": "1.26",
    "omegaconf": "2.4",
    "psutil": "5.9",
    "pyyaml": "6.0",
    "rich": "13.7",
    "tensorboard": "2.16",
}
"""Required distributions and their minimum versions."""

OPTIONAL = {
    "uvicorn": "0.30",
    "fastapi": "0.115",
    "math-verify": "0.8",
    "flash-attn": "2.7",
    "peft": "0.17",
    "bitsandbytes": "0.46",
}
"""Optional distributions and their minimum versions."""

_MODULES = {
    "huggingface-hub": "huggingface_hub",
    "math-verify": "math_verify",
    "flash-attn": "flash_attn",
    "pyyaml": "yaml",
}
_VARIABLES = (
    "ARENO_LOG_COMPLETIONS",
    "ARENO_LOG_LEVEL",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "MAX_JOBS",
    "OMP_NUM_THREADS",
    "TORCH_CUDA_ARCH_LIST",
    "XDG_CACHE_HOME",
)


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = TypedParser("areno env", description="Print a report about this machine, for bug reports.")
    parser.add_argument("--json", action="store_true", help="Print JSON with sorted keys.")
    arguments = parser.parse_args(argv)
    report = collect()
    print(json.dumps(report, indent=2, sort_keys=True) if arguments.json else format_report(report))
    return 0


def collect() -> dict[str, Any]:
    """Return a report about this machine, in JSON types. The call takes seconds, because it imports all dependencies."""
    torch_report, gpus = _torch()
    return {
        "areno": {"version": __version__},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": {
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
            "platform": platform.platform(),
        },
        "cpu": _cpu(torch_report["imported"]),
        "torch": torch_report,
        "cuda": {**_toolkit(), "driver": _driver()},
        "gpus": gpus,
        "dependencies": {name: dependency(name) for name in (*REQUIRED, *OPTIONAL)},
        "env": {name: os.environ.get(name) for name in _VARIABLES},
        "paths": {"runs": str(RUNS_ROOT.absolute()), "hf_cache": str(hf_cache())},
    }


def dependency(name: str) -> dict[str, Any]:
    """Import a distribution's module, and return ``version``, ``imported`` and ``error``.

    If the distribution is not installed, ``version`` is None.
    """
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return {"version": None, "imported": False, "error": "not installed"}
    try:
        importlib.import_module(_MODULES.get(name, name))
    except Exception as error:  # a broken native library may raise anything
        return {"version": version, "imported": False, "error": f"{type(error).__name__}: {error}"}
    return {"version": version, "imported": True, "error": None}


def at_least(version: str | None, minimum: str) -> bool:
    """Whether a version is at least ``minimum``. Only release numbers count: ``2.13.0+cpu`` is at least ``2.13.0``."""
    return version is not None and _numbers(version) >= _numbers(minimum)


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def hf_cache() -> Path:
    """Return the Hugging Face cache folder, without importing huggingface_hub, which may not be installed."""
    home = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    older_name = os.environ.get("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    return Path(os.path.expandvars(os.environ.get("HF_HUB_CACHE", older_name))).expanduser()


def _cpu(with_torch: bool) -> dict[str, Any]:
    report: dict[str, Any] = {
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "available_bytes": free_bytes(),
    }
    if with_torch:
        import torch

        report |= {
            "torch_threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }
    return report


def _torch() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    report: dict[str, Any] = dependency("torch") | {
        "cuda_build": None,
        "cuda_available": False,
        "device_count": 0,
        "mps_available": False,
    }
    if not report["imported"]:
        return report, []
    import torch

    available = torch.cuda.is_available()
    count = torch.cuda.device_count() if available else 0
    report |= {"cuda_build": torch.version.cuda, "cuda_available": available, "device_count": count}
    report["mps_available"] = torch.backends.mps.is_available()
    gpus = [
        {
            "index": index,
            "name": torch.cuda.get_device_name(index),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(index))),
            "memory_bytes": torch.cuda.get_device_properties(index).total_memory,
        }
        for index in range(count)
    ]
    return report, gpus


def _toolkit() -> dict[str, Any]:
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    home = home or (str(Path(nvcc).resolve().parents[1]) if nvcc else None)
    text = _output([nvcc, "--version"])[0] if nvcc else ""
    return {"cuda_home": home, "nvcc": {"path": nvcc, "version": _first(r"release (\S+?),", text)}}


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def _driver() -> dict[str, str | None]:
    path = shutil.which("nvidia-smi")
    if path is None:
        return {"path": None, "driver_version": None, "cuda_version": None, "error": "nvidia-smi not found"}
    text, error = _output([path])
    driver, cuda = _first(r"Driver Version: (\S+)", text), _first(r"CUDA Version: (\d\S*)", text)
    return {"path": path, "driver_version": driver, "cuda_version": cuda, "error": error}


def _output(command: list[str]) -> tuple[str, str | None]:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{type(error).__name__}: {error}"
    return result.stdout, None if result.returncode == 0 else (result.stderr or result.stdout).strip()


def format_report(report: dict[str, Any], indent: str = "") -> str:
    """Format the report as indented ``key: value`` lines."""
    lines: list[str] = []
    for key, value in report.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", format_report(value, indent + "  ")]
        elif isinstance(value, list):
            lines.append(f"{indent}{key}:" + ("" if value else " none"))
            lines += [format_report({str(item.pop("index")): item}, indent + "  ") for item in map(dict, value)]
        else:
            lines.append(f"{indent}{key}: {'-' if value is None else value}")
    return "\n".join(lines)
