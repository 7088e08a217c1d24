"""Evaluations use held-out rows: the named split, or an error before a model is loaded if there is none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest

from areno.errors import UsageError
from areno.experiments.checks import check_inputs
from areno.experiments.run_experiment import trainer_class
from areno.experiments.trainers import experiment
from tests.experiments.trainer_stage import CLASSES, ROWS, InProcessTrainer, settings_of_kind

EACH_STEP = {"evaluator.freq_steps": 1}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def with_both(kind: str, folder: Path, form: str) -> Path:
    """Twelve training rows and a test split of five, in one folder."""
    train, held_out = ROWS[kind], ROWS[kind][:5]
    if form == "saved":
        parts = {"train": datasets.Dataset.from_list(train), "test": datasets.Dataset.from_list(held_out)}
        datasets.DatasetDict(parts).save_to_disk(folder / "data")
    else:
        write(folder / "data" / "train.jsonl", train)
        write(folder / "data" / "test-00000-of-00001.jsonl", held_out)
    return folder / "data"


def configured(kind: str, checkpoint: Path, root: Path, train: Path, valid: Path, **more: Any) -> Any:
    given = {"train_dataset.path": str(train), "valid_dataset.path": str(valid), "valid_dataset.type": kind}
    changes = {name.replace("__", "."): value for name, value in more.items()}
    return settings_of_kind(kind, checkpoint, root, {**given, **EACH_STEP, **changes})


@pytest.mark.parametrize("form", ["files", "saved"])
@pytest.mark.parametrize("kind", CLASSES)
def test_every_trainer_evaluates_on_the_test_split(tiny_checkpoint, tmp_path, kind, form):
    data = with_both(kind, tmp_path, form)
    config = configured(kind, tiny_checkpoint, tmp_path, data, data)
    check_inputs(config)
    trainer = InProcessTrainer if kind == "rl" else trainer_class(config)
    with trainer(config) as made:
        assert len(made.rows.rows) == 12
        assert len(made.eval_rows) == 5


@pytest.fixture
def no_model(monkeypatch):
    def loaded(*_: Any) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr(experiment, "make_engine", loaded)


def refused(config: Any) -> str:
    """The error of both entry points, from a file and from a program."""
    with pytest.raises(UsageError) as first:
        check_inputs(config)
    with pytest.raises(UsageError) as second:
        trainer_class(config)(config)
    assert str(second.value) in str(first.value)
    return str(second.value)


@pytest.mark.parametrize("kind", CLASSES)
def test_without_the_split_no_model_is_loaded(no_model, tmp_path, tiny_checkpoint, kind):
    data = with_both(kind, tmp_path, "files")
    next(data.glob("test*")).unlink()
    message = refused(configured(kind, tiny_checkpoint, tmp_path, data, data))
    assert "valid_dataset.path" in message
    assert "no files of the split test; it has files of the split train" in message


def test_a_named_split_is_used_and_a_missing_one_refused(no_model, tmp_path, tiny_checkpoint):
    data = with_both("sft", tmp_path, "saved")
    message = refused(configured("sft", tiny_checkpoint, tmp_path, data, data, valid_dataset__split="dev"))
    assert (
        "has no split dev (its splits: train, test); add this split to the dataset, and save the dataset again"
        in message
    )
    files = with_both("sft", tmp_path / "files", "files")
    next(files.glob("test*")).rename(files / "val.jsonl")
    check_inputs(configured("sft", tiny_checkpoint, tmp_path, files, files, valid_dataset__split="validation"))


def test_training_rows_are_evaluated_only_on_request(tmp_path, tiny_checkpoint, caplog, monkeypatch):
    """One file for both, the file of a folder, and a hub reference that names its split itself."""
    data = with_both("sft", tmp_path, "files")
    file, link = data / "train.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(file)
    for train, valid in ((file, file), (data, file), (file, link)):
        with pytest.raises(UsageError, match=r"contains rows of train_dataset.*set valid_dataset\.split=train"):
            check_inputs(configured("sft", tiny_checkpoint, tmp_path, train, valid))
    hub: Any = "owner/name:main:train"
    with pytest.raises(UsageError, match="contains rows of train_dataset"):
        check_inputs(configured("sft", tiny_checkpoint, tmp_path, hub, hub))
    hub = "owner/name:main"
    check_inputs(configured("sft", tiny_checkpoint, tmp_path, hub, hub))

    config = configured("sft", tiny_checkpoint, tmp_path, file, file, valid_dataset__split="train")
    check_inputs(config)
    with caplog.at_level(logging.WARNING), trainer_class(config)(config) as trainer:
        assert len(trainer.eval_rows) == 12
    assert "rows that the model is trained on" in caplog.text


def test_a_split_without_effect_is_refused(tmp_path, tiny_checkpoint):
    data = with_both("sft", tmp_path, "files")
    given = {"train": data / "train.jsonl", "valid": data / "test-00000-of-00001.jsonl"}
    check_inputs(configured("sft", tiny_checkpoint, tmp_path, **given))
    with pytest.raises(UsageError, match=r"valid_dataset\.split dev has no effect.*has no splits"):
        check_inputs(configured("sft", tiny_checkpoint, tmp_path, **given, valid_dataset__split="dev"))
    hub: Any = "owner/name:main:validation"
    with pytest.raises(UsageError, match="the path includes the split validation"):
        check_inputs(configured("sft", tiny_checkpoint, tmp_path, given["train"], hub, valid_dataset__split="dev"))


def test_the_hub_is_asked_for_the_split(monkeypatch, tmp_path, tiny_checkpoint):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, split: asked.append((*name, split)) or ROWS["sft"])
    hub: Any = "owner/name:main"
    config = configured("sft", tiny_checkpoint, tmp_path, hub, hub)
    with trainer_class(config)(config):
        assert asked == [("owner/name", "main", "train"), ("owner/name", "main", "test")]
