"""A folder with everything that ``areno train`` needs before it loads a model; validation only looks at files."""

from __future__ import annotations

from pathlib import Path

import pytest

REWARD = "def reward_fn(record):\n    return 1.0\n"
LOADER = "def load_training_dataset(dataset_path, *, default_loader, **_):\n    return default_loader(dataset_path)\n"
BASE = ["--ckpt", "model", "--dataset-path", "data.jsonl"]
GSPO = [*BASE, "--reward-fn-path", "reward.py"]
SFT = [*BASE, "--algo", "sft", "--dataset-loader-fn", "loader.py"]


def fill(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "data.jsonl").write_text('{"prompt": "1+1?", "solutions": ["2"]}\n')
    (folder / "reward.py").write_text(REWARD)
    (folder / "loader.py").write_text(LOADER)


def stored_run(path: Path, text: str, *, step: int | None = None) -> Path:
    """A run directory as a killed run leaves it."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(text)
    if step is not None:
        state = path / "checkpoints" / f"step_{step:06d}" / "trainer_state"
        state.mkdir(parents=True)
        (state / "state.json").write_text("{}")
    return path


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with everything that ``areno train`` needs."""
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
