import os
from datetime import datetime
from pathlib import Path

import pytest

from areno.config.parser import parse_train
from areno.config.resume import apply_resume, claim_run_dir, new_run_dir
from areno.config.validate import validate
from areno.config.yaml_io import dump_config
from areno.errors import UsageError
from areno.storage.checkpoint_folder import CheckpointFolder
from areno.storage.run_layout import checkpoints_of
from tests.config.workspace import GSPO, stored_run


def config(*more):
    return dump_config(parse_train([*GSPO, *more]))


def resume(*argv):
    return apply_resume(parse_train([*argv]))


def age(path, seconds):
    for entry in (path, *path.iterdir()):
        os.utime(entry, (1e9 - seconds, 1e9 - seconds))


def test_a_new_run_is_named_after_algorithm_and_time(workspace):
    assert str(new_run_dir("gspo", datetime(2026, 1, 2, 3, 4, 5))) == "runs/gspo-20260102-030405"
    assert Path(apply_resume(parse_train(GSPO)).run_dir).parent == Path("runs")


def test_two_runs_in_one_second_get_two_directories(workspace):
    now = datetime(2026, 1, 2, 3, 4, 5)
    new_run_dir("gspo", now).mkdir(parents=True)
    assert str(new_run_dir("gspo", now)) == "runs/gspo-20260102-030405-2"


def test_an_explicit_run_directory_is_kept(workspace):
    assert apply_resume(parse_train([*GSPO, "--run-dir", "mine"])).run_dir == "mine"


def test_resume_takes_everything_from_the_old_run(workspace):
    run = stored_run(workspace / "runs" / "old", config("--lr", "3e-5", "--seed", "7"), step=20)
    options = resume("--resume", str(run))
    assert (options.lr, options.seed, options.run_dir) == (3e-5, 7, str(run))
    assert options.ckpt == str(workspace / "model")
    assert options.checkpoint_path == run / "checkpoints"


def test_recomputation_stays_automatic_or_explicit(workspace):
    for name, flags, expected in (
        ("auto", (), None),
        ("on", ("--activation-checkpointing",), True),
        ("off", ("--no-activation-checkpointing",), False),
    ):
        run = stored_run(workspace / "runs" / name, config(*flags), step=5)
        resumed = resume("--resume", str(run))
        assert resumed.recomputes is expected
        assert parse_train(["--config", str(run / "config.yaml")]).recomputes is expected
        again = stored_run(workspace / "runs" / f"{name}-again", dump_config(resumed), step=5)
        assert resume("--resume", str(again)).recomputes is expected


def test_a_tilde_means_the_home_directory(workspace, monkeypatch):
    home = workspace / "home"
    monkeypatch.setenv("HOME", str(home))
    (workspace / "more.yaml").write_text("metrics_log_dir: ~/events\n")
    options = parse_train([*GSPO, "--run-dir=~/run", "--save-path=~/models", "--config", "more.yaml"])
    assert (options.run_path, options.checkpoint_path) == (home / "run", home / "models")
    assert options.events_path == home / "events"
    stored_run(home / "run", dump_config(options))
    assert checkpoints_of(home / "run", "--ckpt") == resume("--resume", "~/run").checkpoint_path == home / "models"


def test_length_saving_deadlines_and_logging_may_change(workspace):
    run = stored_run(workspace / "runs" / "old", config("--max-steps", "5"), step=5)
    more = [
        "--max-steps",
        "9",
        "--epochs",
        "2",
        "--save-interval",
        "3",
        "--reward-timeout-s",
        "5",
        "--metrics-log-dir",
        "m",
    ]
    options = resume("--resume", str(run), *more)
    assert (options.max_steps, options.epochs, options.save_interval, options.reward_timeout_s) == (9, 2, 3, 5.0)


def test_options_that_change_results_are_refused_with_both_values(workspace):
    run = stored_run(workspace / "runs" / "old", config("--lr", "3e-5"), step=5)
    with pytest.raises(
        UsageError, match=r"--lr 1e-05 differs from 3e-05 in .*would change the run's results"
    ) as caught:
        resume("--resume", str(run), "--lr", "1e-5", "--batch-size", "4")
    assert "--batch-size 4 differs from 32" in str(caught.value)


def test_repeating_the_same_value_is_accepted(workspace):
    run = stored_run(workspace / "runs" / "old", config("--lr", "3e-5"), step=5)
    assert resume("--resume", str(run), "--lr", "3e-5").lr == 3e-5


def test_resume_alone_takes_the_newest_run(workspace):
    for name, seconds in (("a", 50), ("b", 10), ("c", 90)):
        age(stored_run(workspace / "runs" / name, config("--seed", "1"), step=3), seconds)
    assert resume("--resume").run_dir == "runs/b"


def test_a_run_with_a_dangling_link_can_be_resumed(workspace):
    for name, seconds in (("a", 50), ("b", 10)):
        age(stored_run(workspace / "runs" / name, config(), step=3), seconds)
    (workspace / "runs" / "b" / "latest").symlink_to("gone")
    assert resume("--resume").run_dir == "runs/b"


def test_resume_with_a_command_takes_the_newest_run_of_that_configuration(workspace):
    for name, seed, seconds in (("a", "1", 50), ("b", "2", 10), ("c", "1", 90)):
        age(stored_run(workspace / "runs" / name, config("--seed", seed), step=3), seconds)
    assert resume(*GSPO, "--seed", "1", "--resume", "--max-steps", "8").run_dir == "runs/a"


def test_resume_without_ckpt_compares_only_explicit_options(workspace):
    for name, seed, seconds in (("a", "1", 50), ("b", "2", 10)):
        age(stored_run(workspace / "runs" / name, config("--seed", seed, "--lr", "3e-5"), step=3), seconds)
    assert resume("--seed", "1", "--resume").run_dir == "runs/a"
    with pytest.raises(UsageError, match=r"runs/b has --seed 2 instead of 9"):
        resume("--seed", "9", "--resume")


def test_a_run_with_a_checkpoint_is_preferred(workspace):
    age(stored_run(workspace / "runs" / "empty", config()), 1)
    age(stored_run(workspace / "runs" / "full", config(), step=2), 99)
    assert resume("--resume").run_dir == "runs/full"


def test_a_run_without_a_checkpoint_resumes_from_its_start(workspace):
    stored_run(workspace / "runs" / "empty", config())
    assert resume("--resume").run_dir == "runs/empty"


def test_unreadable_runs_are_skipped(workspace):
    stored_run(workspace / "runs" / "broken", "lr: [", step=9)
    stored_run(workspace / "runs" / "alien", "unknown_option: 3", step=9)
    stored_run(workspace / "runs" / "good", config(), step=1)
    assert resume("--resume").run_dir == "runs/good"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--resume"], r"found no run in runs/; pass --resume PATH"),
        (["--resume", "runs/none"], "--resume directory does not exist: runs/none"),
        (["--resume", "model"], "model is not a run directory; pass the directory that contains config.yaml"),
    ],
)
def test_an_error_says_why_there_is_nothing_to_resume(workspace, argv, expected):
    with pytest.raises(UsageError, match=expected):
        resume(*argv)


def test_without_a_run_of_the_same_configuration_the_error_shows_a_difference(workspace):
    stored_run(workspace / "runs" / "old", config(), step=1)
    with pytest.raises(
        UsageError, match=r"no run with the same configuration in runs/ \(checked runs: 1; runs/old has --lr"
    ):
        resume(*GSPO, "--lr", "5e-6", "--resume")


def test_for_a_checkpoint_folder_the_error_names_its_run(workspace):
    run = stored_run(workspace / "runs" / "old", config(), step=1)
    with pytest.raises(UsageError, match=rf"did you mean {run}\?"):
        resume("--resume", str(run / "checkpoints" / "step_000001"))


def test_resume_tries_run_dir_first(workspace):
    stored_run(workspace / "mine", config(), step=1)
    assert resume("--run-dir", "mine", "--resume").run_dir == "mine"


def test_two_different_directories_are_refused(workspace):
    stored_run(workspace / "mine", config(), step=1)
    with pytest.raises(UsageError, match="are different directories"):
        resume("--resume", "mine", "--run-dir", "other")


def test_a_moved_run_keeps_its_checkpoints(workspace):
    run = stored_run(workspace / "runs" / "old", config(), step=1)
    run.rename(workspace / "moved")
    assert CheckpointFolder(resume("--resume", "moved").checkpoint_path).steps() == [1]


def test_a_resumed_run_has_the_stored_configuration(workspace):
    text = config("--lr", "3e-5", "--stop", "x")
    run = stored_run(workspace / "runs" / "old", text, step=1)
    assert dump_config(resume("--resume", str(run))) == text


def own_algorithm(folder, *fields):
    lines = "".join(f"    {line}\n" for line in fields)
    (folder / "algo.py").write_text(
        "from dataclasses import dataclass\nfrom areno.config import AlgorithmSpec, option\n"
        f"@dataclass\nclass O:\n{lines}"
        "spec = AlgorithmSpec('own', object, None, True, options=O)\n"
    )


def test_own_options_of_an_algorithm_are_resumed_too(workspace):
    own_algorithm(workspace, "tau: float = option(0.5, help='T.')")
    run = stored_run(workspace / "runs" / "old", config("--algo", "algo.py:spec", "--tau", "0.2"), step=1)
    assert resume("--resume", str(run)).extra == {"tau": 0.2}
    with pytest.raises(UsageError, match=r"--tau 0\.3 differs from 0\.2"):
        resume("--resume", str(run), "--algo", "algo.py:spec", "--tau", "0.3")


def test_a_run_resumed_in_another_folder_uses_its_original_files(workspace, monkeypatch):
    outputs = ["--save-path", "saved", "--reward-fn-path", "reward.py:reward_fn"]
    (workspace / "saved").mkdir()
    run = stored_run(workspace / "runs" / "old", config(*outputs), step=None)
    (workspace / "elsewhere").mkdir()
    monkeypatch.chdir(workspace / "elsewhere")
    options = resume("--resume", str(run))
    assert options.ckpt == str(workspace / "model")
    assert options.dataset_path == str(workspace / "data.jsonl")
    assert options.reward_fn_path == str(workspace / "reward.py:reward_fn")
    assert options.checkpoint_path == workspace / "saved"


def test_the_paths_of_an_algorithms_own_options_are_stored_as_absolute_paths(workspace):
    own_algorithm(
        workspace,
        "words: str | None = option(None, path='place', help='W.')",
        "label: str | None = option(None, help='L.')",
    )
    run = stored_run(
        workspace / "runs" / "old",
        config("--algo", "algo.py:spec", "--words", "data.jsonl", "--label", "data.jsonl"),
    )
    assert resume("--resume", str(run)).extra == {"words": str(workspace / "data.jsonl"), "label": "data.jsonl"}


def test_names_that_are_not_paths_are_stored_unchanged(workspace):
    for name in ("gspo", "group", "gsm8k"):
        (workspace / name).mkdir()  # folders unrelated to the run
    text = config("--ckpt", "Qwen/Qwen3-0.6B", "--algo", "gspo", "--advantage", "group")
    assert "algo: gspo" in text
    assert "advantage: group" in text
    assert "ckpt: Qwen/Qwen3-0.6B" in text


@pytest.mark.parametrize("step", ["3", "9"])
def test_a_step_to_resume_from_must_have_a_checkpoint(workspace, step):
    run = stored_run(workspace / "runs" / "old", config(), step=3)
    if step == "3":
        assert resume("--resume", str(run), "--resume-step", step).resume_step == 3
        return
    with pytest.raises(UsageError, match=r"--resume-step 9: .* has no checkpoint of this step; choose one of 3"):
        resume("--resume", str(run), "--resume-step", step)


def test_a_run_can_be_resumed_from_the_best_checkpoint_by_its_step(workspace):
    run = stored_run(workspace / "runs" / "old", config(), step=3)
    best = run / "checkpoints" / "best" / "trainer_state"
    best.mkdir(parents=True)
    (best / "state.json").write_text('{"step": 2}')
    assert resume("--resume", str(run), "--resume-step", "2").resume_step == 2


def test_a_step_without_a_run_to_resume_is_refused(workspace):
    with pytest.raises(UsageError, match=r"--resume-step 2 needs --resume"):
        resume(*GSPO, "--resume-step", "2")


def test_new_runs_that_chose_the_same_name_get_different_directories(workspace):
    first = apply_resume(parse_train(GSPO))
    claimed = [claim_run_dir(first).run_path for _ in range(3)]  # three programs that chose the same name
    assert claimed[0] == Path(first.run_dir)
    assert len(set(claimed)) == 3
    assert all(path.is_dir() for path in claimed)
    mine = apply_resume(parse_train([*GSPO, "--run-dir", "mine"]))
    assert claim_run_dir(mine) == mine
    assert not Path("mine").exists()


def test_a_folder_with_the_events_of_another_run_is_refused(workspace):
    (workspace / "tb").mkdir()
    validate(apply_resume(parse_train([*GSPO, "--metrics-log-dir", "tb"])))
    (workspace / "tb" / "events.out.tfevents.1.host").write_bytes(b"")
    with pytest.raises(UsageError, match=r"--metrics-log-dir tb already contains the events of another run"):
        validate(apply_resume(parse_train([*GSPO, "--metrics-log-dir", "tb"])))
