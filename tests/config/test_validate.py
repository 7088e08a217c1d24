"""Validation rules, without the command line; tests/cli covers wrong input through the command line."""

import os

import pytest

from areno.config.eval_options import parse_eval
from areno.config.parser import parse_train
from areno.config.paths import ckpt_problem, dataset_problem, looks_like_path, unwritable
from areno.config.resume import apply_resume
from areno.config.validate import validate
from areno.config.yaml_io import dump_config
from areno.errors import UsageError
from tests.config.workspace import BASE, GSPO, SFT, stored_run


def check(*argv):
    validate(apply_resume(parse_train([*argv])))


@pytest.mark.parametrize(
    "argv",
    [
        GSPO,
        SFT,
        [*GSPO, "--algo", "grpo", "--grpo-clip-eps", "0.1", "--n-samples", "2"],
        [*GSPO, "--world-size", "1", "--tp-size", "1"],
        [*GSPO, "--lr-warmup-steps", "2000", "--lr-decay-steps", "10"],
        [*GSPO, "--top-k", "1", "--top-p", "1", "--temperature", "0.01"],
        [*GSPO, "--lr", "5e-8", "--lr-decay-style", "constant"],
        [*GSPO, "--device", "cuda:1", "--dtype", "bfloat16"],
        [*GSPO, "--max-prompt-tokens", "8", "--max-new-tokens", "8", "--kv-cache-tokens", "16"],
        [*GSPO, "--max-context-len", "1024", "--kv-cache-tokens", "1024"],
        [*GSPO, "--max-context-len", "8192", "--kv-cache-tokens", "4095"],
        ["--ckpt", "Qwen/Qwen3-0.6B", "--dataset-path", "gsm8k:main", "--reward-fn-path", "reward.py"],
        [
            "--ckpt",
            "gpt2",
            "--dataset-path",
            "AI-MO/NuminaMath-TIR:default:train",
            "--reward-fn-path",
            "reward.py:reward_fn",
        ],
    ],
)
def test_valid_options_are_accepted(workspace, argv):
    check(*argv)


def test_an_engine_option_is_accepted_with_servers_if_evaluations_read_it(workspace):
    servers = ("--rollout-backend", "vllm", "--rollout-url", "http://127.0.0.1:9/v1")
    check(*GSPO, *servers, "--eval-dataset-path", "data.jsonl", "--kv-cache-tokens", "9999", "--speculate", "4")


def test_the_documented_smoke_test_is_accepted(workspace):
    check(
        "--ckpt", "Qwen/Qwen3-0.6B", "--dataset-path", "gsm8k:main", "--dataset-loader-fn", "loader.py",
        "--reward-fn-path", "reward.py", "--algo", "gspo", "--tp-size", "1", "--world-size", "1", "--batch-size", "1",
    )  # fmt: skip


def test_all_problems_are_reported_at_once(workspace):
    with pytest.raises(UsageError) as caught:
        check("--epochs", "0", "--top-p", "2", "--dpo-beta", "1", "--ckpt", "./gone")
    lines = str(caught.value).splitlines()
    assert lines[0] == "6 problems:"
    assert [line.split(".")[0].strip() for line in lines[1:]] == ["1", "2", "3", "4", "5", "6"]


def test_a_single_problem_is_not_numbered(workspace):
    with pytest.raises(UsageError, match=r"^--epochs must be positive, got 0; give an integer of at least 1$"):
        check(*GSPO, "--epochs", "0")


def test_a_stored_config_is_valid_input_for_the_next_run(workspace):
    for argv in (SFT, [*GSPO, "--lr-decay-style", "constant"]):
        (workspace / "again.yaml").write_text(dump_config(parse_train(argv)))
        check("--config", "again.yaml")


def test_resuming_a_run_does_not_trip_over_its_own_directory(workspace):
    run = stored_run(workspace / "runs" / "old", dump_config(parse_train([*GSPO, "--save-path", "saved"])), step=1)
    (run / "checkpoints").rename(workspace / "saved")
    check("--resume", str(run), "--max-steps", "9")


def test_a_save_path_with_foreign_checkpoints_is_refused(workspace):
    run = stored_run(workspace / "runs" / "old", "", step=1)
    with pytest.raises(UsageError, match="already contains checkpoints of another run"):
        check(*GSPO, "--save-path", str(run / "checkpoints"))


@pytest.mark.parametrize(
    "text", ["./x", "../x", "/x", "~/x", "a\\b", "data.jsonl", "data/train.TSV", "a/b/c", "model/", "x.safetensors"]
)
def test_paths_are_recognized(text):
    assert looks_like_path(text)


@pytest.mark.parametrize("text", ["gpt2", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "gsm8k"])
def test_repo_ids_are_not_paths(text):
    assert not looks_like_path(text)
    assert ckpt_problem(text) == dataset_problem(text, has_loader=False) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gone.jsonl", "does not exist: gone.jsonl"),
        ("data/gone.tsv:main", "does not exist"),
        ("a:b:c:d", "has 4 parts"),
        ("a::train", "neither a path nor a hub reference"),
        ("my data", "neither a path nor a hub reference"),
        ("empty", "is an empty folder"),
        ("empty.csv", "is empty; pass a file with at least one row"),
        ("notes.md", "has an unsupported format"),
    ],
)
def test_unusable_data_says_why(workspace, text, expected):
    (workspace / "empty").mkdir()
    (workspace / "empty.csv").touch()
    (workspace / "notes.md").write_text("x")
    assert expected in dataset_problem(text, has_loader=False)


def test_a_loader_may_accept_other_references(workspace):
    (workspace / "rows.md").write_text("x")
    assert dataset_problem("db://host/table x", has_loader=True) != ""  # several slashes: looks like a path
    assert dataset_problem("table x", has_loader=True) == ""
    assert dataset_problem("rows.md", has_loader=True) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("./gone", "folder does not exist: ./gone"),
        ("model/config.json", "is a file; pass the folder"),
        ("bare", "has no config.json"),
        ("torn", "is not valid JSON"),
        ("listed", "is not a JSON object"),
        ("my model", "neither a folder nor a repo id"),
    ],
)
def test_unusable_models_say_why(workspace, text, expected):
    (workspace / "bare").mkdir()
    (workspace / "torn").mkdir()
    (workspace / "torn" / "config.json").write_text("{")
    (workspace / "listed").mkdir()
    (workspace / "listed" / "config.json").write_text("[]")
    assert expected in ckpt_problem(text)


def test_a_path_below_a_file_is_unwritable(workspace):
    assert unwritable(workspace / "new" / "deep", "--run-dir") == ""
    assert not (workspace / "new").exists()
    assert "is a file; choose a directory" in unwritable(workspace / "data.jsonl" / "run", "--run-dir")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_unwritable(workspace):
    (workspace / "locked").mkdir(mode=0o500)
    assert "cannot be written" in unwritable(workspace / "locked" / "run", "--run-dir")


def test_an_option_of_another_algorithm_is_refused_naming_that_algorithm(workspace):
    with pytest.raises(UsageError, match=r"--critic-lr 0\.1 applies to --algo ppo, not to gspo; remove the option"):
        check(*GSPO, "--critic-lr", "0.1")
    with pytest.raises(UsageError, match=r"--adv.* applies|--advantage rloo applies to --algo gspo and grpo, not to"):
        check(*BASE, "--algo", "ppo", "--reward-fn-path", "reward.py", "--advantage", "rloo")
    with pytest.raises(UsageError, match=r"--ref-ckpt x applies to --algo dpo, gspo, grpo and ppo, not to sft"):
        check(*SFT, "--ref-ckpt", "x")


def test_a_run_that_trains_the_policy_once_is_long_enough(workspace):
    check(*PPO, "--max-steps", "21")
    check(*PPO, "--max-steps", "1", "--critic-warmup-steps", "0")
    check(*GSPO, "--max-steps", "1")


PPO = [*BASE, "--algo", "ppo", "--reward-fn-path", "reward.py"]
DPO = [*BASE, "--algo", "dpo"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [*GSPO, "--kl-reward-type", "k3"],
            r"--kl-reward-type k3 has no effect without a KL penalty; set --kl-reward-coef",
        ),
        (
            [*GSPO, "--no-save-async"],
            r"--no-save-async has no effect without --model-save-interval, .* written in the background",
        ),
        ([*GSPO, "--kl-loss-type", "k1"], r"--kl-loss-type k1 has no effect without a KL term; set --kl-coef too"),
        ([*GSPO, "--ref-ckpt", "model"], r"--ref-ckpt model has no effect without a KL term"),
        (
            [*PPO, "--max-steps", "20"],
            r"--critic-warmup-steps 20: only the critic .* of the run is 20 \(--max-steps 20\), so the policy "
            r"would never be trained; train for more than 20 steps",
        ),
        (
            [*PPO, "--no-use-kl-loss", "--kl-loss-coef", "0.1"],
            r"--kl-loss-coef 0.1 has no effect with --no-use-kl-loss",
        ),
        ([*GSPO, "--score-micro-bs", "4"], r"--score-micro-bs 4 has no effect without a reference model"),
        (
            [*GSPO, "--eval-interval", "5"],
            r"--eval-interval 5 has no effect without held-out data; set --eval-dataset-path",
        ),
        ([*GSPO, "--keep-best"], r"--keep-best has no effect without held-out data"),
        (
            [*GSPO, "--max-context-len", "1024", "--kv-cache-tokens", "1023"],
            r"--kv-cache-tokens 1023 is too small for one sequence \(--max-context-len 1024\); use at least 1024",
        ),
        (
            [*GSPO, "--rollout-backend", "vllm", "--kv-cache-tokens", "9999"],
            r"--kv-cache-tokens 9999 has no effect on inference servers, .* from --rollout-server-args",
        ),
        (
            [*GSPO, "--rollout-backend", "sglang", "--speculate", "4"],
            r"--speculate 4 has no effect on inference servers",
        ),
        (
            [*BASE, "--workflow", "reward.py:reward_fn", "--agent-timeout-s", "9"],
            r"--agent-timeout-s 9.0 has no effect with --workflow, because the option applies only to --agent-fn; remove",
        ),
        ([*DPO, "--stop-token-ids", "1,2"], r"--stop-token-ids 1 --stop-token-ids 2 has no effect with --algo dpo"),
        ([*PPO, "--critic-min-lr", "0"], r"--critic-min-lr 0.0 has no effect without --critic-lr-decay-style linear"),
        ([*DPO, "--mini-bs", "3"], r"--mini-bs 3 would split a pair: --algo dpo .* use an even number such as 4"),
        ([*BASE, "--algo", "rm", "--mini-bs", "5"], r"--mini-bs 5 would split a pair"),
        (
            [*DPO, "--eval-dataset-path", "data.jsonl", "--eval-n-samples", "4"],
            r"--eval-n-samples 4 has no effect with --algo dpo",
        ),
        ([*GSPO, "--eval-dataset-path", "./gone.jsonl"], r"--eval-dataset-path does not exist: ./gone.jsonl"),
        ([*PPO, "--critic-ckpt", "./gone"], r"--critic-ckpt folder does not exist: ./gone"),
        ([*PPO, "--ref-ckpt", "data.jsonl"], r"--ref-ckpt data.jsonl is a file; pass the folder"),
        ([*BASE, "--reward-ckpt", "./gone"], r"--reward-ckpt folder does not exist: ./gone"),
        (
            [*GSPO, "--reward-ckpt", "model"],
            r"--reward-fn-path reward.py and --reward-ckpt model both define the reward",
        ),
        (
            [*BASE, "--reward-ckpt", "model", "--reward-workers", "2"],
            r"--reward-workers 2 has no effect with --reward-ckpt",
        ),
        ([*GSPO, "--update-minibatches", "40"], r"--update-minibatches 40 is more than the 32 prompts"),
        (
            [*GSPO, "--update-minibatches", "2", "--gradient-accumulation-steps", "2"],
            r"--update-minibatches 2 and --gradient-accumulation-steps 2 both set the number of rows",
        ),
        (
            [*GSPO, "--advantage", "grupe"],
            r"--advantage 'grupe' is unknown \(did you mean group\?\); choose batch, group, group_mean",
        ),
        ([*GSPO, "--advantage", "gone.py:fn"], r"--advantage file does not exist: gone.py"),
        ([*GSPO, "--algo", "grpo", "--grpo-dual-clip", "1"], r"--grpo-dual-clip must be above 1, got 1.0"),
        ([*DPO, "--dpo-label-smoothing", "0.5"], r"--dpo-label-smoothing must be below 0.5"),
    ],
)
def test_combinations_that_cannot_work_or_have_no_effect_are_refused(workspace, arguments, message):
    with pytest.raises(UsageError, match=message):
        check(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        [*GSPO, "--kl-coef", "0.01", "--kl-loss-type", "k1", "--ref-ckpt", "model", "--score-micro-bs", "4"],
        [*BASE, "--reward-ckpt", "model", "--score-micro-bs", "4"],
        [*PPO, "--no-use-kl-loss", "--kl-reward-coef", "0.1", "--kl-reward-type", "k3", "--ref-ckpt", "model"],
        [*PPO, "--critic-lr-decay-style", "cosine", "--critic-min-lr", "0"],
        [*DPO, "--dpo-loss-type", "ipo", "--dpo-length-normalized"],
        [*GSPO, "--eval-dataset-path", "data.jsonl", "--eval-interval", "5", "--keep-best", "--eval-n-samples", "4"],
        [*SFT, "--eval-dataset-path", "data.jsonl"],
        [*BASE, "--algo", "rm"],
    ],
)
def test_valid_combinations_are_accepted(workspace, arguments):
    check(*arguments)


def test_held_out_rows_come_from_a_test_split(workspace):
    """The splits of a folder are checked before anything is loaded."""
    (workspace / "data").mkdir()
    for split in ("train", "test"):
        (workspace / "data" / f"{split}.jsonl").write_text('{"prompt": "1+1?"}\n')
    argv = [
        "--ckpt",
        "model",
        "--dataset-path",
        "data",
        "--reward-fn-path",
        "reward.py",
        "--eval-dataset-path",
        "data",
    ]
    validate(parse_train(argv))
    (workspace / "data" / "test.jsonl").unlink()
    with pytest.raises(
        UsageError, match="--eval-dataset-path data has no files of the split test; it has files of the split train"
    ):
        validate(parse_train(argv))
    with pytest.raises(UsageError, match="--dataset-path data has no files of the split test"):
        parse_eval(argv[:6])


def test_one_sample_per_prompt_is_enough_if_prompts_are_compared(workspace):
    one = [*GSPO, "--n-samples", "1"]
    check(*one, "--advantage", "batch")
    for more in (["--advantage", "group"], ["--advantage", "batch", "--batch-size", "1"]):
        with pytest.raises(UsageError, match="--n-samples 1: gspo compares the samples of a prompt"):
            check(*one, *more)
