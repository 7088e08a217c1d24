"""A toy for experiments on a laptop: a random model of 0.2 M parameters, and a task that it learns in a few steps.

    python examples/experiments/toy.py --output /tmp/areno-toy

writes ``model/``, ``train.jsonl`` and ``valid.jsonl`` (a ``prompt`` names a letter; the answer should consist of it),
``sft.jsonl`` (with a ``response``) and ``pairs.jsonl`` (``chosen`` and ``rejected``).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LETTERS = "abcdefgh"
ANSWER = 8
_WORDINGS = ("Say {}.", "Repeat {}!", "Write {} eight times.")
_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def letter_reward(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """Share of the answer that is the letter asked for, 0 to 1."""
    said = completions.strip()
    return said.count(data["letter"]) / max(len(said), 1)


def judge(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """1 if the letter is most of the answer, else 0."""
    return float(letter_reward(prompt, completions, prompt_ids, completion_ids, **data) > 0.5)


def rows(count: int, seed: int) -> list[dict[str, str]]:
    """Prompts with their letters, answers and bad answers."""
    drawn = random.Random(seed)
    found = []
    for _ in range(count):
        letter = drawn.choice(LETTERS)
        bad = "".join(drawn.choice(LETTERS) for _ in range(ANSWER))
        prompt = drawn.choice(_WORDINGS).format(letter)
        found.append({"prompt": prompt, "letter": letter, "response": letter * ANSWER, "rejected": bad})
    return found


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def make_model(folder: Path, seed: int = 0) -> None:
    """A random model whose tokens are single characters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    characters = sorted({c for row in rows(200, 0) for text in row.values() for c in text})
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unknown|>"]
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>", pad_token="<|pad|>", chat_template=_TEMPLATE
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=128,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_toy(folder: Path, count: int = 512) -> None:
    """All files of the toy."""
    import areno  # noqa: F401  (before torch: it sets how long idle threads spin)

    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model")
    train, valid = rows(count, 0), rows(32, 1)
    keep = ("prompt", "letter")
    write(folder / "train.jsonl", ({name: row[name] for name in keep} for row in train))
    write(folder / "valid.jsonl", ({name: row[name] for name in keep} for row in valid))
    write(folder / "sft.jsonl", ({name: row[name] for name in ("prompt", "response")} for row in train))
    write(
        folder / "pairs.jsonl",
        ({"prompt": row["prompt"], "chosen": row["response"], "rejected": row["rejected"]} for row in train),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=512)
    given = parser.parse_args()
    make_toy(given.output, given.count)
    print(f"wrote {given.output}")
