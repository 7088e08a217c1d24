"""Held-out accuracy of a saved checkpoint, by plain ``transformers``: greedy ``generate``, nothing of areno's engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areno.quickstart.task import Problem, is_right

_BATCH = 250
_MAX_NEW_TOKENS = 40


def answers(checkpoint: Path, problems: Sequence[Problem]) -> list[str]:
    """Greedy completion of each problem."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    texts: list[str] = []
    for start in range(0, len(problems), _BATCH):
        chats = [[{"role": "user", "content": p.question}] for p in problems[start : start + _BATCH]]
        encoded: Any = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        with torch.inference_mode():
            output = model.generate(**encoded, do_sample=False, max_new_tokens=_MAX_NEW_TOKENS)
        texts += tokenizer.batch_decode(output[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def accuracy(problems: Sequence[Problem], completions: Sequence[str]) -> float:
    """Share of right answers."""
    return sum(is_right(p, text) for p, text in zip(problems, completions, strict=True)) / len(problems)
