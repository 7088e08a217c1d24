"""The golden runs: every example YAML, and twelve runs of ``areno train``, all through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

TRAIN = ("--max-new-tokens", "12", "--lr", "1e-3", "--batch-size", "6", "--mini-bs", "8", "--device", "cpu")
SHORT = {
    "rl": ("train_dataset.batch_size=4", "gconfig.n_samples=4", "rollout.max_head_offpolicyness=0"),
    "sft": ("train_dataset.batch_size=4",),
    "dpo": ("train_dataset.batch_size=4",),
    "rw": ("train_dataset.batch_size=4",),
}
EVALUATED = ("grpo", "dpo", "ipo", "reward_model")
SAMPLED = ("--n-samples", "4", "--dataset-path", "{prompts}", "--reward-fn-path", "{reward}", "--max-steps", "3")
PAIRS = ("--dataset-path", "{pairs}", "--max-steps", "3")
ANSWERS = ("--algo", "sft", "--dataset-path", "{answers}", "--dataset-loader-fn", "{loader}")
FLAGS: dict[str, tuple[str, ...]] = {
    "sft": (*ANSWERS, "--epochs", "1", "--eval-dataset-path", "{answers}"),
    "sft_lora": (*ANSWERS, "--max-steps", "3", "--lora-rank", "4"),
    "sft_accumulated": (
        *(*ANSWERS, "--max-steps", "2"),
        *("--gradient-accumulation-steps", "1", "--mini-bs", "3", "--adam-8bit"),
    ),
    "dpo": ("--algo", "dpo", *PAIRS, "--eval-dataset-path", "{pairs}", "--eval-interval", "2"),
    "rm": ("--algo", "rm", *PAIRS),
    "gspo": ("--algo", "gspo", *SAMPLED),
    "grpo_kl": ("--algo", "grpo", *SAMPLED, "--kl-coef", "0.1", "--update-epochs", "2", "--update-minibatches", "2"),
    "grpo_tree": ("--algo", "grpo", *SAMPLED, "--tree-training", "--advantage", "rloo"),
    "grpo_eval": (
        *("--algo", "grpo", *SAMPLED, "--eval-dataset-path", "{prompts}", "--eval-max-rows", "4"),
        *("--eval-interval", "1", "--keep-best", "--save-interval", "1"),
    ),
    "grpo_ranks": ("--algo", "grpo", *SAMPLED, "--world-size", "2"),
    "ppo": ("--algo", "ppo", *SAMPLED, "--critic-warmup-steps", "1", "--use-kl-loss", "--whiten-advantages"),
    "ppo_passes": (
        *("--algo", "ppo", *SAMPLED, "--update-epochs", "2", "--gamma", "0.95"),
        *("--critic-warmup-steps", "0", "--lora-rank", "4"),
    ),
}
FILES = {
    **{"prompts": "prompts.jsonl", "answers": "sft.jsonl", "pairs": "pairs.jsonl"},
    **{"reward": "reward.py", "loader": "loader.py"},
}
LOADER = "def load_training_dataset(path, *, default_loader, **_):\n    return default_loader(path)\n"
REWARD = '''
def reward_fn(record):
    """Share of the answer that is one letter: dense enough that a random model has a signal."""
    return max(map(record.completion.count, set(record.completion)), default=0) / (1 + len(record.completion))
'''


def yaml_names(checkout: Path) -> list[str]:
    """Names of the examples that run on the toy."""
    return sorted(path.stem for path in (checkout / "examples/experiments").glob("*.yaml") if path.stem != "gsm8k_grpo")


def is_exact(checkout: Path, name: str) -> bool:
    """Whether a run is the same bit for bit when it is repeated.

    Not if rollout has its own processes: which requests share a forward pass depends on when they arrive, and affects how
    sums are rounded.
    """
    kind, _, stem = name.partition("_")
    return kind == "train" or _kind(checkout / f"examples/experiments/{stem}.yaml") != "rl"


def make_data(folder: Path) -> None:
    """Write the toy's model and rows, and the reward and loader of the runs."""
    from examples.experiments import toy

    toy.make_toy(folder)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    (folder / "loader.py").write_text(LOADER, encoding="utf-8")
    prompts = [{"prompt": row["prompt"], "solutions": [row["letter"]]} for row in rows]
    toy.write(folder / "prompts.jsonl", prompts)


def record(checkout: Path, data: Path, out: Path, only: str = "") -> list[str]:
    """Execute the runs with the code of a checkout.

    Args:
        checkout: a source tree of areno.
        data: the toy, made by :func:`make_data`.
        out: folder that gets one folder per run.
        only: text that must be part of a run's name.

    Returns:
        Names of the runs that failed; their output is in ``out``.
    """
    jobs = {f"train_{name}": _train(name, data, out) for name in FLAGS if only in f"train_{name}"}
    named = [name for name in yaml_names(checkout) if only in f"run_{name}"]
    jobs |= {f"run_{name}": _run(checkout, name, data, out) for name in named}
    out.mkdir(parents=True, exist_ok=True)
    waiting, running, failed = list(jobs), {}, []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            name = waiting.pop(0)
            running[name] = _start(jobs[name], checkout, out / f"{name}.txt")
        name = next(iter(running))
        if running.pop(name).wait(600):
            failed.append(name)
        print(f"{name}{' failed' if name in failed else ''}", flush=True)
    return failed


def _train(name: str, data: Path, out: Path) -> list[str]:
    words = [word.format(**{key: data / file for key, file in FILES.items()}) for word in FLAGS[name]]
    shared = [word for word in TRAIN if word not in ("--mini-bs", "8")] if "--mini-bs" in words else list(TRAIN)
    return ["train", "--ckpt", str(data / "model"), "--run-dir", str(out / f"train_{name}"), *shared, *words]


def _run(checkout: Path, name: str, data: Path, out: Path) -> list[str]:
    file, root = checkout / f"examples/experiments/{name}.yaml", out / f"run_{name}"
    root.mkdir(parents=True, exist_ok=True)
    for path in data.iterdir():
        (root / path.name).symlink_to(path)
    more = ("evaluator.freq_steps=2",) if name in EVALUATED else ()
    return ["run", str(file), f"cluster.fileroot={root}", "total_train_steps=3", *SHORT[_kind(file)], *more]


def _kind(file: Path) -> str:
    return str(yaml.safe_load(file.read_text(encoding="utf-8"))["train_dataset"]["type"])


def _start(words: list[str], checkout: Path, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(log, "wb") as file:
        command = [sys.executable, "-m", "areno", *words]
        return subprocess.Popen(command, cwd=checkout, env=environment, stdout=file, stderr=subprocess.STDOUT)
