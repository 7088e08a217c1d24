"""One side of ``train_step.py`` and ``real_model.py``: areno through the code path of ``areno train``. Prints one JSON line.

``options`` are further options of ``areno train``.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import areno  # before torch, as the command line does: it sets how OpenMP threads wait


def build_decode_step(settings: dict[str, Any]) -> None:
    """Compile the decode step and keep it on disk, as a run does that generates for longer than a minute."""
    import torch

    from areno.engine.engine import Engine, EngineConfig  # both from here, as commits have it that this is run with

    began = time.perf_counter()
    dtype = getattr(torch, settings.get("dtype", "float32"))
    Engine(settings["model"], EngineConfig(device=torch.device("cpu"), dtype=dtype, decode="compiled")).close()
    print(json.dumps({"seconds": time.perf_counter() - began}))


def main() -> None:
    settings = json.loads(sys.argv[1])
    if settings.get("build"):
        build_decode_step(settings)
        return
    import torch

    from areno.cli.main import main as run_command

    torch.set_num_threads(settings["threads"])
    folder = Path(settings["folder"])
    options = {
        "algo": settings["algo"],
        "ckpt": settings["model"],
        "dataset_path": folder / "data.jsonl",
        "run_dir": settings["run_dir"],
        "max_steps": settings["steps"],
        "batch_size": settings["prompts"],
        "max_new_tokens": settings["new_tokens"],
        "lr": 1e-5,
        "save_interval": 10**6,
        "shuffle": False,
    }
    if settings["algo"] == "sft":
        options["dataset_loader_fn"] = Path(__file__).with_name("own_rows.py")
    else:
        options |= {"n_samples": settings["samples"], "ignore_eos": True, "reward_fn_path": folder / "reward.py"}
    base_mib = peak_mib()
    if code := run_command(["train", *command_line(options | settings.get("options", {}))]):
        sys.exit(code)
    lines = [json.loads(line) for line in (Path(settings["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    ends = [line["time"] for line in lines]
    result = {
        "seconds": [b - a for a, b in itertools.pairwise(ends)][settings["warmup"] - 1 :],
        "how": f"areno {areno.__version__}, torch {torch.__version__}",
        "base_mib": base_mib,
        "peak_mib": peak_mib(),
        "response_len": lines[-1]["rollout/response_len_mean"],
        "seq_len": statistics.mean(line["rollout/seq_len_mean"] for line in lines),
        "split": {
            name: [line[f"time/{name}"] for line in lines[settings["warmup"] :]]
            for name in ("rollout", "reward", "advantage", "train")
            if f"time/{name}" in lines[-1]
        },
    }
    print(json.dumps(result))


def command_line(options: dict[str, Any]) -> list[str]:
    """Options of ``areno train`` as its arguments: the command line stays the same when modules are renamed."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


def peak_mib() -> float:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
