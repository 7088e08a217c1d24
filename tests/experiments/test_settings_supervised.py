"""Effects of the settings that every experiment has, in small SFT runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from areno.config.experiment.run_sections import TrainDatasetConfig
from areno.errors import EngineError, UsageError
from areno.experiments.run_experiment import run_experiment
from areno.experiments.trainers import SFTTrainer, experiment
from areno.experiments.trainers.row_source import load_dataset
from areno.training.state import RunState
from tests.experiments.trainer_stage import ANSWERED, Run, differ, run_kind, settings_of_kind, trainer_of


@pytest.fixture
def sft(tiny_checkpoint, tmp_path):
    """Runs SFT with settings by dotted name."""
    numbers = iter(range(1000))

    def run(changes: dict[str, Any] | None = None, **more: Any) -> Run:
        return run_kind("sft", tiny_checkpoint, tmp_path / str(next(numbers)), {**(changes or {}), **more})

    return run


def loader(path: str, split: str, rows: int = 12) -> list[dict[str, Any]]:
    """A user's own loader."""
    wanted = {"train": ANSWERED, "main": ANSWERED[:8]}[split]
    return wanted[:rows]


# -- length of a run, data -------------------------------------------------------------------------------------------


def test_the_run_ends_at_epochs_steps_or_sequences(sft):
    """12 rows in batches of 4 make an epoch of 3 steps."""
    assert sft(total_train_steps=None).steps == 3
    assert sft(total_train_steps=None, total_train_epochs=2).steps == 6
    assert sft(total_train_steps=4, total_train_epochs=2).steps == 4
    assert sft(total_train_steps=None, total_train_epochs=2, total_train_n_seqs=9).steps == 3
    assert sft(total_train_steps=None, total_train_n_seqs=8).steps == 2


def test_the_seed_decides_the_order_of_rows(sft):
    first, again, other = sft(seed=1), sft(seed=1), sft(seed=2)
    assert not differ(first, again)
    assert differ(first, other)


def tokens_of_steps(run: Run) -> list[float]:
    return run.column("sft/n_tokens")


def test_rows_are_shuffled_unless_told_otherwise(sft):
    in_order = {seed: tokens_of_steps(sft({"train_dataset.shuffle": False, "seed": seed})) for seed in (1, 2)}
    assert in_order[1] == in_order[2]
    shuffled = [sft(seed=seed) for seed in (1, 2, 3)]
    assert any(differ(shuffled[0], run) for run in shuffled[1:])


def test_a_batch_has_batch_size_rows_and_the_last_may_be_dropped(sft):
    whole = {"total_train_steps": None, "train_dataset.batch_size": 5}
    assert sft(whole).column("sft/n_seqs") == [5, 5]
    assert sft({**whole, "train_dataset.drop_last": False}).column("sft/n_seqs") == [5, 5, 2]


def test_long_rows_are_left_out(sft, tiny_checkpoint, tmp_path):
    run = sft({"total_train_steps": None, "train_dataset.batch_size": 1})
    lengths = run.column("sft/n_tokens")
    assert min(lengths) < max(lengths)
    kept = sft(
        {"total_train_steps": None, "train_dataset.batch_size": 1, "train_dataset.max_length": int(min(lengths))}
    )
    assert kept.column("sft/n_tokens") == [min(lengths)] * lengths.count(min(lengths))


def no_split(path: str) -> list[Any]:
    return [path]


def broken(path: str, **_: Any) -> list[Any]:
    return [1 // 0]


def streamed(path: str, **_: Any) -> Iterator[dict[str, Any]]:
    yield {"text": path}


def split_in_two(path: str, **_: Any) -> dict[str, list[Any]]:
    return {"train": [path], "test": [path]}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            no_split,
            "the call of the loader with ('rows.db', split='train', rows=3) failed: TypeError: no_split() got an unexpected",
        ),
        (broken, "failed: ZeroDivisionError: integer division or modulo by zero (" + __file__),
        (streamed, "the rows must support len() and rows[i], as a list does; got generator"),
        (split_in_two, "rows[0] of dict raises an error; choose one of its splits: train, test"),
    ],
)
def test_an_unusable_loader_says_why(function, words):
    name = f"tests.experiments.test_settings_supervised.{function.__name__}"
    section = TrainDatasetConfig(path="rows.db", dataset_kwargs={"loader": name, "rows": 3})
    with pytest.raises(UsageError) as caught:
        load_dataset(section, "train_dataset")
    assert str(caught.value).startswith(f"train_dataset.dataset_kwargs.loader {name}: ")
    assert words in str(caught.value)


def test_the_loader_gets_path_split_and_its_arguments(sft):
    named = {"train_dataset.dataset_kwargs": {"loader": "tests.experiments.test_settings_supervised.loader"}}
    every = {"total_train_steps": None, "train_dataset.batch_size": 2, **named}
    assert sft(every).steps == 6
    assert sft({**every, "train_dataset.split": "main"}).steps == 4
    assert sft({**every, "train_dataset.dataset_kwargs.rows": 4}).steps == 2


def test_rows_come_from_path(sft, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in ANSWERED[:4]), encoding="utf-8")
    assert sft({"total_train_steps": None, "train_dataset.path": str(other)}).steps == 1


# -- saving, evaluation, recovery ------------------------------------------------------------------------------------

SIX = {"total_train_steps": None, "total_train_epochs": 2}


@pytest.mark.parametrize(
    ("every", "saved"),
    [({"freq_steps": 2}, [1, 3, 5]), ({"freq_epochs": 1}, [2, 5]), ({"freq_steps": 4, "freq_epochs": 1}, [2, 3, 5])],
)
def test_models_are_saved_at_their_frequency(sft, every, saved):
    assert sft({**SIX, "saver": every}).saved() == saved
    assert sft(SIX).saved() == [5]  # the final model is saved unless saving is off
    assert sft({**SIX, "saver.mode": "off"}).saved() == []


def test_models_are_saved_after_the_configured_seconds(tiny_checkpoint, tmp_path, monkeypatch):
    """On the clock of the run, each step takes one second."""
    seconds = {"now": 0.0}
    monkeypatch.setattr("areno.training.frequency.FrequencyControl._elapsed", lambda self, now: seconds["now"])
    with trainer_of(settings_of_kind("sft", tiny_checkpoint, tmp_path, {**SIX, "saver.freq_secs": 3})) as trainer:
        step = trainer.run_step

        def slow(at: Any) -> Any:
            seconds["now"] = at.global_step + 1.0 if at.global_step < 4 else 0.0
            return step(at)

        trainer.run_step = slow
        trainer.train()
        assert Run(trainer).saved() == [2, 3, 5]


def test_models_are_saved_to_the_configured_folder_in_every_mode(sft, tmp_path):
    """Every mode saves the same model."""
    kept = []
    for number, mode in enumerate(("sync", "async", "auto")):
        root = tmp_path / f"elsewhere{number}"
        run = sft({"saver.freq_steps": 2, "saver.mode": mode, "saver.fileroot": str(root)})
        assert run.saved() == []  # nothing under cluster.fileroot
        (file,) = root.rglob("*globalstep1/model.safetensors")
        kept.append(load_file(file))
    for other in kept[1:]:
        assert all(torch.equal(value, other[name]) for name, value in kept[0].items())


def test_async_saving_writes_in_another_thread(tiny_checkpoint, tmp_path):
    import threading

    writers = {}
    for mode in ("sync", "async"):
        config = settings_of_kind("sft", tiny_checkpoint, tmp_path / mode, {"saver.freq_steps": 1, "saver.mode": mode})
        with trainer_of(config) as trainer:
            write = trainer.saver._write

            def recorded(*given: Any, write: Any = write, mode: str = mode) -> None:
                writers[mode] = threading.current_thread() is threading.main_thread()
                write(*given)

            trainer.saver._write = recorded
            trainer.train()
    assert writers == {"sync": True, "async": False}


def valid(**evaluator: Any) -> dict[str, Any]:
    return {
        "valid_dataset.path": "${train_dataset.path}",
        "valid_dataset.split": "train",
        "valid_dataset.type": "sft",
        **{f"evaluator.{name}": value for name, value in evaluator.items()},
    }


def test_evaluations_run_at_their_frequency(sft):
    every = sft({**SIX, **valid(freq_steps=2)})
    evaluated = [record["step"] for record in every.records if "sft/eval/loss" in record]
    assert evaluated == [1, 3, 5]
    before = sft({**SIX, **valid(freq_epochs=2, eval_before_train=True)})
    assert len(before.column("sft/eval/loss")) == 2
    assert before.column("sft/eval/loss")[0] > before.column("sft/eval/loss")[1]


def test_the_best_checkpoint_is_kept_and_a_run_that_gets_worse_ends(sft):
    judged = valid(freq_steps=1, keep_best=True, early_stop_patience=3)
    run = sft({**SIX, **judged, "total_train_epochs": 20, "actor.optimizer.lr": 0.3})
    losses = run.column("sft/eval/loss")
    best = losses.index(min(losses))
    assert len(losses) == run.steps == best + 4 < 60
    assert run.trainer.state.best == {"step": best + 1, "metric": "sft/eval/loss", "value": losses[best]}
    assert RunState.of_checkpoint(run.checkpoints / "recover/best").step == best + 1
    assert run.saved() == [run.steps - 1]


def test_recovery_checkpoints_are_written_and_resumed_from(tiny_checkpoint, tmp_path, monkeypatch):
    """Weights are read once; a resumed run reads those of its checkpoint."""
    read: list[str] = []
    make = experiment.make_engine
    monkeypatch.setattr(
        experiment, "make_engine", lambda section, *rest: read.append(section.path) or make(section, *rest)
    )

    def run(name: str, **changes: Any) -> Run:
        given = {"recover.freq_steps": 1, **{key.replace("__", "."): value for key, value in changes.items()}}
        return run_kind("sft", tiny_checkpoint, tmp_path / name, {"total_train_epochs": 2, **given})

    whole = run("whole", total_train_steps=4, recover__mode="auto")
    for mode in ("auto", "on"):
        run(mode, total_train_steps=2, recover__mode=mode)
        again = run(mode, total_train_steps=4, recover__mode=mode)
        assert again.steps == 4
        assert not differ(whole, again)
        assert read[-2] == str(tiny_checkpoint)
        assert Path(read[-1]).parts[-2:] == ("recover", "step_000002")
    assert len(read) == 5
    for mode in ("off", "disabled"):
        first = run(mode, total_train_steps=2, recover__mode=mode)
        assert not list(first.checkpoints.glob("recover*"))
        written = {
            name: (first.trainer.run_dir.path / name).read_bytes()
            for name in ("config.yaml", "status.json", "main.log")
        }
        with pytest.raises(UsageError, match="has run already"):
            run(mode, total_train_steps=4, recover__mode=mode)
        assert written == {
            name: (first.trainer.run_dir.path / name).read_bytes() for name in written
        }  # the earlier run is unchanged


@pytest.mark.parametrize("option", ["recover.no_save_optim", "recover.no_load_optim"])
def test_a_resumed_run_can_start_with_a_fresh_optimizer(tiny_checkpoint, tmp_path, option):
    """Without Adam's moments, the weights differ from those of a run that keeps them; a checkpoint without them is smaller."""
    runs, sizes = [], []
    for name, more in {"kept": {}, "fresh": {option: True}}.items():
        given = {"total_train_epochs": 2, "recover.freq_steps": 1, "recover.mode": "auto", **more}
        first = run_kind("sft", tiny_checkpoint, tmp_path / name, {**given, "total_train_steps": 2})
        sizes.append(sum(path.stat().st_size for path in first.checkpoints.rglob("recover/**/*") if path.is_file()))
        runs.append(run_kind("sft", tiny_checkpoint, tmp_path / name, {**given, "total_train_steps": 4}))
    assert differ(*runs)
    assert (sizes[1] < 0.6 * sizes[0]) == (option == "recover.no_save_optim")


def test_a_failed_run_is_retried_as_often_as_configured(tiny_checkpoint, tmp_path, monkeypatch):
    """The second step of the run fails twice."""
    attempts = []
    step = SFTTrainer.run_step

    def failing(self: Any, at: Any) -> Any:
        if at.global_step == 1 and len(attempts) < 2:
            attempts.append(at.global_step)
            raise EngineError("rank 0 has died")
        return step(self, at)

    monkeypatch.setattr(SFTTrainer, "run_step", failing)

    def run(name: str, **recover: Any) -> Any:
        attempts.clear()
        given = {f"recover.{key}": value for key, value in recover.items()}
        config = settings_of_kind("sft", tiny_checkpoint, tmp_path / name, {"recover.freq_steps": 1, **given})
        run_experiment(config)
        return len(attempts)

    assert run("twice", mode="auto", retries=2) == 2
    for name, more in {"once": {"mode": "auto", "retries": 1}, "never": {"mode": "off", "retries": 5}}.items():
        with pytest.raises(EngineError, match="rank 0 has died"):
            run(name, **more)


def test_everything_is_written_under_fileroot(sft, tmp_path):
    root = tmp_path / "another"
    run = sft({"cluster.fileroot": str(root)})
    assert run.folder.is_relative_to(root)
    assert run.records


def test_the_trainer_has_the_variables_and_threads_of_the_actor_and_one_notice(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("ARENO_TEST_KEPT", "before")
    monkeypatch.delenv("ARENO_TEST_NEW", raising=False)
    threads = torch.get_num_threads()
    spec = {"cpu": threads + 1, "gpu": 1, "env_vars": {"ARENO_TEST_KEPT": "within", "ARENO_TEST_NEW": None}}
    given = {"actor.scheduling_spec": [spec], "sglang.context_length": 9}
    try:
        with trainer_of(settings_of_kind("sft", tiny_checkpoint, tmp_path, given)) as trainer:
            assert (os.environ["ARENO_TEST_KEPT"], os.environ["ARENO_TEST_NEW"]) == ("within", "")
            assert torch.get_num_threads() == threads + 1
            log = (trainer.run_dir.path / "main.log").read_text(encoding="utf-8")
    finally:
        torch.set_num_threads(threads)
    assert (os.environ["ARENO_TEST_KEPT"], os.environ.get("ARENO_TEST_NEW")) == ("before", None)
    assert log.count("settings that are accepted but have no effect in this run") == 1
    assert "sglang: section of an unused backend" in log


# -- statistics and traces -------------------------------------------------------------------------------------------


def test_tensorboard_events_are_written_to_the_configured_path(sft, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "events"
    run = sft({"stats_logger.tensorboard.path": str(folder)})
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.value for event in events.Scalars("sft/lr")] == pytest.approx(run.column("sft/lr"))


def test_a_trace_is_written_at_its_save_interval(tiny_checkpoint, tmp_path):
    def sizes(**tracer: Any) -> list[set[str]]:
        """Size of the trace files when each step begins, and at the end."""
        root = tmp_path / "-".join(f"{key}{value}" for key, value in tracer.items()).replace(" ", "")
        given = {f"perf_tracer.{key}": value for key, value in tracer.items()}
        found = []

        def look() -> None:
            files = list(trainer.run_dir.path.rglob("*.jsonl")) + list(trainer.run_dir.path.rglob("trace*"))
            found.append(sum(file.stat().st_size for file in set(files) if "trace" in file.name))

        with trainer_of(settings_of_kind("sft", tiny_checkpoint, root, {**SIX, **given})) as trainer:
            step = trainer.run_step

            def watched(at: Any) -> Any:
                look()
                return step(at)

            trainer.run_step = watched
            trainer.train()
        look()
        return found

    each, third, off = sizes(enabled=True, save_interval=1), sizes(enabled=True, save_interval=3), sizes(enabled=False)
    assert each[0] < each[1] < each[2] < each[3]
    assert third[1] == third[2] == third[0] < third[3]
    assert set(off) == {0}


def test_the_profiler_runs_in_the_steps_asked_for(tiny_checkpoint, tmp_path):
    def operations(name: str, steps: list[int]) -> set[int]:
        """Steps in which the trace has operations of PyTorch."""
        given = {"perf_tracer.enabled": True, "perf_tracer.profile_steps": steps, "total_train_steps": 3}
        run = run_kind("sft", tiny_checkpoint, tmp_path / name, given)
        text = "".join(path.read_text() for path in run.folder.rglob("traces-r*.jsonl"))
        events = [json.loads(line.strip().rstrip(",")) for line in text.splitlines() if line.startswith('{"')]
        found = [event for event in events if str(event.get("name", "")).startswith("aten::")]
        return {event["args"]["global_step"] for event in found}

    assert operations("one", [1]) == {1}
    assert operations("none", []) == set()
