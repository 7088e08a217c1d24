"""Reward files on disk, and records to score."""

import textwrap

import pytest

from areno.types import RewardRecord


@pytest.fixture
def reward_file(tmp_path):
    """``reward_file(source)`` writes a Python file and returns its path."""

    def write(source: str, name: str = "reward.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


@pytest.fixture
def records():
    """``records("a", "b")``: one record per completion, two samples per prompt."""

    def make(*completions: str) -> list[RewardRecord]:
        return [
            RewardRecord(
                prompt=f"question {index // 2}",
                completion=completion,
                metadata={"prompt_index": index // 2, "sample_index": index % 2},
            )
            for index, completion in enumerate(completions)
        ]

    return make
