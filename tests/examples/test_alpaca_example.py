"""The instruction example: rows become prompt and response."""

from pathlib import Path

import pytest

from areno.api.datasets import load_training_dataset
from areno.config.hooks import LOADER_HOOK, load_hook
from areno.errors import UsageError

FILE = Path(__file__).parents[2] / "examples" / "sft" / "alpaca" / "dataset_loader.py"


def _load(tmp_path, *lines):
    loader = load_hook(str(FILE), LOADER_HOOK)
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return load_training_dataset(str(tmp_path / "rows.jsonl"), loader)


def test_instruction_with_and_without_input(tmp_path):
    rows = _load(
        tmp_path,
        '{"instruction": "Translate.", "input": "good morning", "output": "bonjour"}',
        '{"instruction": "Count.", "input": "", "output": "1 2 3"}',
    )
    assert [(row["prompt"], row["response"]) for row in rows] == [
        ("Instruction: Translate.\nInput: good morning\nResponse:", "bonjour"),
        ("Instruction: Count.\nResponse:", "1 2 3"),
    ]


def test_ready_rows_pass_unchanged(tmp_path):
    assert _load(tmp_path, '{"prompt": "a", "response": "b"}') == [{"prompt": "a", "response": "b"}]


def test_unknown_row_is_refused_with_its_keys(tmp_path):
    with pytest.raises(UsageError, match="this row has question"):
        _load(tmp_path, '{"question": "a"}')
