import os
from datetime import datetime
from pathlib import Path

import pytest

from areno.config.parser import parse_train
from areno.config.resume import apply_resume, checkpoints, new_run_dir
from areno.config.yaml_io import dump_config
from areno.errors import UsageError
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


def test_two_runs_of_one_second_get_two_directories(workspace):
    now = datetime(2026, 1, 2, 3, 4, 5)
    new_run_dir("gspo", now).mkdir(parents=True)
    assert str(new_run_dir("gspo", now)) == "runs/gspo-20260102-030405-2"


def test_a_given_run_directory_stays(workspace):
    assert apply_resume(parse_train([*GSPO, "--run-dir", "mine"])).run_dir == "mine"


def test_resume_takes_everything_from_the_old_run(workspace):
    run = stored_run(workspace / "runs" / "old", config("--lr", "3e-5", "--seed", "7"), step=20)
    options = resume("--resume", str(run))
    assert (options.lr, options.seed, options.ckpt, options.run_dir) == (3e-5, 7, "model", str(run))
    assert options.checkpoint_path == run / "checkpoints"


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


def test_what_changes_results_is_refused_with_both_values(workspace):
    run = stored_run(workspace / "runs" / "old", config("--lr", "3e-5"), step=5)
    with pytest.raises(UsageError, match=r"--lr 1e-05 differs from 3e-05 in .*would change its results") as caught:
        resume("--resume", str(run), "--lr", "1e-5", "--batch-size", "4")
    assert "--batch-size 4 differs from 32" in str(caught.value)


def test_the_same_value_given_again_is_fine(workspace):
    run = stored_run(workspace / "runs" / "old", config("--lr", "3e-5"), step=5)
    assert resume("--resume", str(run), "--lr", "3e-5").lr == 3e-5


def test_resume_alone_takes_the_newest_run(workspace):
    for name, seconds in (("a", 50), ("b", 10), ("c", 90)):
        age(stored_run(workspace / "runs" / name, config("--seed", "1"), step=3), seconds)
    assert resume("--resume").run_dir == "runs/b"


def test_resume_with_a_command_takes_the_newest_run_of_that_configuration(workspace):
    for name, seed, seconds in (("a", "1", 50), ("b", "2", 10), ("c", "1", 90)):
        age(stored_run(workspace / "runs" / name, config("--seed", seed), step=3), seconds)
    assert resume(*GSPO, "--seed", "1", "--resume", "--max-steps", "8").run_dir == "runs/a"


def test_resume_without_ckpt_compares_only_what_is_given(workspace):
    for name, seed, seconds in (("a", "1", 50), ("b", "2", 10)):
        age(stored_run(workspace / "runs" / name, config("--seed", seed, "--lr", "3e-5"), step=3), seconds)
    assert resume("--seed", "1", "--resume").run_dir == "runs/a"
    with pytest.raises(UsageError, match=r"runs/b has --seed 2, given is 9"):
        resume("--seed", "9", "--resume")


def test_a_run_with_a_checkpoint_is_preferred(workspace):
    age(stored_run(workspace / "runs" / "empty", config()), 1)
    age(stored_run(workspace / "runs" / "full", config(), step=2), 99)
    assert resume("--resume").run_dir == "runs/full"


def test_a_run_without_checkpoint_resumes_at_its_start(workspace):
    stored_run(workspace / "runs" / "empty", config())
    assert resume("--resume").run_dir == "runs/empty"


def test_runs_that_cannot_be_read_are_passed_over(workspace):
    stored_run(workspace / "runs" / "broken", "lr: [", step=9)
    stored_run(workspace / "runs" / "alien", "unknown_option: 3", step=9)
    stored_run(workspace / "runs" / "good", config(), step=1)
    assert resume("--resume").run_dir == "runs/good"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--resume"], r"found no run in runs/; name one with --resume PATH"),
        (["--resume", "runs/none"], "--resume directory does not exist: runs/none"),
        (["--resume", "model"], "model is not a run directory; give the directory that holds config.yaml"),
    ],
)
def test_nothing_to_resume_says_what_was_looked_for(workspace, argv, expected):
    with pytest.raises(UsageError, match=expected):
        resume(*argv)


def test_no_run_with_the_same_configuration_shows_a_difference(workspace):
    stored_run(workspace / "runs" / "old", config(), step=1)
    with pytest.raises(
        UsageError, match=r"no run with the same configuration in runs/ \(1 looked at; runs/old has --lr"
    ):
        resume(*GSPO, "--lr", "5e-6", "--resume")


def test_a_checkpoint_folder_leads_to_its_run(workspace):
    run = stored_run(workspace / "runs" / "old", config(), step=1)
    with pytest.raises(UsageError, match=rf"did you mean {run}\?"):
        resume("--resume", str(run / "checkpoints" / "step_000001"))


def test_run_dir_with_resume_is_looked_at_first(workspace):
    stored_run(workspace / "mine", config(), step=1)
    assert resume("--run-dir", "mine", "--resume").run_dir == "mine"


def test_two_different_directories_are_refused(workspace):
    stored_run(workspace / "mine", config(), step=1)
    with pytest.raises(UsageError, match="name two directories"):
        resume("--resume", "mine", "--run-dir", "other")


def test_a_moved_run_keeps_its_checkpoints(workspace):
    run = stored_run(workspace / "runs" / "old", config(), step=1)
    run.rename(workspace / "moved")
    assert len(checkpoints(resume("--resume", "moved").checkpoint_path)) == 1


def test_only_complete_checkpoints_count_in_order_of_steps(tmp_path):
    run = stored_run(tmp_path / "r", "", step=5)
    root = run / "checkpoints"
    for name in ("step_000100", "step_000020", "other"):
        (root / name / "trainer_state").mkdir(parents=True)
        (root / name / "trainer_state" / "state.json").write_text("{}")
    (root / "step_000200").mkdir()
    assert [path.name for path in checkpoints(root)] == ["step_000005", "step_000020", "step_000100"]
    assert checkpoints(tmp_path / "absent") == []


def test_a_resumed_config_is_the_stored_one_again(workspace):
    text = config("--lr", "3e-5", "--stop", "x")
    run = stored_run(workspace / "runs" / "old", text, step=1)
    assert dump_config(resume("--resume", str(run))) == text


def test_own_options_of_an_algorithm_resume_too(workspace):
    (workspace / "algo.py").write_text(
        "from dataclasses import dataclass\nfrom areno.config import AlgorithmSpec, option\n"
        "@dataclass\nclass O:\n    tau: float = option(0.5, help='T.')\n"
        "spec = AlgorithmSpec('own', object, None, True, options=O)\n"
    )
    run = stored_run(workspace / "runs" / "old", config("--algo", "algo.py:spec", "--tau", "0.2"), step=1)
    assert resume("--resume", str(run)).extra == {"tau": 0.2}
    with pytest.raises(UsageError, match=r"--tau 0\.3 differs from 0\.2"):
        resume("--resume", str(run), "--algo", "algo.py:spec", "--tau", "0.3")
