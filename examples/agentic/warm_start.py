"""Makes a tiny model that knows little more than the format of an example: random weights, briefly trained on an expert's
conversations.

    python examples/agentic/warm_start.py --expert examples/agentic/tictactoe/expert.py --output /tmp/tictactoe-model

The model has 0.4 M parameters (more with --width) and a ChatML template with tools. The script needs no download and no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areno.api.agentic.demonstrations import Course, demonstration_rows
from areno.cli.main import main as areno
from areno.config.hooks import import_user_file, split_spec
from areno.quickstart.model import save_random_model, train_tokenizer

# Splits off digits and capital letters, alone or as a pair, because board cells consist of them; other text may become one
# token.
_ALONE = r" ?[A-Z]?\d| [A-Z](?![A-Za-z])"
WORDS = rf"{_ALONE}|(?:(?!{_ALONE})[^\n])+|\n"
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}Calls stand in <tool_call></tool_call>.<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}{% if message.content or not loop.first %}
{% endif %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
LOADER = '''"""Loader for rows that need no conversion."""


def load_training_dataset(dataset_path, *, default_loader, **_):
    """Load the rows unchanged."""
    return default_loader(dataset_path)
'''


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--expert", required=True, help="the expert, as FILE.py:NAME; FILE.py alone means FILE.py:EXPERT"
    )
    parser.add_argument(
        "--output", required=True, type=Path, help="folder for all files; the model is written to OUTPUT/model"
    )
    parser.add_argument("--width", type=int, default=96, help="hidden size, a multiple of 24 (default: %(default)s)")
    parser.add_argument("--count", type=int, default=1000, help="conversations to learn from (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="training steps of 32 answers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and conversations (default: %(default)s)")
    return parser.parse_args(argv)


def load_course(spec: str) -> Course:
    """Load the course that ``--expert`` specifies."""
    path, name = split_spec(spec, option="--expert", default_name="EXPERT")
    course: Course = getattr(import_user_file(path, option="--expert"), name)
    return course


def make_tokenizer(corpus: Sequence[str]) -> Any:
    """Train a tokenizer on the words of the conversations."""
    special = ["<|pad|>", "<|im_end|>", "<|im_start|>"]
    return train_tokenizer(corpus, words=WORDS, vocab_size=1000, special_tokens=special, template=TEMPLATE)


def write_start(output: Path, course: Course, width: int, count: int, seed: int) -> None:
    """Write ``random`` (the untrained model), ``rows.jsonl`` and ``loader.py``."""
    played = course.conversations(count, seed)
    plain = make_tokenizer([])
    rows = [row for messages, tools in played for row in demonstration_rows(plain, messages, tools)]
    tokenizer = make_tokenizer([text for row in rows for text in row.values()])
    save_random_model(output / "random", tokenizer, seed, layers=3, width=width, context=2048, rope_theta=1000.0)
    (output / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (output / "loader.py").write_text(LOADER, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    given = parse(argv)
    write_start(given.output, load_course(given.expert), given.width, given.count, given.seed)
    options = {
        **{"--algo": "sft", "--ckpt": given.output / "random", "--dataset-path": given.output / "rows.jsonl"},
        **{"--dataset-loader-fn": given.output / "loader.py", "--run-dir": given.output / "sft"},
        **{"--save-path": given.output / "checkpoints", "--seed": given.seed, "--epochs": 1000},
        **{"--max-steps": given.steps, "--batch-size": 32, "--mini-bs": 32, "--max-prompt-tokens": 1600},
        **{"--max-new-tokens": 400, "--lr": 3e-3, "--min-lr": 0, "--lr-warmup-steps": 10, "--adam-beta2": 0.98},
        **{"--lr-decay-steps": given.steps, "--lr-decay-style": "linear"},
    }
    code = areno(["train", *(str(part) for pair in options.items() for part in pair)])
    if code == 0:
        (given.output / "checkpoints" / f"step_{given.steps:06d}").rename(given.output / "model")
        print(f"the model is in {given.output / 'model'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
