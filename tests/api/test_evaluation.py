"""Evaluation: metrics against hand-written rewards, pass@k against every subset, and no effect on training."""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from areno import ArenoConfig, SamplingParams, Trainer, TrainSequence
from areno.api.evaluation import evaluate_prompts, evaluation_sampling, pass_at_k, reported_ks
from areno.api.run_training import load_held_out
from areno.cli.main import main
from areno.config import TrainOptions
from areno.engine.checkpoint.rng import capture_rng
from areno.errors import RewardError, UsageError
from areno.loss_fns import sft_loss_fn
from areno.storage.checkpoint_folder import CheckpointFolder
from tests.observability.test_display import Screen, run_on_terminal
from tests.support.cli import LOADER, task_arguments, without_times, write_task

PROMPTS = [{"prompt": f"What is {a} plus {b}?", "solutions": [str(a + b)]} for a in range(3) for b in range(2)]
SAMPLING = SamplingParams(max_new_tokens=6)


@pytest.fixture(scope="module")
def trainer(tiny_checkpoint):
    with Trainer(1, str(tiny_checkpoint), custom_config=ArenoConfig()) as opened:
        opened.init()
        yield opened


def evaluate(trainer, rewards, rows=PROMPTS, **changes):
    options = {"sampling": SAMPLING, "n_samples": 3, "max_prompt_tokens": 64, "max_running": 64, "seed": 5} | changes
    return evaluate_prompts(trainer, rows, rewards, **options)


def zero_rewards(records, token_rows):
    return [0.0] * len(records)


# -- pass@k and sampling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_sample(n):
    for correct in range(n + 1):
        samples = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            subsets = [any(chosen) for chosen in itertools.combinations(samples, k)]
            assert pass_at_k(n, correct, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def test_pass_at_k_of_many_samples_neither_overflows_nor_leaves_the_unit_interval():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)
    assert pass_at_k(10_000, 0, 10_000) == 0.0
    assert pass_at_k(10_000, 9_999, 2) == 1.0


@pytest.mark.parametrize(("n", "correct", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_pass_at_k_refuses_invalid_arguments(n, correct, k):
    with pytest.raises(ValueError, match=f"n={n}, correct={correct}, k={k}"):
        pass_at_k(n, correct, k)


def test_pass_at_k_is_reported_for_powers_of_two_and_for_all_samples():
    assert [reported_ks(n) for n in (1, 2, 3, 6, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("changes", "greedy", "temperature"),
    [
        ({}, True, 0.7),
        ({"eval_n_samples": 4}, False, 0.7),
        ({"eval_temperature": 0.2}, False, 0.2),
        ({"eval_n_samples": 4, "eval_temperature": 0.2}, False, 0.2),
        ({"eval_n_samples": 4, "greedy": True}, True, 0.7),
        ({"greedy": True, "eval_temperature": 0.2}, False, 0.2),
    ],
)
def test_one_sample_is_greedy_unless_a_temperature_is_set_and_several_are_random(changes, greedy, temperature):
    options = TrainOptions(temperature=0.7, top_k=9, top_p=0.8, max_new_tokens=11, stop=("x",), stop_token_ids=(4,))
    sampling = evaluation_sampling(replace(options, **changes))
    assert (sampling.greedy, sampling.temperature) == (greedy, temperature)
    assert (sampling.top_k, sampling.top_p, sampling.max_new_tokens) == (9, 0.8, 11)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (["x"], [4], False)


# -- metrics of prompts ------------------------------------------------------------------------------------------------


def test_metrics_match_hand_written_rewards(trainer):
    # Per prompt, the rewards of its three samples; None: the reward failed.
    table = [[1.0, 0.0, -1.0], [0.0, 0.0, 0.0], [2.0, None, 0.5], [None, None, 0.25], [0.0, 0.0, 3.0], [1.0, 1.0, 1.0]]
    answers = []

    def rewards(records, token_rows):
        answers.extend(zip(records, token_rows, strict=True))
        return [table[r.metadata["prompt_index"]][r.metadata["sample_index"]] for r in records]

    metrics = evaluate(trainer, rewards)
    valid = [reward for row in table for reward in row if reward is not None]
    mean = sum(valid) / len(valid)
    assert metrics["rewards_mean"] == pytest.approx(mean)
    assert metrics["rewards_std"] == pytest.approx(math.sqrt(sum((r - mean) ** 2 for r in valid) / len(valid)))
    assert metrics["accuracy"] == pytest.approx(8 / 15)
    # By hand: per prompt, the probability that at least one of k drawn samples has a reward above 0.
    assert metrics["pass@1"] == pytest.approx((1 / 3 + 0 + 1 + 1 + 1 / 3 + 1) / 6)
    assert metrics["pass@2"] == pytest.approx((2 / 3 + 0 + 1 + 2 / 3 + 1) / 5)
    assert metrics["pass@3"] == pytest.approx((1 + 0 + 1 + 1) / 4)
    lengths = [len(record.tokens) for record, _ in answers]
    assert metrics["response_len_mean"] == pytest.approx(sum(lengths) / 18)
    cut = [record.metadata["finish_reason"] == "length" for record, _ in answers]
    assert metrics["truncated_ratio"] == pytest.approx(sum(cut) / 18)
    counts = {name: metrics[name] for name in ("num_prompts", "num_samples", "skipped_long", "reward_errors")}
    assert counts == {"num_prompts": 6, "num_samples": 18, "skipped_long": 0, "reward_errors": 3}
    assert metrics["eval_time_s"] > 0


def test_reward_functions_see_the_record_and_all_tokens_of_each_answer(trainer):
    seen = []

    def rewards(records, token_rows):
        seen.extend(zip(records, token_rows, strict=True))
        return [0.0] * len(records)

    evaluate(trainer, rewards)
    tokenizer = trainer.get_tokenizer()
    assert [(r.metadata["prompt_index"], r.metadata["sample_index"]) for r, _ in seen] == [
        (prompt, sample) for prompt in range(6) for sample in range(3)
    ]
    for record, tokens in seen:
        row = PROMPTS[record.metadata["prompt_index"]]
        assert (record.prompt, record.answer, record.source_record) == (row["prompt"], row["solutions"], row)
        chat = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert tokens == [*prompt, *record.tokens]
        assert record.completion == tokenizer.decode(record.tokens, skip_special_tokens=True)


def test_the_means_of_reward_parts_are_reported(trainer):
    def in_parts(record):
        return {"length": len(record.tokens), "first": record.metadata["sample_index"] == 0}

    metrics = trainer.evaluate(PROMPTS, in_parts, sampling_params=SAMPLING, n_samples=2)
    assert metrics["reward_parts/first"] == 0.5
    assert metrics["reward_parts/length"] == metrics["response_len_mean"]
    assert metrics["rewards_mean"] == pytest.approx(0.5 + metrics["response_len_mean"])
    assert "reward_parts/first" not in evaluate(trainer, lambda records, _: [1.0] * len(records))


@pytest.mark.parametrize("last_lacks", [True, False])
def test_a_reward_part_that_some_answers_lack_is_an_error_as_in_training(trainer, last_lacks):
    def in_parts(record):
        last = record.metadata["prompt_index"] == len(PROMPTS) - 1
        return {"length": 1.0} if last == last_lacks else {"length": 1.0, "first": 0.0}

    with pytest.raises(RewardError, match="reward_fn returned length, but not first; return the same parts"):
        trainer.evaluate(PROMPTS, in_parts, sampling_params=SAMPLING, max_running_prompts=1)


def answers_of(trainer, rows=PROMPTS, **changes):
    texts = {}

    def keep(records, rewards):
        texts.update({(r.prompt, r.metadata["sample_index"]): r.completion for r in records})

    evaluate(trainer, zero_rewards, rows, on_scored=keep, **changes)
    return texts


def test_answers_depend_on_seed_and_prompt_but_not_on_chunking(trainer):
    whole = answers_of(trainer)
    assert answers_of(trainer, max_running=1) == whole
    assert answers_of(trainer, seed=6) != whole
    assert len(set(whole.values())) > 12  # answers differ between samples and prompts


def test_long_data_is_scored_in_chunks(trainer):
    sizes = []
    evaluate(trainer, lambda records, _: sizes.append(len(records)) or [0.0] * len(records), max_running=2, n_samples=4)
    assert sizes == [8, 8, 8]


def test_too_long_prompts_are_skipped_and_counted(trainer):
    rows = [PROMPTS[0], {"prompt": "long " * 60}, PROMPTS[1], {"prompt": "long " * 70}]
    metrics = evaluate(trainer, zero_rewards, rows)
    assert (metrics["num_prompts"], metrics["skipped_long"]) == (2, 2)
    with pytest.raises(UsageError, match=r"held\.jsonl: all 2 prompts are longer than --max-prompt-tokens 64"):
        evaluate(trainer, zero_rewards, [rows[1], rows[3]], source="held.jsonl")


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (lambda records, _: [None] * len(records), r"the rewards of all 18 answers of the evaluation failed"),
        (lambda records, _: [0.0], "returned 1 rewards for 18 answers"),
        (lambda records, _: [math.nan] * len(records), "returned nan; return a finite number"),
    ],
)
def test_invalid_rewards_are_an_error(trainer, rewards, message):
    with pytest.raises(RewardError, match=message):
        evaluate(trainer, rewards)


def test_an_evaluation_without_answers_is_an_error(trainer):
    with pytest.raises(RewardError, match="all samples of all 6 prompts failed or were dropped, and 0 other prompts"):
        evaluate(trainer, zero_rewards, answers=lambda batch, _: [None] * (3 * len(batch.items)))


@pytest.mark.parametrize("changes", [{"rows": []}, {"n_samples": 0}, {"max_running": 0}])
def test_an_empty_evaluation_is_refused(trainer, changes):
    with pytest.raises(ValueError, match="at least one row, and n_samples and max_running must be at least 1"):
        evaluate(trainer, zero_rewards, **changes)


def test_generation_of_an_evaluation_does_not_count_in_a_training_steps_times(trainer):
    evaluate(trainer, zero_rewards)
    row = TrainSequence(prompt_mask=[True, False], tokens=[5, 6], logprobs=[0.0, -1.0], advantages=[0.0, 0.0])
    stats = trainer.train([row], sft_loss_fn, 1)
    assert stats["step_rollout_time_s"] == 0.0
    assert stats["step_e2e_time_s"] == pytest.approx(stats["step_train_time_s"])


# -- in a run ----------------------------------------------------------------------------------------------------------


def train(algo, checkpoint, folder, *further, held_out=7):
    """Run a tiny training with held-out rows in this process; return its directory."""
    task = write_task(folder / "task")
    rows = [
        {"prompt": f"What is {a} plus {a}?", "response": f"The answer is {2 * a}.", "solutions": [str(2 * a)]}
        for a in range(31, 31 + held_out)
    ]
    (folder / "held.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = folder / "run"
    evaluation = ["--eval-dataset-path", folder / "held.jsonl"] if held_out else []
    arguments = [*task_arguments(algo, checkpoint, task, run), *evaluation, *further]
    assert main([*map(str, arguments)]) == 0
    return run


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def evaluations(run):
    """Evaluation records by number of completed steps."""
    return {record["step"]: record for record in records(run) if any(name.startswith("eval/") for name in record)}


def steps(run):
    return [record for record in records(run) if "train/loss" in record]


@pytest.mark.parametrize("before", [True, False])
def test_a_run_is_evaluated_before_training_at_every_interval_and_at_the_end(before, tmp_path, tiny_checkpoint):
    flag = "--eval-before-train" if before else "--no-eval-before-train"
    run = train("sft", tiny_checkpoint, tmp_path, "--eval-interval", 2, "--max-steps", 5, flag)
    wanted = [0, 2, 4, 5] if before else [2, 4, 5]
    assert list(evaluations(run)) == wanted
    assert [record["step"] for record in steps(run)] == list(range(5))
    # An evaluation after n steps is recorded between steps n - 1 and n.
    assert [record["step"] for record in records(run)] == sorted([*range(5), *wanted])
    log = (run / "log.txt").read_text()
    assert "device=cpu dtype=float32 world_size=1 tp_size=1 dp_size=1\n" in log
    logged = re.findall(r"epoch=0 step=(\d) eval=(\{.*\})", log)
    assert [int(step) for step, _ in logged] == wanted
    for step, text in logged:
        line = {f"eval/{name}": value for name, value in ast.literal_eval(text).items()}
        recorded = {k: v for k, v in evaluations(run)[int(step)].items() if k.startswith("eval/")}
        assert line == {k: float(f"{v:.6g}") for k, v in recorded.items()}, "the log has six digits, metrics.jsonl all"
    events = EventAccumulator(str(run / "events"))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("eval/loss")] == wanted


def test_the_summary_has_the_last_and_the_best_evaluation_and_the_last_training_step(tmp_path, tiny_checkpoint):
    run = train("sft", tiny_checkpoint, tmp_path, "--eval-interval", 2, "--max-steps", 3)
    summary, lines = json.loads((run / "summary.json").read_text()), evaluations(run)
    assert summary["last"]["step"] == 2
    assert summary["evaluation"]["step"] == 3
    assert summary["evaluation"]["loss"] == lines[3]["eval/loss"]
    best = min(lines, key=lambda step: lines[step]["eval/loss"])
    assert best > 0
    assert summary["best_evaluation"] == {
        **{"step": best, "metric": "loss", "value": lines[best]["eval/loss"]},
        "checkpoint": str(CheckpointFolder(run / "checkpoints").find(best)) if best == 3 else None,
    }


@pytest.mark.parametrize("algo", ["sft", "grpo"])
def test_evaluation_does_not_affect_training(algo, tmp_path, tiny_checkpoint):
    samples = ["--eval-n-samples", 3, "--eval-temperature", 0.8] if algo == "grpo" else []
    common = ["--max-steps", 4]
    with_it = train(algo, tiny_checkpoint, tmp_path / "a", "--eval-interval", 1, *common, *samples)
    without = train(algo, tiny_checkpoint, tmp_path / "b", *common, held_out=0)
    assert list(evaluations(with_it)) == [0, 1, 2, 3, 4]
    assert evaluations(without) == {}
    assert list(map(without_times, steps(with_it))) == list(map(without_times, steps(without)))
    a, b = (load_file(run / "checkpoints" / "step_000004" / "model.safetensors") for run in (with_it, without))
    assert all(torch.equal(a[name], b[name]) for name in a)


def negative_log_likelihood(folder, rows):
    """Sum over the response tokens including EOS, and their number; plain transformers in float64."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    total = count = 0
    for row in rows:
        chat = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        response = [*tokenizer.encode(row["response"]), tokenizer.eos_token_id]
        ids = torch.tensor([[*prompt, *response]])
        with torch.inference_mode():
            logprobs = model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])
        total -= float(logprobs[-len(response) :].sum())
        count += len(response)
    return total, count


@pytest.mark.parametrize("mini_bs", [1, 3, 64])
def test_the_held_out_loss_of_sft_equals_that_of_transformers(mini_bs, tmp_path, tiny_checkpoint):
    run = train("sft", tiny_checkpoint, tmp_path, "--max-steps", 2, "--mini-bs", mini_bs, "--eval-max-rows", 5)
    rows = [json.loads(line) for line in (tmp_path / "held.jsonl").read_text().splitlines()][:5]
    for step, folder in ((0, tiny_checkpoint), (2, run / "checkpoints" / "step_000002")):
        total, count = negative_log_likelihood(folder, rows)
        line = evaluations(run)[step]
        assert line["eval/loss"] == pytest.approx(total / count, abs=1e-5)
        assert line["eval/perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
        assert (line["eval/num_sequences"], line["eval/target_tokens"]) == (5, count)


def test_the_best_checkpoint_is_kept_while_older_ones_are_deleted(tmp_path, tiny_checkpoint):
    # This high learning rate lowers the held-out loss to 3.9 by step 2, and then raises it to 4.5.
    further = ["--max-steps", 4, "--eval-interval", 1, "--keep-best", "--keep-checkpoints", 1, "--save-interval", 3]
    run = train("sft", tiny_checkpoint, tmp_path, *further, "--lr", 0.1, "--lr-decay-style", "constant")
    losses = {step: line["eval/loss"] for step, line in evaluations(run).items()}
    best = min(losses, key=losses.__getitem__)
    assert 0 < best < 3
    folder = CheckpointFolder(run / "checkpoints")
    assert folder.steps() == [4]
    assert folder.best_step() == best
    summary = json.loads((run / "summary.json").read_text())
    assert summary["best_evaluation"]["checkpoint"] == str(folder.best)
    rows = [json.loads(line) for line in (tmp_path / "held.jsonl").read_text().splitlines()]
    total, count = negative_log_likelihood(folder.best, rows)
    assert total / count == pytest.approx(losses[best], abs=1e-4)


def test_no_best_checkpoint_is_saved_if_no_evaluation_beats_the_start(tmp_path, tiny_checkpoint):
    run = train("sft", tiny_checkpoint, tmp_path, "--max-steps", 2, "--lr", 10, "--keep-best", "--eval-interval", 1)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000002"]
    best = json.loads((run / "summary.json").read_text())["best_evaluation"]
    assert (best["step"], best["checkpoint"]) == (0, str(tiny_checkpoint))


def test_evaluating_on_the_training_data_warns(tmp_path, tiny_checkpoint, capsys):
    train("sft", tiny_checkpoint, tmp_path, "--max-steps", 1, "--eval-dataset-path", tmp_path / "task" / "data.jsonl")
    assert "the evaluation uses training rows" in capsys.readouterr().err


def test_held_out_rows_can_have_their_own_loader(tmp_path, tiny_checkpoint):
    loader = tmp_path / "own.py"
    loader.write_text(
        "def held_out(path, *, default_loader, **_):\n"
        "    return [row | {'response': 'no'} for row in default_loader(path) if '32' in row['prompt']]\n"
    )
    run = train("sft", tiny_checkpoint, tmp_path, "--max-steps", 1, "--eval-dataset-loader-fn", f"{loader}:held_out")
    assert evaluations(run)[0]["eval/num_sequences"] == 1


@pytest.mark.parametrize(
    ("body", "problem"), [("return []", "there are no rows in"), ("return rows['a']", "the loader failed on")]
)
def test_errors_of_the_loader_of_held_out_rows_name_its_option(tmp_path, tiny_checkpoint, capsys, body, problem):
    task, loader = write_task(tmp_path / "task"), tmp_path / "bad.py"
    loader.write_text(f"def load_training_dataset(path, **_):\n    rows = []\n    {body}\n")
    arguments = task_arguments("sft", tiny_checkpoint, task, tmp_path / "run")
    held_out = ["--eval-dataset-path", loader, "--eval-dataset-loader-fn", loader, "--max-steps", 1]
    assert main([str(word) for word in (*arguments, *held_out)]) == 2
    assert f"--eval-dataset-loader-fn: {problem} {loader}" in capsys.readouterr().err


def test_errors_in_held_out_data_are_reported_before_the_first_step(tmp_path, tiny_checkpoint, capsys):
    task = write_task(tmp_path / "task")
    run = tmp_path / "run"
    (tmp_path / "held.jsonl").write_text('{"question": "1+1?"}\n')
    arguments = task_arguments("sft", tiny_checkpoint, task, run)
    arguments += ["--eval-dataset-path", tmp_path / "held.jsonl", "--no-eval-before-train", "--max-steps", 1]
    assert main([*map(str, arguments)]) == 2
    assert "held.jsonl, row 1: dataset row must contain `prompt`" in capsys.readouterr().err
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "notes.txt").write_text("nothing")
    assert main([*map(str, arguments), "--eval-dataset-path", str(tmp_path / "held")]) == 2
    assert f"--eval-dataset-path {tmp_path / 'held'} has no files of the split test" in capsys.readouterr().err
    assert not (run / "metrics.jsonl").exists()


LIVE = r"""
with setup_logging(None), create_progress() as progress:
    progress.start(3)
    progress.evaluated("accuracy 0.25 after 0 steps")
    progress.step_done(0, {"loss": 0.5})
    progress.evaluated("accuracy 0.5 after 1 steps")
"""


def test_the_live_display_shows_the_last_evaluation_below_the_step_metrics():
    text, code = run_on_terminal(LIVE)
    shown = [line.split() for line in Screen().feed(text).lines if line.strip()]
    assert code == 0
    assert [line[0] for line in shown[-4:]] == ["loss", "update", "memory", "eval"]
    assert " ".join(shown[-1]) == "eval accuracy 0.5 after 1 steps"


# -- mistakes of custom trainers ---------------------------------------------------------------------------------------

OWN = """
import random
import torch
from areno.api.trainers.supervised import SFTDatasetTrainer
from areno.api.trainers.base import DatasetTrainer
from areno.config import AlgorithmSpec
from areno.loss_fns import sft_loss_fn

class Blind(SFTDatasetTrainer):
    evaluate = DatasetTrainer.evaluate

class Scripted(SFTDatasetTrainer):
    best_metric, best_is_higher = "score", True
    values = iter([float("nan"), 1.0, 3.0, 3.0, 2.0])

    def evaluate(self, rows):
        random.random(), torch.rand(1)
        return {"score": next(self.values)}

class Nameless(Scripted):
    best_metric = "accuracy"

BLIND, SCRIPTED, NAMELESS = (AlgorithmSpec("own", cls, sft_loss_fn, False) for cls in (Blind, Scripted, Nameless))
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own_trainers.py"
    file.write_text(OWN)
    return file


def test_the_first_of_equal_best_values_stays_the_best_and_nan_never_is(own, tmp_path, tiny_checkpoint):
    further = ["--max-steps", 4, "--eval-interval", 1, "--keep-best"]
    run = train("sft", tiny_checkpoint, tmp_path, *further, "--algo", f"{own}:SCRIPTED")
    assert [line["eval/score"] for line in evaluations(run).values()] == ["NaN", 1.0, 3.0, 3.0, 2.0]
    assert CheckpointFolder(run / "checkpoints").best_step() == 2


def test_random_draws_for_held_out_rows_do_not_change_the_random_state(own, tmp_path, tiny_checkpoint):
    loader = tmp_path / "drawing.py"
    loader.write_text("import random\n" + LOADER.replace("    return", "    random.random()\n    return"))
    before = capture_rng()
    further = ["--max-steps", 2, "--eval-interval", 1, "--eval-dataset-loader-fn", loader]
    train("sft", tiny_checkpoint, tmp_path, *further, "--algo", f"{own}:SCRIPTED")
    assert capture_rng() == before


def test_a_trainer_without_evaluation_says_so_before_anything_is_loaded(own, tmp_path, tiny_checkpoint, capsys):
    with pytest.raises(AssertionError):
        train("sft", tiny_checkpoint, tmp_path, "--algo", f"{own}:BLIND", "--no-eval-before-train")
    assert "Blind has no evaluation; remove the option, or implement evaluate" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_an_evaluation_without_its_best_metric_is_an_error(own, tmp_path, tiny_checkpoint, capsys):
    with pytest.raises(AssertionError):
        train("sft", tiny_checkpoint, tmp_path, "--algo", f"{own}:NAMELESS")
    message = "evaluate() of Nameless must return its best_metric 'accuracy', but returned only eval_time_s, score"
    assert message in capsys.readouterr().err


def test_held_out_rows_come_from_the_test_split(tmp_path, caplog):
    write = {"train": [{"prompt": "a"}] * 3, "test": [{"prompt": "b"}] * 2}
    for split, rows in write.items():
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = TrainOptions(ckpt="model", dataset_path=str(tmp_path), eval_dataset_path=str(tmp_path))
    assert list(load_held_out(options, None)) == write["test"]
    assert not caplog.records
    options = replace(options, eval_dataset_path=str(tmp_path / "train.jsonl"))
    assert list(load_held_out(options, None)) == write["train"]
    assert "uses training rows" in caplog.text
