"""A toy task for experiments on a laptop, and a model of 0.1 M parameters that learns the task in 20 steps.

    python examples/experiments/toy.py --output /tmp/areno-toy

writes ``model/``, ``teacher/``, ``train.jsonl`` and ``valid.jsonl`` (a ``prompt`` contains a letter, and the answer should
consist of this letter), ``sft.jsonl`` (with a ``response``), and ``pairs.jsonl`` and ``valid_pairs.jsonl`` (``chosen`` and
``rejected``).

A model can only improve by reinforcement learning if it sometimes succeeds at the task. This script trains the model from
random weights with plain PyTorch in a few seconds. At first, all training answers are right. Later, one in ten is right,
and all other training answers are random letters. The resulting mean reward is about 0.15 of at most 1. The teacher is this
model after further steps on right answers.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnop"
LENGTHS = 4, 8
_WORDINGS = ("Say {}.", "Repeat {}!", "Write {} again and again.")
_SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Phases of the pretraining: number of steps, and fraction of right answers.
_MODEL_STEPS = (1.0,) * 60 + (0.1,) * 20
_TEACHER_STEPS = (1.0,) * 30
_ROWS = 32


def letter_reward(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """Return the fraction of the answer's characters that are the requested letter, 0 to 1."""
    said = completions.strip()
    return said.count(data["letter"]) / max(len(said), 1)


def judge(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Return 1 if most characters of the answer are the requested letter, otherwise 0."""
    return float(letter_reward(prompt, completions, prompt_ids, completion_ids, **data) > 0.5)


def undecided(trajectory: dict[str, Any]) -> bool:
    """Filter that rejects groups whose answers are all right or all wrong, because there is nothing to learn from such
    groups."""
    return bool(0 < trajectory["rewards"].mean() < 1)


def rows(count: int, seed: int) -> list[dict[str, str]]:
    """Return prompts with their letters, right answers and random answers."""
    drawn = random.Random(seed)
    found = []
    for _ in range(count):
        letter, length = drawn.choice(LETTERS), drawn.randint(*LENGTHS)
        wrong = "".join(drawn.choice(LETTERS) for _ in range(length))
        prompt = drawn.choice(_WORDINGS).format(letter)
        found.append({"prompt": prompt, "letter": letter, "response": letter * length, "rejected": wrong})
    return found


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def make_tokenizer() -> Any:
    """Return a tokenizer whose tokens are single bytes."""
    from areno.quickstart.model import train_tokenizer

    return train_tokenizer(_WORDINGS, words=".", vocab_size=260, special_tokens=_SPECIAL, template=_TEMPLATE)


def random_model(tokenizer: Any, seed: int, head_dim: int = 8) -> Any:
    """Return an untrained model. Large initial weights and many small heads help such a small model to learn copying
    quickly."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=head_dim,
        intermediate_size=128,
        max_position_embeddings=512,
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def teach(model: Any, tokenizer: Any, shares: tuple[float, ...], lr: float, seed: int) -> None:
    """Train one step per entry of ``shares``, the fraction of right answers; the learning rate warms up and decays to 0."""
    import torch

    drawn = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    for step, share in enumerate(shares):
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / 10, 1 - step / len(shares))
        ids, labels = [], []
        for row in rows(_ROWS, drawn.getrandbits(32)):
            chat = [{"role": "user", "content": row["prompt"]}]
            prompt = tokenizer(
                tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ).input_ids
            answer = tokenizer(row["response" if drawn.random() < share else "rejected"]).input_ids
            ids.append([*prompt, *answer, tokenizer.eos_token_id])
            labels.append([-100] * len(prompt) + ids[-1][len(prompt) :])
        longest = max(map(len, ids))
        padded = [row + [tokenizer.pad_token_id] * (longest - len(row)) for row in ids]
        wanted = [row + [-100] * (longest - len(row)) for row in labels]
        model(input_ids=torch.tensor(padded), labels=torch.tensor(wanted)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def make_model(folder: Path, seed: int = 0, teacher: Path | None = None, head_dim: int = 8) -> None:
    """Write the model that the experiments train and, if requested, a teacher."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = make_tokenizer()
    model = random_model(tokenizer, seed, head_dim)
    for place, shares, lr in ((folder, _MODEL_STEPS, 6e-3), (teacher, _TEACHER_STEPS, 3e-3)):
        if place is not None:
            teach(model, tokenizer, shares, lr, seed)
            model.save_pretrained(place)
            tokenizer.save_pretrained(place)


def make_toy(folder: Path, count: int = 512, head_dim: int = 8) -> None:
    """Write all files of the toy task. vLLM on a CPU needs a ``head_dim`` of 32 or more."""
    import areno  # noqa: F401  (before torch: it sets how long idle threads spin)

    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model", teacher=folder / "teacher", head_dim=head_dim)
    train, valid = rows(count, 0), rows(32, 1)
    for name, found in (("train", train), ("valid", valid)):
        write(folder / f"{name}.jsonl", ({key: row[key] for key in ("prompt", "letter")} for row in found))
    write(folder / "sft.jsonl", ({key: row[key] for key in ("prompt", "response")} for row in train))
    for name, found in (("pairs", train), ("valid_pairs", valid)):
        pairs = ({"prompt": row["prompt"], "chosen": row["response"], "rejected": row["rejected"]} for row in found)
        write(folder / f"{name}.jsonl", pairs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=512)
    given = parser.parse_args()
    make_toy(given.output, given.count)
    print(f"wrote {given.output}")
