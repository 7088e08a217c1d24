"""``areno check``: is this machine ready to train, and if not, what exactly to do.

A machine without a GPU is ready. FAIL means that training cannot work and makes the exit code 1; WARN that it will be
slower or may break; INFO that something optional is missing. Whatever is not OK comes with its remedy.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areno.cli.env import OPTIONAL, REQUIRED, at_least, collect
from areno.config.packages import install_command
from areno.config.parser import TypedParser
from areno.config.paths import unwritable

Status = Literal["OK", "INFO", "WARN", "FAIL"]
_GIB = 1024**3
_EXTRAS = {
    "uvicorn": ("serve", "areno serve and agents"),
    "fastapi": ("serve", "areno serve and agents"),
    "flash-attn": ("flash", "FlashAttention on CUDA"),
    "math-verify": ("math", "rewards for mathematics"),
    "peft": ("lora", "adapters (--lora-rank)"),
    "bitsandbytes": ("qlora", "4-bit base weights (--load-in-4bit)"),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One result: ``remedy`` is what to do, empty when there is nothing to do."""

    status: Status
    name: str
    detail: str
    remedy: str = ""


def run(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: arguments after ``check``.

    Returns:
        1 if a check failed, else 0.
    """
    TypedParser("areno check", description="Check whether this machine is ready to train.").parse_args(argv)
    results = checks(collect())
    print(format_checks(results))
    return int(any(result.status == "FAIL" for result in results))


def checks(report: dict[str, Any]) -> list[Check]:
    """Judge a report of ``areno env``."""
    parts: tuple[Callable[[dict[str, Any]], list[Check]], ...] = (
        _python,
        _required,
        _devices,
        _cuda,
        _optional,
        _compiler,
        _places,
        _memory,
    )
    return [check for part in parts for check in part(report)]


def format_checks(results: Sequence[Check]) -> str:
    """Lay the results out: the verdict, each check with its detail, what is ready, and what to mend, worst first.

    How to add an optional part stands beside it: it is no step that a ready machine still needs.
    """
    ready = not any(result.status == "FAIL" for result in results)
    lines = [f"AReno check: {'ready' if ready else 'not ready'}", ""]
    for result in results:
        how = f"; to add it: {result.remedy}" if result.status == "INFO" and result.remedy else ""
        lines += [f"{result.status:<4} {result.name}", f"     {result.detail}{how}"]
    if ready:
        lines += ["", f"Ready: {', '.join(_ready(results))}"]
    remedies = [result.remedy for status in ("FAIL", "WARN") for result in results if result.status == status]
    steps = remedies if not ready else [*remedies, "a first run: areno quickstart"]
    steps += [] if ready else ["areno check"]
    return "\n".join([*lines, "", "Next:", *(f"  {number}. {step}" for number, step in enumerate(steps, start=1))])


def _ready(results: Sequence[Check]) -> list[str]:
    """What this machine can do now."""
    fine = {result.name for result in results if result.status == "OK"}
    devices = [name.removeprefix("device ") for name in sorted(fine) if name.startswith("device ")]
    lacking = {extra for name, (extra, _) in _EXTRAS.items() if f"{name} (optional)" not in fine}
    uses = dict.fromkeys(use for extra, use in _EXTRAS.values() if extra not in lacking)
    return [f"training on {' and '.join(devices)}", *uses]


def _python(report: dict[str, Any]) -> list[Check]:
    version, system = report["python"]["version"], report["platform"]["system"]
    fine = at_least(version, "3.11")
    python = Check("OK", "Python >= 3.11", f"{version} ({report['python']['executable']})")
    if not fine:
        python = Check("FAIL", python.name, python.detail, "Install Python 3.11 or newer, and areno into it.")
    place = report["platform"]["platform"]
    if system in ("Linux", "Darwin"):
        return [python, Check("OK", "platform", place)]
    return [
        python,
        Check("WARN", "platform", f"{place} is not tested", "On Windows, use WSL 2 with a Linux distribution."),
    ]


def _required(report: dict[str, Any]) -> list[Check]:
    return [_one_required(name, minimum, report["dependencies"][name]) for name, minimum in REQUIRED.items()]


def _one_required(name: str, minimum: str, found: dict[str, Any]) -> Check:
    title = f"{name} >= {minimum}"
    install = f'{Path(sys.executable).name} -m pip install --upgrade "{title.replace(" ", "")}"'
    if found["version"] is None:
        return Check("FAIL", title, "not installed", install)
    if not at_least(found["version"], minimum):
        return Check("FAIL", title, f"{found['version']} is too old", install)
    if not found["imported"]:
        repair = install.replace("--upgrade", "--force-reinstall")
        return Check("FAIL", title, f"{found['version']} does not import: {found['error']}", repair)
    return Check("OK", title, found["version"])


def _devices(report: dict[str, Any]) -> list[Check]:
    if report["gpus"]:
        return [
            Check(
                "OK",
                f"device cuda:{gpu['index']}",
                f"{gpu['name']}, capability {gpu['capability']}, {gpu['memory_bytes'] / _GIB:.1f} GiB",
            )
            for gpu in report["gpus"]
        ]
    cpu = report["cpu"]
    threads = cpu.get("torch_threads", "unknown")
    return [Check("OK", "device cpu", f"{cpu['usable_cores']} cores, {threads} PyTorch threads; no GPU, none needed")]


def _cuda(report: dict[str, Any]) -> list[Check]:
    build, driver = report["torch"]["cuda_build"], report["cuda"]["driver"]
    name, newest = "CUDA", driver["cuda_version"]
    if report["torch"]["cuda_available"]:
        return [Check("OK", name, f"PyTorch built for {build}, driver {driver['driver_version']} (CUDA {newest})")]
    if driver["driver_version"] is None:
        return [Check("INFO", name, "no NVIDIA driver found; training runs on the CPU")]
    if build is None:
        remedy = "For the GPU, reinstall PyTorch from a CUDA build: see pytorch.org/get-started/locally."
        return [
            Check(
                "WARN", name, f"there is a GPU (driver {driver['driver_version']}), but PyTorch is a CPU build", remedy
            )
        ]
    if newest is not None and not at_least(newest, build.split(".")[0]):
        remedy = f"Update the NVIDIA driver, or install a PyTorch built for CUDA {newest} or older."
        return [Check("WARN", name, f"PyTorch is built for CUDA {build}, the driver offers {newest}", remedy)]
    remedy = "Check CUDA_VISIBLE_DEVICES, and that nvidia-smi lists the GPU for this user."
    return [Check("WARN", name, f"the driver is there, but PyTorch (CUDA {build}) sees no GPU", remedy)]


def _optional(report: dict[str, Any]) -> list[Check]:
    results = []
    for name in OPTIONAL:
        found = report["dependencies"][name]
        extra, use = _EXTRAS[name]
        if found["imported"]:
            results.append(Check("OK", f"{name} (optional)", found["version"]))
        elif name != "flash-attn" or report["gpus"]:
            results.append(
                Check("INFO", f"{name} (optional)", f"{found['error']}; needed for {use}", install_command(extra))
            )
        else:
            results.append(Check("INFO", f"{name} (optional)", f"{found['error']}; of no use without a GPU"))
    return results


def _compiler(report: dict[str, Any]) -> list[Check]:
    named = os.environ.get("CXX")
    found = next((path for path in map(shutil.which, (named or "c++", "g++", "clang++")) if path), None)
    if found:
        return [Check("OK", "C++ compiler (optional)", found)]
    mac = report["platform"]["system"] == "Darwin"
    remedy = (
        "xcode-select --install" if mac else "Install g++ from your distribution (Debian and Ubuntu: apt install g++)."
    )
    return [Check("INFO", "C++ compiler (optional)", "none found; torch.compile is not used then", remedy)]


def _places(report: dict[str, Any]) -> list[Check]:
    free = shutil.disk_usage(".").free
    remedy = "" if free >= 5 * _GIB else "Free some disk space, or work in a folder on a larger disk (--run-dir)."
    results = [
        Check("WARN" if remedy else "OK", "disk space here", f"{free / _GIB:.1f} GiB free in {Path.cwd()}", remedy)
    ]
    for name, place, advice in (
        ("run folder", report["paths"]["runs"], "Work in a folder that you may write to, or pass --run-dir."),
        ("Hugging Face cache", report["paths"]["hf_cache"], "Set HF_HOME to a folder that you may write to."),
    ):
        problem = unwritable(Path(place), name)
        results.append(Check("WARN", name, problem, advice) if problem else Check("OK", name, f"{place} is writable"))
    return results


def _memory(report: dict[str, Any]) -> list[Check]:
    available = report["cpu"].get("available_bytes")
    if available is None:
        return []  # without torch there is no figure, and the torch check has failed already
    remedy = "" if available >= 2 * _GIB else "Close other programs; a tiny model needs about 2 GiB."
    return [Check("WARN" if remedy else "OK", "memory", f"{available / _GIB:.1f} GiB available", remedy)]
