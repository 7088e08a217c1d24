"""Evaluates models on held-out orders with plain ``transformers``, by greedy answers to the same prompts.

    python examples/structured/evaluate.py --data /tmp/orders/heldout.jsonl BEFORE AFTER

Each model is a folder in Hugging Face format, such as a checkpoint of a run, or a repo id. The table has one column per model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from reward import PARTS, reward_parts
from transformers import AutoModelForCausalLM, AutoTokenizer

Row = dict[str, Any]


def answers(model: str, rows: Sequence[Row], max_new_tokens: int = 64, batch_size: int = 16) -> list[str]:
    """Return a model's greedy answers in float32 to the ``prompt`` of each row, in the order of the rows."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    texts: list[str] = []
    for begin in range(0, len(prompts), batch_size):
        batch = tokenizer(
            prompts[begin : begin + batch_size], return_tensors="pt", padding=True, add_special_tokens=False
        )
        with torch.inference_mode():
            tokens = network.generate(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        texts += tokenizer.batch_decode(tokens[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    return texts


def score(texts: Sequence[str], rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean of each part of the reward; the mean of ``exact`` is the fraction of exact answers."""
    parts = [reward_parts(text, row["solutions"][0]) for text, row in zip(texts, rows, strict=True)]
    return {name: sum(part[name] for part in parts) / len(rows) for name in PARTS}


def table(names: Sequence[str], texts: Sequence[Sequence[str]], rows: Sequence[Row], shown: int) -> Iterator[str]:
    """Return the scores of all models and all answers to the first prompts, as lines of text."""
    columns = [score(column, rows) for column in texts]
    yield f"{len(rows)} held-out orders" + "".join(f"{name:>14.13}" for name in names)
    for part in columns[0]:
        yield f"{part:<{len(f'{len(rows)} held-out orders')}}" + "".join(f"{column[part]:>14.1%}" for column in columns)
    width = max(map(len, ("right", *names)))
    for index, row in enumerate(rows[:shown]):
        yield f"\n{row['prompt'][-1]['content']}"
        yield f"  {'right':<{width}}  {row['solutions'][0]}"
        for name, column in zip(names, texts, strict=True):
            yield f"  {name:<{width}}  {' '.join(column[index].split())}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of all models, and write the scores to ``--output`` if given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder in Hugging Face format, or repo id")
    parser.add_argument("--data", required=True, type=Path, help="heldout.jsonl of make_data.py")
    parser.add_argument("--rows", type=int, help="use only the first N rows")
    parser.add_argument("--show", type=int, default=4, help="prompts to print with all answers (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file for the scores")
    options = parser.parse_args(argv)
    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()][: options.rows]
    names = ["before", "after"] if len(options.models) == 2 else [Path(model).name for model in options.models]
    texts = [answers(model, rows) for model in options.models]
    print("\n".join(table(names, texts, rows, options.show)))
    if options.output:
        scores = {model: score(column, rows) for model, column in zip(options.models, texts, strict=True)}
        options.output.write_text(json.dumps({"rows": len(rows), "scores": scores}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
