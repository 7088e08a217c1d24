"""Preference runs with ``areno train``, and scores of the resulting models by plain ``transformers``."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from areno.cli.main import main
from tests.support.tiny import save_tiny_checkpoint

Row = dict[str, str]

SUMS = [
    {"prompt": f"What is {a} plus {b}?", "chosen": f"The answer is {a + b}.", "rejected": f"{a * b + 1} maybe"}
    for a in range(8)
    for b in range(8)
]
GSM8K_VOCAB = 600


def write_rows(path: Path, rows: list[Row]) -> Path:
    """Rows as JSON lines."""
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def gsm8k_pairs(folder: Path, *, questions: bool) -> list[Row]:
    """The 731 pairs of right and wrong solutions, shuffled.

    A model of a few thousand weights can only distinguish them by how the solutions look (wrong ones have more odd
    fractions): logistic regression on counts of characters and character pairs reaches an accuracy of 0.65 on held-out
    pairs, and no more. ``questions=False`` omits the questions, which saves time.
    """
    rows = [json.loads(line) for line in (folder / "preferences.jsonl").read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(rows)
    return rows if questions else [row | {"prompt": "Solve it."} for row in rows]


def folds(rows: list[Row], count: int) -> list[tuple[list[Row], list[Row]]]:
    """Training and held-out rows, ``count`` times: every row is held out once."""
    return [([row for i, row in enumerate(rows) if i % count != k], rows[k::count]) for k in range(count)]


def save_gsm8k_model(folder: Path, rows: list[Row], **sizes: Any) -> Path:
    """A random model whose tokenizer knows the training rows."""
    texts = [text for row in rows for text in row.values()]
    return save_tiny_checkpoint(folder, texts=texts, vocab=GSM8K_VOCAB, layers=1, **sizes)


def arguments(algo: str, model: Path, run: Path, train: Path, *further: object) -> list[str]:
    """Command line of a run at a constant learning rate."""
    command: list[object] = ["train", "--algo", algo, "--ckpt", model, "--dataset-path", train, "--run-dir", run]
    return [*map(str, [*command, "--lr-decay-style", "constant", *further])]


def run(algo: str, model: Path, run_dir: Path, train: Path, *further: object) -> str:
    """Run to completion in this process; returns the log."""
    assert main(arguments(algo, model, run_dir, train, *further)) == 0
    return (run_dir / "log.txt").read_text(encoding="utf-8")


def metrics(run_dir: Path, kind: str) -> list[dict[str, float]]:
    """The lines of ``metrics.jsonl`` with scalars of a kind (``train`` or ``eval``)."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if any(name.startswith(f"{kind}/") for name in record)]


def last_checkpoint(run_dir: Path) -> Path:
    """Folder of the newest checkpoint."""
    return max((run_dir / "checkpoints").glob("step_*"))


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Weights of the newest checkpoint."""
    return load_file(last_checkpoint(run_dir) / "model.safetensors")


def same_weights(a: Path, b: Path, tolerance: float = 0.0) -> bool:
    """Whether two runs ended with equal weights; the tolerance is relative to the largest weight of a tensor."""
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(
        (value - second[name]).abs().max() <= tolerance * value.abs().max() for name, value in first.items()
    )


def standard_error(pairs: int) -> float:
    """Standard error of the accuracy on some pairs, for a model that guesses."""
    return math.sqrt(0.25 / pairs)


def _tokens(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], int]:
    """Token ids of a prompt with its answer, and where the answer begins."""
    chat = [{"role": "user", "content": prompt}]
    context = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return [*context, *tokenizer.encode(answer), tokenizer.eos_token_id], len(context)


@torch.inference_mode()
def answer_logprobs(checkpoint: Path, rows: list[Row]) -> list[tuple[float, float]]:
    """Summed log-prob of the chosen and the rejected answer of each row, by ``transformers``, one sequence at a time."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def score(prompt: str, answer: str) -> float:
        tokens, start = _tokens(tokenizer, prompt, answer)
        ids = torch.tensor([tokens])
        logprobs = model(input_ids=ids).logits.double().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])
        return float(logprobs[start - 1 :].sum())

    return _both(score, rows)


@torch.inference_mode()
def classifier_scores(checkpoint: Path, rows: list[Row]) -> list[tuple[float, float]]:
    """Score of the chosen and the rejected answer of each row, by ``transformers``, one sequence at a time."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    assert model.config.num_labels == 1
    return _both(lambda p, a: float(model(input_ids=torch.tensor([_tokens(tokenizer, p, a)[0]])).logits), rows)


def _both(score: Callable[[str, str], float], rows: list[Row]) -> list[tuple[float, float]]:
    return [(score(row["prompt"], row["chosen"]), score(row["prompt"], row["rejected"])) for row in rows]


def accuracy(margins: list[float]) -> float:
    """Share of pairs whose chosen answer has the higher score."""
    return sum(margin > 0 for margin in margins) / len(margins)
