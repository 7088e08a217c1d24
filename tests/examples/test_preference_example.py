"""The preference example: HH-RLHF transcripts become conversations, ready rows pass."""

import json
from pathlib import Path

import pytest

from areno.api.datasets import load_training_dataset
from areno.config.hooks import LOADER_HOOK, load_hook
from areno.errors import UsageError

FILE = Path(__file__).parents[2] / "examples" / "preference" / "dataset_loader.py"


def _load(tmp_path, *lines):
    loader = load_hook(str(FILE), LOADER_HOOK)
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return load_training_dataset(str(tmp_path / "rows.jsonl"), loader)


def test_a_transcript_becomes_a_conversation(tmp_path):
    rows = _load(
        tmp_path,
        r'{"chosen": "\n\nHuman: Hello.\n\nHow are you?\n\nAssistant: Fine: thanks.\n\nHuman: Good.\n\nAssistant: Bye.",'
        r' "rejected": "\n\nHuman: Hello.\n\nHow are you?\n\nAssistant:"}',
    )
    opening = {"role": "user", "content": "Hello.\n\nHow are you?"}
    assert rows[0]["chosen"] == [
        opening,
        {"role": "assistant", "content": "Fine: thanks."},
        {"role": "user", "content": "Good."},
        {"role": "assistant", "content": "Bye."},
    ]
    assert rows[0]["rejected"] == [opening, {"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": "p", "chosen": "a", "rejected": "b"}',
        '{"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "b"}]}',
    ],
)
def test_ready_rows_pass_unchanged(row, tmp_path):
    assert _load(tmp_path, row) == [json.loads(row)]


def test_unknown_rows_are_refused_with_the_reason(tmp_path):
    with pytest.raises(UsageError, match="this row has question"):
        _load(tmp_path, '{"question": "a"}')
    with pytest.raises(UsageError, match="must contain transcripts"):
        _load(tmp_path, '{"chosen": "a", "rejected": "b"}')
