"""The rows for ``real_model.py``: prompts with answers from a file, and long prompts made of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from common import problems

Row = dict[str, Any]
# "<<2+3=5>>" in GSM8K's answers are notes for a calculator.
_CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")


def read_rows(path: Path | None, count: int) -> list[Row]:
    """The first rows of a JSONL file, with ``prompt``, ``response`` and ``solutions``; arithmetic without a file.

    Args:
        path: rows with ``prompt`` and ``response``, or GSM8K's ``question`` and ``answer``.
        count: rows that are needed.

    Raises:
        SystemExit: the file has fewer rows, or rows without these texts.
    """
    if path is None:
        return problems(count)
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    if len(lines) < count:
        raise SystemExit(f"--data {path} has {len(lines)} rows, and {count} are needed; give a longer file")
    return [_row(json.loads(line), path, number) for number, line in enumerate(lines, start=1)]


def _row(row: Row, path: Path, number: int) -> Row:
    prompt, response = row.get("prompt", row.get("question")), row.get("response", row.get("answer"))
    if not isinstance(prompt, str) or not isinstance(response, str):
        raise SystemExit(
            f"--data {path}, line {number}: a row needs the texts `prompt` and `response`, or GSM8K's `question` and "
            f"`answer`; this one has {', '.join(sorted(row))}"
        )
    return {"prompt": prompt, "response": _CALCULATOR_NOTE.sub("", response), "solutions": [response]}


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt as in areno and TRL: one user turn, if the tokenizer has a template."""
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def lengthen(tokenizer: Any, rows: list[Row], tokens: int) -> list[Row]:
    """Prepend worked examples, which are the other rows, to each prompt, so that it has about ``tokens`` tokens.

    The first example is truncated as needed; a prompt has at most ``tokens`` tokens, unless its own text has more.
    """
    return [{**row, "prompt": _long_prompt(tokenizer, rows, index, tokens)} for index, row in enumerate(rows)]


def _long_prompt(tokenizer: Any, rows: list[Row], index: int, tokens: int) -> str:
    own = text = rows[index]["prompt"]
    number = index
    while len(encode(tokenizer, text)) < tokens:
        number += 1
        example = rows[number % len(rows)]
        text = f"{example['prompt']}\n{example['response']}\n\n{text}"
    low, high = 0, len(text) - len(own)  # characters to cut: too few, enough
    while high - low > 1:
        middle = (low + high) // 2
        if len(encode(tokenizer, text[middle:])) > tokens:
            low = middle
        else:
            high = middle
    return text[high:]
