import copy
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from areno import __version__
from areno.cli.check import checks, format_checks
from areno.cli.env import OPTIONAL, REQUIRED, at_least, collect, format_report
from areno.cli.main import main
from areno.engine.kernels.library import compiler_missing
from tests.support.examples import some_quick


@pytest.fixture(scope="module")
def report():
    return collect()


@pytest.fixture
def altered(report):
    return copy.deepcopy(report)


def by_name(report):
    return {check.name: check for check in checks(report)}


def test_this_machine_is_ready(workspace, capsys):
    assert main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "AReno check: ready"
    assert re.fullmatch(r"OK   Python >= 3\.11", lines[2])
    assert lines[3].startswith("     3.")
    assert lines[-1].endswith("areno quickstart")
    assert "Next:" in lines


def test_if_all_checks_pass_the_only_next_step_is_a_first_run(altered):
    altered["dependencies"]["peft"] = {"version": None, "imported": False, "error": "not installed"}
    altered["cpu"]["available_bytes"] = 2**33
    results = [check for check in checks(altered) if check.status in ("OK", "INFO")]
    details, steps = format_checks(results).split("Ready: ")
    assert "peft (optional)\n     not installed; needed for adapters (--lora-rank); to add it: " in details
    ready, after = steps.split("\n\n")
    assert ready.startswith("training on cpu, areno serve and agents") or "cuda" in ready
    assert "rewards for mathematics" in ready
    assert "adapters" not in ready
    assert after == "Next:\n  1. start a first run: areno quickstart"


def test_each_result_is_a_status_line_and_an_indented_detail(report):
    body = format_checks(checks(report)).split("\n\n")[1].splitlines()
    assert all(re.match(r"(OK  |INFO|WARN|FAIL) \S", line) for line in body[::2])
    assert all(line.startswith("     ") for line in body[1::2])


def test_every_failure_and_warning_has_a_remedy(altered):
    altered["python"]["version"] = "3.10.4"
    altered["platform"]["system"] = "Windows"
    altered["dependencies"]["torch"] |= {"version": "2.6.0"}
    altered["dependencies"]["datasets"] = {"version": None, "imported": False, "error": "not installed"}
    altered["dependencies"]["numpy"] |= {"imported": False, "error": "ImportError: libopenblas"}
    altered["dependencies"]["peft"] = {"version": "0.5.0", "imported": True, "error": None}
    altered["cpu"]["available_bytes"] = 2**29
    results = by_name(altered)
    peft = results["peft (optional)"]
    assert (peft.status, peft.detail) == (
        "WARN",
        "0.5.0 is too old for adapters (--lora-rank), which needs 0.17 or newer",
    )
    assert results["Python >= 3.11"].status == results["torch >= 2.11"].status == "FAIL"
    assert results["datasets >= 4.0"].remedy.endswith('pip install --upgrade "datasets>=4.0"')
    assert "ImportError: libopenblas" in results["numpy >= 1.26"].detail
    assert results["memory"].status == results["platform"].status == "WARN"
    assert all(check.remedy for check in results.values() if check.status in ("FAIL", "WARN"))
    text = format_checks(list(results.values()))
    assert text.startswith("AReno check: not ready")
    assert text.endswith("areno check")


@pytest.mark.parametrize(
    ("build", "driver_cuda", "status", "part"),
    [
        (None, "13.0", "WARN", "but PyTorch is a CPU build"),
        ("13.0", "12.4", "WARN", "built for CUDA 13.0, but the driver supports 12.4"),
        ("12.6", "12.4", "WARN", "sees no GPU"),
        ("12.6", None, "INFO", "no NVIDIA driver found; training runs on the CPU"),
    ],
)
def test_cuda_mismatches_are_distinguished(altered, build, driver_cuda, status, part):
    altered["torch"] |= {"cuda_build": build, "cuda_available": False}
    altered["gpus"] = []
    driver = {
        "path": "x",
        "driver_version": "550.1" if driver_cuda else None,
        "cuda_version": driver_cuda,
        "error": None,
    }
    altered["cuda"]["driver"] = driver
    check = by_name(altered)["CUDA"]
    assert check.status == status
    assert part in check.detail


def test_a_driver_that_fails_is_reported_with_its_error(tmp_path, monkeypatch, altered):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch' >&2\nexit 18\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    altered["cuda"]["driver"] = collect()["cuda"]["driver"]
    altered["torch"]["cuda_available"] = False
    check = by_name(altered)["CUDA"]
    assert check.status == "WARN"
    assert check.detail == "nvidia-smi fails: Failed to initialize NVML: Driver/library version mismatch"


@pytest.mark.parametrize("given", [None, "clang++", "ccache mine"])
def test_the_compiler_is_the_one_that_compiles_the_kernels(tmp_path, monkeypatch, report, given):
    """Of the usual compilers, the machine has only clang++."""
    for name in ("clang++", "ccache", "c++"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if given is not None:
        monkeypatch.setenv("CXX", given)
    monkeypatch.setattr("sys.platform", "linux")
    check = by_name(report)["C++ compiler (optional)"]
    assert (check.status == "OK") == (compiler_missing() == "")
    missing = "g++ was not found, so decoding on a CPU is slower"
    assert check.detail == (f"{tmp_path}/{given.split()[0]}" if given else missing)


@pytest.mark.parametrize("module", some_quick(["yaml", "safetensors", "numpy"], "numpy"))
def test_a_required_package_that_does_not_import_is_reported(module):
    code = f"import sys; sys.modules[{module!r}] = None\nfrom areno.cli.main import main\nsys.exit(main(['check']))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "AReno check: not ready" in result.stdout
    assert f"import of {module} halted" in result.stdout


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"XDG_CACHE_HOME": "/caches"},
        {"XDG_CACHE_HOME": "/caches", "HF_HOME": "~/hf"},
        {"HF_HOME": "/hf", "HUGGINGFACE_HUB_CACHE": "/older"},
        {"HF_HOME": "/hf", "HF_HUB_CACHE": "$HOME/hub"},
    ],
)
def test_the_cache_folder_is_that_of_huggingface_hub(given):
    names = ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in names} | given
    code = (
        "import huggingface_hub.constants as c; from areno.cli.env import hf_cache; print(c.HF_HUB_CACHE, hf_cache())"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    theirs, ours = result.stdout.split()
    assert theirs == ours


def test_an_apple_gpu_is_listed_with_the_reason_why_it_is_not_used(altered):
    assert "MPS" not in by_name(altered)
    altered["torch"]["mps_available"] = True
    check = by_name(altered)["MPS"]
    assert (check.status, check.remedy) == ("INFO", "")
    assert "lacks float64" in check.detail


def test_gpus_are_listed_with_capability_and_memory(altered):
    altered["gpus"] = [{"index": 0, "name": "H", "capability": "9.0", "memory_bytes": 80 * 2**30}]
    assert by_name(altered)["device cuda:0"].detail == "H, capability 9.0, 80.0 GiB"
    assert "flash" in by_name(altered)["flash-attn (optional)"].remedy


def test_a_file_in_place_of_the_run_folder_is_reported(altered, tmp_path):
    (tmp_path / "runs").touch()
    altered["paths"]["runs"] = str(tmp_path / "runs")
    assert by_name(altered)["run folder"].status == "WARN"


def test_env_json_has_sorted_keys_and_every_part(capsys):
    assert main(["env", "--json"]) == 0
    text = capsys.readouterr().out
    loaded = json.loads(text)
    assert text == json.dumps(loaded, indent=2, sort_keys=True) + "\n"
    parts = {"areno", "python", "platform", "cpu", "torch", "cuda", "gpus", "dependencies", "env", "paths"}
    assert loaded.keys() == parts
    assert loaded["areno"]["version"] == __version__
    assert loaded["dependencies"]["torch"]["imported"] is True


def test_env_as_text_shows_the_same_report(report):
    text = format_report(report)
    assert f"  version: {__version__}" in text
    assert "gpus:" in text
    gpu = {"gpus": [{"index": 0, "name": "H"}]}
    assert format_report(gpu) == "gpus:\n  0:\n    name: H"


@pytest.mark.parametrize(("shown", "version"), [("12.8", "12.8"), ("N/A", None)])
def test_a_driver_without_a_cuda_version_has_none(shown, version, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '| Driver Version: 570.1  CUDA Version: {shown}  |'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    driver = collect()["cuda"]["driver"]
    assert (driver["driver_version"], driver["cuda_version"]) == ("570.1", version)


def test_versions_are_compared_numerically():
    assert at_least("2.13.0+cpu", "2.11")
    assert at_least("2.11.0rc1", "2.11")
    assert not at_least("2.9.1", "2.11")
    assert not at_least(None, "1.0")


def test_the_minimum_versions_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {f"{name}>={minimum}" for name, minimum in REQUIRED.items()} == set(project["dependencies"])
    extras = project["optional-dependencies"]
    checked = {item for extra in ("math", "flash", "lora", "qlora") for item in extras[extra]}
    checked |= {item for item in extras["serve"] if item.startswith(("uvicorn", "fastapi"))}
    assert {f"{name}>={minimum}" for name, minimum in OPTIONAL.items()} == checked
