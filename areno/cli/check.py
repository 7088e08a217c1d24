"""``areno check``: reports whether this machine is ready to train, and how to fix problems.

No GPU is needed. FAIL means that training cannot work; the exit code is then 1. WARN means that training may be slower or may
fail. INFO means that something optional is missing or unused.
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areno.cli.env import OPTIONAL, REQUIRED, at_least, collect
from areno.compiler import compiler_command
from areno.config.machine import NO_MPS
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
    """The result of one check; ``remedy`` is empty if there is nothing to do."""

    status: Status
    name: str
    detail: str
    remedy: str = ""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    TypedParser("areno check", description="Check whether this machine is ready to train.").parse_args(argv)
    results = checks(collect())
    print(format_checks(results))
    return int(any(result.status == "FAIL" for result in results))


def checks(report: dict[str, Any]) -> list[Check]:
    """Run all checks on a report of ``areno env``, and return the results."""
    parts = (_python, _required, _devices, _mps, _cuda, _optional, _compiler, _folders, _memory)
    return [check for part in parts for check in part(report)]


def format_checks(results: Sequence[Check]) -> str:
    """Format the results of all checks: whether the machine is ready, the details, the available features, and the next steps.

    The remedies for failures come before the remedies for warnings.
    """
    ready = not any(result.status == "FAIL" for result in results)
    lines = [f"AReno check: {'ready' if ready else 'not ready'}", ""]
    for result in results:
        hint = f"; to add it: {result.remedy}" if result.status == "INFO" and result.remedy else ""
        lines += [f"{result.status:<4} {result.name}", f"     {result.detail}{hint}"]
    if ready:
        lines += ["", f"Ready: {', '.join(_ready(results))}"]
    steps = [result.remedy for status in ("FAIL", "WARN") for result in results if result.status == status]
    steps.append("start a first run: areno quickstart" if ready else "areno check")
    return "\n".join([*lines, "", "Next:", *(f"  {number}. {step}" for number, step in enumerate(steps, start=1))])


def _ready(results: Sequence[Check]) -> list[str]:
    passed = {result.name for result in results if result.status == "OK"}
    devices = [name.removeprefix("device ") for name in sorted(passed) if name.startswith("device ")]
    missing = {extra for name, (extra, _) in _EXTRAS.items() if f"{name} (optional)" not in passed}
    uses = dict.fromkeys(use for extra, use in _EXTRAS.values() if extra not in missing)
    return [f"training on {' and '.join(devices)}", *uses]


def _check(passed: bool, otherwise: Status, name: str, detail: str, remedy: str) -> Check:
    return Check("OK", name, detail) if passed else Check(otherwise, name, detail, remedy)


def _python(report: dict[str, Any]) -> Iterator[Check]:
    python, system = report["python"], report["platform"]
    yield _check(
        at_least(python["version"], "3.11"),
        "FAIL",
        "Python >= 3.11",
        f"{python['version']} ({python['executable']})",
        "Install Python 3.11 or newer, then install areno into it.",
    )
    tested = system["system"] in ("Linux", "Darwin")
    detail = system["platform"] if tested else f"{system['platform']} is untested"
    yield _check(tested, "WARN", "platform", detail, "On Windows, use WSL 2 with a Linux distribution.")


def _required(report: dict[str, Any]) -> Iterator[Check]:
    for name, minimum in REQUIRED.items():
        package = report["dependencies"][name]
        version, title = package["version"], f"{name} >= {minimum}"
        install = f'{Path(sys.executable).name} -m pip install --upgrade "{name}>={minimum}"'
        if version is None:
            yield Check("FAIL", title, "not installed", install)
        elif not at_least(version, minimum):
            yield Check("FAIL", title, f"version {version} is too old", install)
        elif not package["imported"]:
            repair = install.replace("--upgrade", "--force-reinstall")
            yield Check("FAIL", title, f"version {version} cannot be imported: {package['error']}", repair)
        else:
            yield Check("OK", title, version)


def _devices(report: dict[str, Any]) -> Iterator[Check]:
    for gpu in report["gpus"]:
        detail = f"{gpu['name']}, capability {gpu['capability']}, {gpu['memory_bytes'] / _GIB:.1f} GiB"
        yield Check("OK", f"device cuda:{gpu['index']}", detail)
    if not report["gpus"]:
        cores, threads = report["cpu"]["usable_cores"], report["cpu"].get("torch_threads", "unknown")
        yield Check("OK", "device cpu", f"{cores} cores, {threads} PyTorch threads; no GPU (none is needed)")


def _mps(report: dict[str, Any]) -> Iterator[Check]:
    if report["torch"]["mps_available"]:
        yield Check("INFO", "MPS", NO_MPS)


def _cuda(report: dict[str, Any]) -> Iterator[Check]:
    build, driver = report["torch"]["cuda_build"], report["cuda"]["driver"]
    version, newest = driver["driver_version"], driver["cuda_version"]
    if report["torch"]["cuda_available"]:
        supports = f" supports CUDA up to {newest}" if newest else ""
        known = "" if version is None else f"; driver {version}{supports}"
        yield Check("OK", "CUDA", f"PyTorch built for {f'CUDA {build}' if build else 'another kind of GPU'}{known}")
        return
    if version is None and driver["error"] and driver["path"]:
        remedy = "If the machine has an NVIDIA GPU, repair its driver, or restart the machine if the driver was just updated."
        yield Check("WARN", "CUDA", f"nvidia-smi fails: {' '.join(driver['error'].split())}", remedy)
        return
    if version is None:
        yield Check("INFO", "CUDA", "no NVIDIA driver found; training runs on the CPU")
        return
    if build is None:
        detail = f"a GPU driver is installed ({version}), but PyTorch is a CPU build"
        remedy = "To use the GPU, install a CUDA build of PyTorch: see pytorch.org/get-started/locally."
    elif newest is not None and not at_least(newest, build.split(".")[0]):
        detail = f"PyTorch is built for CUDA {build}, but the driver supports {newest}"
        remedy = f"Update the NVIDIA driver, or install a PyTorch built for CUDA {newest} or older."
    else:
        detail = f"the driver is installed, but PyTorch (CUDA {build}) sees no GPU"
        remedy = "Check the variable CUDA_VISIBLE_DEVICES, and check that nvidia-smi lists the GPU for this user."
    yield Check("WARN", "CUDA", detail, remedy)


def _optional(report: dict[str, Any]) -> Iterator[Check]:
    for name in OPTIONAL:
        package, (extra, use) = report["dependencies"][name], _EXTRAS[name]
        if package["imported"] and not at_least(package["version"], OPTIONAL[name]):
            detail = f"{package['version']} is too old for {use}, which needs {OPTIONAL[name]} or newer"
            yield Check("WARN", f"{name} (optional)", detail, install_command(extra))
        elif package["imported"]:
            yield Check("OK", f"{name} (optional)", package["version"])
        elif name != "flash-attn" or report["gpus"]:
            yield Check("INFO", f"{name} (optional)", f"{package['error']}; needed for {use}", install_command(extra))
        else:
            yield Check("INFO", f"{name} (optional)", f"{package['error']}; needs a GPU")


def _compiler(report: dict[str, Any]) -> Iterator[Check]:
    compiler = compiler_command()[0]
    path = shutil.which(compiler)
    install = "Install g++ from your distribution (Debian and Ubuntu: apt install g++), or set CXX to another compiler."
    yield _check(
        path is not None,
        "INFO",
        "C++ compiler (optional)",
        path or f"{compiler} was not found, so decoding on a CPU is slower",
        "xcode-select --install" if report["platform"]["system"] == "Darwin" else install,
    )


def _folders(report: dict[str, Any]) -> Iterator[Check]:
    free = shutil.disk_usage(".").free
    yield _check(
        free >= 5 * _GIB,
        "WARN",
        "disk space",
        f"{free / _GIB:.1f} GiB free in {Path.cwd()}",
        "Free some disk space, or put the run on a larger disk (--run-dir).",
    )
    for name, folder, remedy in (
        ("run folder", report["paths"]["runs"], "Work in a writable folder, or pass --run-dir."),
        ("Hugging Face cache", report["paths"]["hf_cache"], "Set HF_HOME to a writable folder."),
    ):
        problem = unwritable(Path(folder), name)
        yield _check(not problem, "WARN", name, problem or f"{folder} is writable", remedy)


def _memory(report: dict[str, Any]) -> Iterator[Check]:
    available, remedy = report["cpu"]["available_bytes"], "Close other programs; a tiny model needs about 2 GiB."
    yield _check(available >= 2 * _GIB, "WARN", "memory", f"{available / _GIB:.1f} GiB available", remedy)
