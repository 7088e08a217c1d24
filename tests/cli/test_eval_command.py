"""``areno eval``: what it refuses, prints and writes, and which checkpoint of a run it uses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from areno.cli.main import main
from areno.config.all_train_options import TrainOptions
from areno.config.eval_options import EvalOptions, parse_eval
from areno.config.options import options_of
from tests.config.workspace import BASE, stored_run
from tests.observability.test_display import Screen, run_on_terminal
from tests.support.cli import write_task

EVAL = [*BASE, "--reward-fn-path", "reward.py"]

WRONG = [
    ([], "--ckpt is required; give a model folder, a run directory"),
    (["--ckpt", "model"], "--dataset-path is required"),
    (BASE, "--reward-fn-path or --reward-ckpt is required"),
    ([*EVAL, "--n-sample", "3"], "--n-sample is not an option (did you mean --n-samples?); see areno eval --help"),
    ([*EVAL, "--algo", "grpo"], "--algo is not an option"),
    ([*EVAL, "--lr", "1"], "--lr is not an option"),
    ([*EVAL, "stray"], "unexpected argument 'stray'"),
    ([*EVAL, "--n-samples"], "--n-samples needs a value"),
    ([*EVAL, "--n-samples", "two"], "--n-samples 'two': expected an integer"),
    ([*EVAL, "--n-samples", "0"], "--n-samples must be positive, got 0"),
    ([*EVAL, "--max-rows", "0"], "--max-rows must be positive, got 0"),
    ([*EVAL, "--max-running-prompts", "0"], "--max-running-prompts must be positive"),
    ([*EVAL, "--temperature", "0"], "--temperature must be positive, got 0.0; for greedy decoding use --greedy"),
    ([*EVAL, "--temperature", "1", "--top-k", "0"], "--top-k must be -1 (no limit) or at least 1, got 0"),
    ([*EVAL, "--greedy", "--temperature", "0.7"], "--temperature 0.7 has no effect with --greedy"),
    ([*EVAL, "--greedy", "--n-samples", "4"], "--n-samples 4 has no effect with --greedy, which gives the same answer"),
    (
        [*BASE, "--ckpt", "http://h/v1", "--reward-fn-path", "reward.py", "--ignore-eos", "--stop-token-ids", "1,2"],
        "--ignore-eos has no effect if --ckpt is the address of a server",
    ),
    (
        [*BASE, "--ckpt", "http://h/v1", "--reward-fn-path", "reward.py", "--ignore-eos", "--stop-token-ids", "1,2"],
        "--stop-token-ids 1 --stop-token-ids 2 has no effect if --ckpt is the address of a server",
    ),
    ([*EVAL, "--top-p", "0.9"], "--top-p 0.9 has no effect, because a single answer is decoded greedily; set"),
    ([*EVAL, "--score-micro-bs", "4"], "--score-micro-bs 4 has no effect without --reward-ckpt"),
    ([*EVAL, "--reward-ckpt", "model"], "--reward-fn-path reward.py has no effect with --reward-ckpt"),
    ([*BASE, "--reward-ckpt", "model", "--reward-workers", "2"], "--reward-workers 2 has no effect with --reward-ckpt"),
    ([*EVAL, "--reward-weights", "a=-1"], "--reward-weights 'a=-1': 'a=-1' is not a valid weight"),
    (
        [*BASE, "--reward-ckpt", "model", "--reward-weights", "a=1"],
        "--reward-weights a=1 has no effect with --reward-ckpt",
    ),
    ([*EVAL, "--kv-cache-tokens", "100"], "--kv-cache-tokens 100 is too small for one sequence"),
    ([*EVAL, "--device", "tpu"], "--device 'tpu' is unknown"),
    ([*EVAL, "--dtype", "fp16"], "--dtype 'fp16' is unknown; choose auto, float32, bfloat16"),
    (["--ckpt", "./gone", *EVAL[2:]], "--ckpt folder does not exist: ./gone"),
    (["--ckpt", "data.jsonl", *EVAL[2:]], "is a file; pass the folder"),
    (["--ckpt", "runs/empty", *EVAL[2:]], "--ckpt runs/empty is a run without a checkpoint; specify a model folder"),
    ([*EVAL, "--dataset-path", "dta.jsonl"], "--dataset-path does not exist: dta.jsonl"),
    ([*EVAL, "--dataset-loader-fn", "gone.py"], "--dataset-loader-fn file does not exist: gone.py"),
    (
        [*BASE, "--reward-fn-path", "gone.py"],
        "file does not exist: gone.py; pass a Python file that defines reward_fn(record)",
    ),
    ([*BASE, "--reward-fn-path", "reward.py:score"], "reward.py defines no score"),
    ([*EVAL, "--output", "model"], "--output 'model' is not a file name"),
    ([*EVAL, "--output", "data.jsonl/out.jsonl"], "--output data.jsonl: "),
]


@pytest.mark.parametrize(("argv", "message"), WRONG, ids=[" ".join(argv[-2:]) or "nothing" for argv, _ in WRONG])
def test_wrong_input_is_one_message(workspace, capsys, argv, message):
    stored_run(workspace / "runs" / "empty", "algo: gspo\n")
    before = sorted(path.name for path in workspace.iterdir())
    assert main(["eval", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert sorted(path.name for path in workspace.iterdir() if path.name != "__pycache__") == before


def test_all_mistakes_are_reported_together(workspace, capsys):
    assert main(["eval", *EVAL, "--n-samples", "0", "--seed", "-1"]) == 2
    assert capsys.readouterr().err.startswith("error: 2 problems:\n  1. --seed must be non-negative, got -1")


def test_help_loads_no_torch(tmp_path):
    code = (
        "import sys; from areno.cli.main import main; assert main(['eval', '--help']) == 0\n"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("usage: areno eval --ckpt MODEL")
    assert "Default: 1.0, or greedy decoding if --n-samples is 1." in done.stdout
    assert "(dpo" not in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_options_shared_with_training_have_the_same_meaning():
    mine = {entry.name: entry for entry in options_of(EvalOptions)}
    theirs = {entry.name: entry for entry in options_of(TrainOptions)}
    own = {"n_samples", "temperature", "max_rows", "output", "json", "max_running_prompts", "model"}
    assert mine.keys() - theirs.keys() == {"max_rows", "output", "json", "model"}
    for name in mine.keys() - own:
        assert (mine[name].kind, mine[name].many, mine[name].default) == (
            *(theirs[name].kind, theirs[name].many),
            theirs[name].default,
        )


def test_settings_are_converted_to_train_options(workspace):
    arguments = [
        "--n-samples",
        "4",
        "--temperature",
        "0.5",
        "--max-rows",
        "3",
        "--stop",
        "x",
        "--seed",
        "9",
        "--top-k",
        "7",
    ]
    settings = parse_eval([*EVAL, *arguments, "--max-running-prompts", "2", "--disable-thinking"]).as_train_options()
    assert (settings.eval_n_samples, settings.eval_temperature, settings.eval_max_rows) == (4, 0.5, 3)
    assert (settings.stop, settings.seed, settings.top_k, settings.disable_thinking) == (("x",), 9, 7, True)
    assert settings.running_sequences == 2
    assert parse_eval(EVAL).as_train_options().eval_temperature is None


# -- measuring ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def task(tmp_path, tiny_checkpoint):
    paths = write_task(tmp_path, rows=5)
    inputs = ["--ckpt", tiny_checkpoint, "--dataset-path", paths["data.jsonl"], "--reward-fn-path", paths["reward.py"]]
    return [str(part) for part in [*inputs, "--max-new-tokens", 6, "--reward-workers", 1]]


def test_the_table_and_the_json_line_have_the_same_metrics(task, capsys):
    assert main(["eval", *task, "--max-rows", "4"]) == 0
    table = dict(line.split() for line in capsys.readouterr().out.splitlines()[2:])
    assert main(["eval", *task, "--max-rows", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["ckpt"], report["n_samples"], report["seed"]) == (task[1], 1, 0)
    assert table.keys() == report["metrics"].keys()
    for name, value in report["metrics"].items():
        if name != "eval_time_s":
            assert float(table[name]) == pytest.approx(value, rel=1e-5)
    assert report["metrics"]["num_prompts"] == 4


def test_every_answer_is_written_with_its_reward(task, tmp_path, capsys):
    output = tmp_path / "deep" / "answers.jsonl"
    command = ["eval", *task, "--n-samples", "3", "--max-running-prompts", "2", "--output", str(output), "--json"]
    assert main(command) == 0
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    answers = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [(a["prompt_index"], a["sample_index"]) for a in answers] == [(p, s) for p in range(5) for s in range(3)]
    assert [a["prompt"] for a in answers[::3]] == [f"What is 0 plus {b}?" for b in range(5)]
    assert [a["answer"] for a in answers[::3]] == [[str(b)] for b in range(5)]
    for answer in answers:
        evens = sum(c in "02468" for c in answer["completion"])
        digits = [c for c in answer["completion"] if c.isdigit()]
        assert all(c.isascii() for c in digits)
        assert answer["reward"] == pytest.approx(evens / (1 + len(answer["completion"])))
    rewards = [answer["reward"] for answer in answers]
    assert metrics["rewards_mean"] == pytest.approx(sum(rewards) / 15)
    assert metrics["accuracy"] == pytest.approx(sum(reward > 0 for reward in rewards) / 15)
    assert metrics["response_len_mean"] == pytest.approx(sum(answer["response_len"] for answer in answers) / 15)
    assert main(command) == 0
    assert len(output.read_text(encoding="utf-8").splitlines()) == 15  # replaced, not appended to


def test_a_failing_reward_stops_the_evaluation_or_is_counted(task, tmp_path, capsys):
    (tmp_path / "reward.py").write_text(
        "def reward_fn(record):\n    return 1 / record.metadata['prompt_index']\n", encoding="utf-8"
    )
    assert main(["eval", *task]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    output = tmp_path / "answers.jsonl"
    assert main(["eval", *task, "--on-reward-error", "drop", "--json", "--output", str(output)]) == 0
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert metrics["reward_errors"] == 1
    assert metrics["rewards_mean"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert next(json.loads(line)["reward"] for line in output.read_text().splitlines()) is None


def test_a_reward_model_scores_the_answers_as_transformers_does(task, tmp_path, tiny_checkpoint, capsys):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    config = AutoConfig.from_pretrained(tiny_checkpoint, num_labels=1)
    classifier = AutoModelForSequenceClassification.from_config(config).eval()
    torch.nn.init.normal_(classifier.score.weight)
    classifier.save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    output = tmp_path / "answers.jsonl"
    command = [*task[: task.index("--reward-fn-path")], "--max-new-tokens", "6", "--reward-ckpt", str(tmp_path / "rm")]
    assert main(["eval", *command, "--score-micro-bs", "2", "--output", str(output), "--json"]) == 0
    policy = AutoModelForCausalLM.from_pretrained(tiny_checkpoint).eval()
    for line in output.read_text().splitlines():
        answer = json.loads(line)
        chat = [{"role": "user", "content": answer["prompt"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            tokens = policy.generate(**prompt, do_sample=False, max_new_tokens=6)
            score = classifier.score(classifier.model(tokens).last_hidden_state[0, -1])
        assert answer["reward"] == pytest.approx(float(score), abs=1e-5)


def test_progress_goes_to_stderr_with_the_mean_reward_so_far(task, capsys):
    assert main(["eval", *task, "--max-running-prompts", "1", "--json"]) == 0
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if "areno.cli.eval: prompt " in line]
    assert ["prompt 4/5" in lines[0], "prompt 5/5" in lines[1]] == [True, True]
    mean = json.loads(captured.out.splitlines()[-1])["metrics"]["rewards_mean"]
    assert f"reward={mean:.6f} ETA 0 s" in lines[1]


ON_A_TERMINAL = r"""
from areno.cli.eval import EvalProgress
from areno.types import RewardRecord
with setup_logging(None), EvalProgress(2, None) as watch:
    watch.start(4)
    watch.scored([RewardRecord()] * 4, [1.0, 0.0, None, 0.5])
    time.sleep(0.3)
    log.warning("something [to] read")
    watch.scored([RewardRecord()] * 4, [0.5] * 4)
"""


def test_on_a_terminal_progress_is_a_bar_that_log_lines_do_not_break():
    text, code = run_on_terminal(ON_A_TERMINAL)
    assert code == 0
    screen = Screen().feed(text)
    shown = [line.rstrip() for line in screen.lines if line.strip()]
    assert shown[0].endswith("WARNING areno.tests.display: something [to] read")
    assert shown[1].startswith("prompts, mean reward 0.500 ")
    assert " 4/4 " in shown[1]
    assert len(shown) == 2
    assert screen.cursor_shown


def test_a_model_that_cannot_be_loaded_is_refused_and_earlier_answers_are_kept(workspace, capsys):
    answers = workspace / "answers.jsonl"
    answers.write_text("earlier\n")
    assert main(["eval", *EVAL, "--output", str(answers)]) == 2
    assert "error: cannot load a tokenizer from model" in capsys.readouterr().err
    assert answers.read_text() == "earlier\n"
