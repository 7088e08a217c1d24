"""The mathematics example: real rows, worked responses, and a reward that agrees with them."""

import importlib.util
from pathlib import Path

import pytest

from areno.api.datasets import load_rows, load_training_dataset
from areno.config.hooks import LOADER_HOOK, load_hook
from areno.errors import UsageError
from areno.rewards import RewardRunner
from areno.types import RewardRecord

FOLDER = Path(__file__).parents[2] / "examples" / "math"
REWARD = str(FOLDER / "math_verify_reward.py")


def _loader():
    return load_hook(str(FOLDER / "dataset_loader.py"), LOADER_HOOK)


def _module(name="dataset_loader"):
    spec = importlib.util.spec_from_file_location(f"math_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load(tmp_path, line):
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    return load_training_dataset(str(tmp_path / "rows.jsonl"), _loader())


def test_gsm8k_row_becomes_prompt_solutions_and_response(tmp_path):
    (row,) = _load(tmp_path, '{"question": "2+1000?", "answer": "It is 2+1000=<<2+1000=1002>>1002.\\n#### 1,002"}')
    assert row["prompt"].startswith("2+1000?\n")
    assert "\\boxed{}" in row["prompt"]
    assert row["solutions"] == ["1002"]
    assert row["response"] == "It is 2+1000=1002.\nThe final answer is \\boxed{1002}."


def test_numina_row_takes_its_last_box(tmp_path):
    (row,) = _load(tmp_path, r'{"problem": "half?", "solution": "\\boxed{9}? No, \\boxed{\\frac{1}{2}}."}')
    assert row["solutions"] == [r"\frac{1}{2}"]
    assert row["response"].endswith(r"The final answer is \boxed{\frac{1}{2}}.")


def test_row_with_a_prompt_passes_unchanged(tmp_path):
    assert _load(tmp_path, '{"prompt": "x", "solutions": ["1"]}') == [{"prompt": "x", "solutions": ["1"]}]


def test_unknown_row_is_refused_with_its_keys(tmp_path):
    with pytest.raises(UsageError, match=r"KeyError.*this row has foo, text"):
        _load(tmp_path, '{"text": "x", "foo": 1}')


def test_problem_without_a_result_is_left_out(tmp_path):
    rows = _load(tmp_path, '{"problem": "prove", "solution": "clear"}\n{"problem": "1", "solution": "\\\\boxed{1}"}')
    assert [row["solutions"] for row in rows] == [["1"]]


@pytest.mark.parametrize(
    ("text", "expected"), [(r"a \boxed{x_{1}} b", "x_{1}"), ("none", ""), (r"\boxed{open", ""), (r"\boxed{ 3 }", "3")]
)
def test_last_box_respects_braces(text, expected):
    assert _module().last_boxed(text) == expected


def test_every_real_row_has_a_number_and_no_calculator_annotations(gsm8k):
    rows = load_training_dataset(str(gsm8k / "train.jsonl"), _loader())
    assert len(rows) == len(load_rows(str(gsm8k / "train.jsonl"))) == 7473
    for row in rows:
        assert float(row["solutions"][0]) is not None
        assert "<<" not in row["response"]
        assert "####" not in row["response"]


def test_reward_agrees_with_the_worked_solutions_of_real_rows(gsm8k):
    rows = load_training_dataset(str(gsm8k / "train.jsonl"), _loader())[:100]
    right = [RewardRecord(completion=row["response"], answer=row["solutions"]) for row in rows]
    wrong = [RewardRecord(completion="The final answer is \\boxed{-12345}.", answer=row["solutions"]) for row in rows]
    with RewardRunner(path=REWARD, timeout_s=60, workers=2) as runner:
        values = [outcome.value for outcome in runner.run(right + wrong)]
    assert values == [1.0] * 100 + [0.0] * 100


def test_reward_without_a_reference_is_an_error():
    with RewardRunner(path=REWARD, timeout_s=60, workers=1, on_error="drop") as runner:
        (outcome,) = runner.run([RewardRecord(completion="\\boxed{1}")])
    assert outcome.value is None
    assert "KeyError" in outcome.error


@pytest.mark.parametrize(
    ("text", "form", "right"),
    [
        ("12 - 5 = 7 are left.\n#### 1,200", 1.0, 1.0),
        ("12 - 5 = 7 are left.\n#### 1200.0\n", 1.0, 1.0),
        ("It is 8.\n#### 8", 1.0, 0.0),
        ("#### 1200 is the result.", 0.5, 1.0),  # not alone on a line
        ("Left: 3.\n#### 1200 pens", 0.5, 1.0),
        ("#### 3\n#### 1200", 0.5, 1.0),  # two results
        ("The result is 1200.", 0.0, 0.0),
        ("#### none", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_form_and_result_of_a_gsm8k_answer_are_separate_reward_parts(text, form, right):
    parts = _module("answer_format").reward_fn(RewardRecord(completion=text, answer=["1,200"]))
    assert parts == {"form": form, "right": right}


def test_real_rows_become_conversations_whose_worked_solutions_are_right(gsm8k):
    module = _module("answer_format")
    rows = load_training_dataset(str(gsm8k / "test.jsonl"), load_hook(str(FOLDER / "answer_format.py"), LOADER_HOOK))
    answers = [row["answer"] for row in load_rows(str(gsm8k / "test.jsonl"))]
    assert len(rows) == len(answers) == 1319
    for row, answer in zip(rows, answers, strict=True):
        assert [turn["role"] for turn in row["prompt"]] == ["user", "assistant", "user"]
        parts = module.reward_fn(RewardRecord(completion=answer, answer=row["solutions"]))
        assert parts == {"form": 1.0, "right": 1.0}, answer
