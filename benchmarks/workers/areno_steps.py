"""One side of ``train_step.py``: areno through the code path of ``areno train``. Prints one JSON line."""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from pathlib import Path

import areno  # noqa: F401  (before torch, as the command line does: it sets how OpenMP threads wait)


def build_decode_step(model: str) -> None:
    """Compile the decode step and keep it on disk, as a run does that generates for longer than a minute."""
    import torch

    from areno.engine.engine import Engine
    from areno.engine.engine_config import EngineConfig

    began = time.perf_counter()
    Engine(model, EngineConfig(device=torch.device("cpu"), dtype=torch.float32, decode="compiled")).close()
    print(json.dumps({"seconds": time.perf_counter() - began}))


def main() -> None:
    settings = json.loads(sys.argv[1])
    if settings.get("build"):
        build_decode_step(settings["model"])
        return
    import torch

    from areno.api.run import run_training
    from areno.config.train_options import TrainOptions

    torch.set_num_threads(settings["threads"])

    algo, folder = settings["algo"], Path(settings["folder"])
    shared = {
        "algo": algo,
        "ckpt": settings["model"],
        "dataset_path": str(folder / "data.jsonl"),
        "run_dir": settings["run_dir"],
        "max_steps": settings["steps"],
        "batch_size": settings["prompts"],
        "mini_bs": settings["rows"],
        "max_new_tokens": settings["new_tokens"],
        "lr": 1e-5,
        "activation_checkpointing": settings["checkpointing"],
        "save_interval": 10**6,
        "shuffle": False,
    }
    if algo == "grpo":
        shared |= {"n_samples": settings["samples"], "ignore_eos": True, "reward_fn_path": str(folder / "reward.py")}
    run_training(TrainOptions(**shared))
    lines = [json.loads(line) for line in (Path(settings["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    ends = [line["time"] for line in lines]
    result = {
        "seconds": [b - a for a, b in itertools.pairwise(ends)][settings["warmup"] - 1 :],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "response_len": lines[-1]["rollout/response_len_mean"],
        "seq_len": lines[-1]["rollout/seq_len_mean"],
        "split": {
            name: [line[f"time/{name}"] for line in lines[settings["warmup"] :]]
            for name in ("rollout", "reward", "advantage", "train")
            if f"time/{name}" in lines[-1]
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
