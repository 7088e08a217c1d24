"""What every benchmark shares: the tiny model, the prompts, running a peer in its own environment, and the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".peers"


def problems(count: int) -> list[dict[str, Any]]:
    """Arithmetic prompts with a response of about a hundred tokens for a small BPE vocabulary."""
    rows = []
    for i in range(count):
        a, b = 17 * i % 101, 29 * i % 97
        steps = " ".join(f"Adding {a} and {b + k} gives {a + b + k}." for k in range(4 + i % 5))
        rows.append(
            {
                "prompt": f"What is {a} plus {b}? ",
                "response": f"{steps} The answer is {a + b}.",
                "solutions": [str(a + b)],
            }
        )
    return rows


def make_checkpoint(
    folder: Path,
    *,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int | None = None,
    vocab: int = 600,
    dtype: str = "float32",
) -> int:
    """Write a random Qwen3 with a BPE tokenizer; returns its number of parameters.

    It has no chat template, so that all sides see the same tokens.
    """
    import torch
    import transformers as tf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tf.logging.disable_progress_bar()
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    texts = (row["prompt"] + row["response"] for row in problems(500))
    raw.train_from_iterator(texts, trainer)
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    config = tf.Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        intermediate_size=intermediate or 3 * hidden,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    model = tf.Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


class WorkerFailedError(SystemExit):
    """One side of a benchmark failed; the message is the output of its process."""


def run_worker(
    python: str | Path,
    script: Path,
    settings: dict[str, Any],
    env: dict[str, str] | None = None,
    deadline_s: float = 3600,
    cwd: Path | None = None,
) -> dict[str, Any]:
    """Run one side in a fresh process, in the folder ``cwd``; its last line of output is its result.

    Raises:
        WorkerFailedError: the process failed, or took longer than its deadline.
    """
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TERM": "dumb", "TQDM_DISABLE": "1"}
    command = [str(python), str(script), json.dumps(settings)]
    try:
        environment = {**os.environ, **quiet, **(env or {})}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=deadline_s, cwd=cwd)
    except subprocess.TimeoutExpired:
        raise WorkerFailedError(f"{script.name} took longer than {deadline_s:.0f} s") from None
    if done.returncode != 0:
        raise WorkerFailedError(f"{script.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def finish(result: dict[str, Any], save: str) -> None:
    """Save a result under ``results`` if it has a name, and print it as the last line."""
    if save:
        (ROOT / "benchmarks" / "results" / f"{save}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def machine() -> dict[str, Any]:
    """The machine on which the figures were measured."""
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "commit": git("describe", "--always", "--dirty", "--exclude=*"),
    }


def processor() -> str:
    """Name, family and model, and the widest vectors, as in ``AMD EPYC (family 25, model 1, AVX2)``; empty off Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    flags = fields.get("flags", "").split()
    vectors = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else platform.machine()
    kind = [f"{name} {fields[key]}" for name, key in (("family", "cpu family"), ("model", "model")) if key in fields]
    return f"{fields.get('model name', '')} ({', '.join([*kind, vectors])})".strip()


def git(*words: str) -> str:
    """Output of git in this repository; empty if it fails."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def median(values: list[float]) -> float:
    """Median, rounded to the precision of a timer on a busy machine."""
    return round(statistics.median(values), 4)
