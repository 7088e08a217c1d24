"""Which completions are kept and logged, and what is recorded about each."""

import json
import logging

import pytest

from areno.errors import UsageError
from areno.observability.samples import MAX_CHARS, EvalSamples, completions_to_log, log_completions, sample_records
from areno.storage.run_dir import RunDirectory
from areno.types import RewardRecord, WeightedReward


def record(prompt_index, sample_index, completion="4", **changes):
    return RewardRecord(
        prompt=f"prompt {prompt_index}",
        completion=completion,
        tokens=[5, 6, 7],
        logprobs=[-1.0, -2.0, -6.0],
        metadata={"prompt_index": prompt_index, "sample_index": sample_index, "finish_reason": "stop"},
        **changes,
    )


def test_best_worst_and_first_of_each_prompt_are_kept():
    records = [record(prompt, sample) for prompt in range(2) for sample in range(4)]
    rewards = [0.5, 0.0, 1.0, 0.75, 0.0, 0.0, 1.0, 0.5]
    kept = sample_records(3, records, rewards)
    assert [(row["prompt_index"], row["sample_index"], row["picked"]) for row in kept] == [
        (0, 0, ["first"]),
        (0, 1, ["worst"]),
        (0, 2, ["best"]),
        (1, 0, ["first", "worst"]),
        (1, 2, ["best"]),
    ]
    assert {row["step"] for row in kept} == {3}


def test_a_kept_sample_has_all_its_fields(tmp_path):
    (row,) = sample_records(1, [record(4, 2, loss_mask=[True, True, False])], [0.5], [-0.25])
    assert row == {
        "step": 1,
        "prompt_index": 4,
        "sample_index": 2,
        "picked": ["first", "best", "worst"],
        "reward": 0.5,
        "advantage": -0.25,
        "finish_reason": "stop",
        "response_len": 3,
        "logprob_mean": -1.5,
        "prompt": "prompt 4",
        "completion": "4",
    }
    run_dir = RunDirectory(tmp_path).create()
    run_dir.append_samples([row])
    assert list(run_dir.read_samples()) == [row]


def test_a_kept_sample_has_the_other_fields_of_its_data_row_as_short_texts():
    data = {"prompt": "p", "solutions": ["42"], "level": 3, "proof": "x" * 10**6, "picture": object(), "none": None}
    data |= {"nested": {"rows": [list(range(10**5))] * 3}}
    (row,) = sample_records(1, [record(4, 2, source_record=data)], [0.5])
    assert list(row["data"]) == ["solutions", "level", "proof", "nested"]
    assert (row["data"]["solutions"], row["data"]["level"]) == ("['42']", "3")
    assert "characters omitted" in row["data"]["proof"]
    assert max(map(len, row["data"].values())) <= 500
    (many,) = sample_records(1, [record(4, 2, source_record={f"field {index}": 1 for index in range(50)})], [0.5])
    assert list(many["data"]) == [f"field {index}" for index in range(8)]
    answers = EvalSamples()
    answers.add([record(4, 0, source_record=data), record(5, 0)], [1.0, 0.0])
    first, second = answers.records(3)
    assert first["data"] == row["data"]
    assert "data" not in second


def test_a_kept_sample_has_the_parts_of_its_reward():
    (row,) = sample_records(1, [record(4, 2)], [WeightedReward(1.1, {"format": 0.5, "answer": 1.0})])
    assert (row["reward"], row["reward_parts"]) == (1.1, {"format": 0.5, "answer": 1.0})
    assert json.loads(json.dumps(row)) == row


def test_the_number_of_kept_samples_is_bounded_per_step():
    records = [record(prompt, sample) for prompt in range(100) for sample in range(8)]
    kept = sample_records(0, records, [float(i % 8) for i in range(800)])
    assert len(kept) <= 24
    assert {row["prompt_index"] for row in kept} == set(range(8))


def test_long_texts_keep_their_head_and_their_tail():
    text = "start" + "x" * 50_000 + "end"
    (row,) = sample_records(0, [record(0, 0, completion=text)], [0.0])
    assert len(row["completion"]) <= MAX_CHARS
    assert row["completion"].startswith("start")
    assert row["completion"].endswith("end")
    assert "omitted" in row["completion"]


def test_an_empty_response_has_no_logprob_mean():
    (row,) = sample_records(0, [RewardRecord(prompt="p")], [0.0])
    assert row["logprob_mean"] is None
    assert row["response_len"] == 0


def test_unequal_numbers_of_samples_and_rewards_are_refused():
    with pytest.raises(ValueError, match="2 samples"):
        sample_records(0, [record(0, 0), record(0, 1)], [1.0])


@pytest.mark.parametrize(("value", "expected"), [(None, 0), ("", 0), ("0", 0), ("12", 12)])
def test_log_completions_variable_is_a_count(monkeypatch, value, expected):
    if value is None:
        monkeypatch.delenv("ARENO_LOG_COMPLETIONS", raising=False)
    else:
        monkeypatch.setenv("ARENO_LOG_COMPLETIONS", value)
    assert completions_to_log() == expected


@pytest.mark.parametrize("value", ["-1", "two", "1.5", "²"])
def test_a_bad_log_completions_variable_is_a_usage_error(monkeypatch, value):
    monkeypatch.setenv("ARENO_LOG_COMPLETIONS", value)
    with pytest.raises(UsageError, match="ARENO_LOG_COMPLETIONS"):
        completions_to_log()


def test_logged_completions_have_the_documented_fields_and_bounds(caplog):
    records = [record(0, 0, completion="one\x1b[2J\ntwo"), record(0, 1)]
    records[0].tokens = list(range(100))
    prompt_tokens = [list(range(200, 300)), [1]]
    with caplog.at_level(logging.INFO, logger="areno"):
        log_completions(
            logging.getLogger("areno.tests.samples"),
            records,
            prompt_tokens=prompt_tokens,
            decode=lambda tokens: f"<{len(tokens)} tokens>",
        )
    first, second = caplog.messages
    assert first == (
        "completion prompt_idx=0 sample_idx=0 prompt='prompt 0' decoded_prompt='<100 tokens>' "
        "completion='one\\x1b[2J\\ntwo' "
        f"prompt_tokens={list(range(200, 264))} response_tokens={list(range(64))}"
    )
    assert second.startswith("completion prompt_idx=0 sample_idx=1 ")
