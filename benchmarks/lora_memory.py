"""Peak memory and seconds of training all weights, an adapter, and an adapter on a 4-bit base.

    python benchmarks/lora_memory.py                # table, then one line of JSON
    python benchmarks/lora_memory.py --save NAME    # also benchmarks/results/NAME.json

Each way trains the same random model of 110 M parameters in fp32, with the same rows and sizes, in a fresh process: some SFT
steps, and some GRPO steps with a KL term, which needs a reference. Peak memory is the largest resident set of the process
minus that before the model is loaded. A 4-bit base needs `bitsandbytes`; without it, that way is skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import finish, machine, make_checkpoint, median, problems, run_worker

import areno  # noqa: F401  (before torch)

WAYS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "LoRA, rank 16": {"lora_rank": 16},
    "QLoRA, rank 16": {"lora_rank": 16, "load_in_4bit": True},
}
REWARD = "def reward_fn(record):\n    text = record.completion\n    return sum(c.isdigit() for c in text) / (1 + len(text))\n"
LOADER = Path(__file__).with_name("workers") / "own_rows.py"


def resident_mib() -> float:
    """Largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """One way of training, in this process."""
    import torch

    from areno.api.run_training import run_training
    from areno.config.all_train_options import TrainOptions
    from areno.config.hooks import LOADER_HOOK, load_hook

    if settings["way"].get("lora_rank"):
        import peft  # noqa: F401
    torch.set_num_threads(settings["threads"])
    folder, algo = Path(settings["folder"]), settings["algo"]
    shared: dict[str, Any] = {
        "algo": algo,
        "ckpt": str(folder / "model"),
        "dataset_path": str(folder / "data.jsonl"),
        "run_dir": settings["run_dir"],
        "max_steps": settings["steps"],
        "batch_size": 2 if algo == "grpo" else 4,
        "mini_bs": 4,
        "max_new_tokens": 64 if algo == "grpo" else 512,
        "lr": 1e-5,
        "save_interval": 10**6,
        **settings["way"],
    }
    loader = None
    if algo == "grpo":
        shared |= {"n_samples": 4, "ignore_eos": True, "reward_fn_path": str(folder / "reward.py"), "kl_coef": 0.01}
        shared |= {"kv_cache_tokens": 4096, "reward_workers": 1, "eager_decode": True}
    else:
        loader = load_hook(str(LOADER), LOADER_HOOK)
    before = resident_mib()
    run_training(TrainOptions(**shared), loader_fn=loader, console_level="ERROR")
    lines = [json.loads(line) for line in (Path(settings["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["train/logp_abs_diff_mean"] for line in lines if "train/logp_abs_diff_mean" in line]
    seconds = [b - a for a, b in itertools.pairwise(line["time"] for line in lines)]
    saved = [path for path in Path(settings["run_dir"], "checkpoints").rglob("*") if path.is_file()]
    return {
        "peak_mib": round(resident_mib() - before),
        "seconds": median(seconds),
        "checkpoint_mib": round(sum(path.stat().st_size for path in saved) / 2**20, 1),
        "gap": max(gaps, default=None),
    }


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print(json.dumps(measure(json.loads(sys.argv[1]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", default="")
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "settings": vars(args)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {"hidden": 1024, "layers": 8, "heads": 16, "kv_heads": 8, "vocab": 8000}
        results["parameters"] = make_checkpoint(folder / "model", **sizes)
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, problems(256))))
        (folder / "reward.py").write_text(REWARD)
        for algo, (way, options) in itertools.product(("sft", "grpo"), WAYS.items()):
            if options.get("load_in_4bit") and importlib.util.find_spec("bitsandbytes") is None:
                continue
            settings = {"algo": algo, "way": options, "folder": name, "run_dir": str(folder / algo / way)}
            settings |= {"steps": args.steps, "threads": args.threads}
            found = results.setdefault(algo, {})[way] = run_worker(sys.executable, Path(__file__), settings)
            print(f"{algo:<5} {way:<15} {found['peak_mib']:>6} MiB  {found['seconds']:>7.2f} s/step", flush=True)
    finish(results, args.save)


if __name__ == "__main__":
    main()
