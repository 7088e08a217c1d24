"""Rewards in named parts: weighted sums, what is refused, and parts normalized within a prompt's samples."""

import math
import pickle
import statistics

import pytest

from areno.config.reward_weights import part_weights
from areno.errors import RewardError, UsageError
from areno.loss_fns.advantages import normalized_parts
from areno.loss_fns.shaping import RewardShaping
from areno.rewards import RewardRunner
from areno.rewards.worker import as_reward, parse_message
from areno.types import RewardParts, WeightedReward, part_columns, parts_of

PARTS = """
    def reward_fn(record):
        return eval(record.completion)
"""
ASYNC = """
    async def reward_fn(record):
        return eval(record.completion)
"""


def outcomes_of(path, records, weights="", on_error="drop"):
    weighted = RewardParts(weights or None)
    with RewardRunner(path=path, timeout_s=10, workers=1, on_error=on_error, parts=weighted) as runner:
        return runner.run(records)


@pytest.mark.parametrize("source", [PARTS, ASYNC], ids=["function", "coroutine"])
def test_the_reward_is_the_weighted_sum_of_its_parts(reward_file, records, source):
    texts = ["{'format': True, 'answer': 0.5}", "{'answer': 1, 'format': 0}"]
    outcomes = outcomes_of(reward_file(source), records(*texts), "format=0.2")
    assert [outcome.value for outcome in outcomes] == [0.2 * 1 + 1 * 0.5, 0.2 * 0 + 1 * 1]
    assert [dict(parts_of(outcome.value)) for outcome in outcomes] == [
        {"format": 1.0, "answer": 0.5},
        {"format": 0.0, "answer": 1.0},
    ]


@pytest.mark.parametrize(
    ("texts", "weights", "messages"),
    [
        (
            ["{'a': 1, 'b': 2}", "{'a': 1}"],
            "",
            [None, "returned a, but not b; return the same parts"],
        ),
        (["{'a': 1}", "2.0"], "", [None, "returned one number, but not a"]),
        (
            ["{'a': 1}"],
            "aa=2",
            ["but not aa; return the same parts for every record, including all parts in --reward-weights"],
        ),
        (["2.0"], "a=2", ["returned one number, but not a; return the same parts for every record"]),
        (["{'a': float('nan')}"], "", ["returned nan (float) as the part a; a reward must be a finite number"]),
        (["{'a': 'good'}"], "", ["returned 'good' (str) as the part a; a reward must be a finite number"]),
        (["{'a': {'b': 1}}"], "", ["(dict) as the part a; a reward must be a finite number"]),
        (["{'my part': 1}"], "", ["returned a dictionary with the keys ['my part']; return at least one key"]),
        (
            ["{'-a': 1}"],
            "",
            ["each key must start with a letter or `_` and contain only letters, digits, `_`, `.` and `-`"],
        ),
        (["{1: 1}"], "", ["returned a dictionary with the keys [1]; return at least one key"]),
        (["{}"], "", ["returned a dictionary with the keys []; return at least one key"]),
        (
            ["{'a': 1e308, 'b': 1e308}"],
            "",
            ["returned {'a': 1e+308, 'b': 1e+308}, and the weighted sum of these parts is inf"],
        ),
    ],
)
def test_invalid_parts_are_an_error_of_their_record(reward_file, records, texts, weights, messages):
    outcomes = outcomes_of(reward_file(PARTS), records(*texts), weights)
    for outcome, message in zip(outcomes, messages, strict=True):
        assert (outcome.value is None) == (message is not None)
        assert message is None or message in outcome.error


def test_a_missing_part_stops_the_run_and_names_the_record(reward_file, records):
    texts = ["{'a': 1}", "{'a': 1, 'b': 2}"]
    with pytest.raises(
        RewardError, match=r"failed on the answer with prompt_index 0, sample_index 0: returned a, but not b"
    ):
        outcomes_of(reward_file(PARTS), records(*texts), on_error="stop")


def test_shared_reward_parts_expect_the_same_names_in_every_reward():
    parts = RewardParts()
    assert parts.weigh({"a": 1.0, "b": 2.0}) == 3.0
    assert "returned a, but not b; return the same parts" in parts.problem(parts.weigh({"a": 1.0}))
    assert "returned one number, but not a, b; return the same parts" in parts.problem(parts.weigh(0.5))
    assert parts.problem(parts.weigh({"b": 1.0, "a": 2.0})) is None
    assert RewardParts().weigh(0.5) == 0.5
    with pytest.raises(UsageError, match=r"'a=-1\.0' is not a valid weight"):
        RewardParts({"a": -1.0})


@pytest.mark.parametrize(
    "body", [b'["parts", 0, {}, 0.1]', b'["parts", 0, {"a": "1"}, 0.1]', b'["parts", 0, {"a": NaN}, 0.1]']
)
def test_a_worker_cannot_report_invalid_parts(body):
    with pytest.raises(ValueError, match="has an unknown format"):
        parse_message(body)


def test_weights_are_read_from_text():
    assert part_weights("format=0.2, answer=1") == {"format": 0.2, "answer": 1.0}
    assert part_weights(None) == {}


@pytest.mark.parametrize(
    "text", ["", "format", "format=", "=1", "a=nan", "a=inf", "a=-1", "a=1,a=2", "1a=1", "a=1,,b=2"]
)
def test_invalid_weights_are_refused(text):
    with pytest.raises(UsageError, match=r"not a valid weight; .* as in format=0\.2,answer=1"):
        part_weights(text)


def test_a_weighted_reward_is_a_number_that_can_be_pickled():
    reward = WeightedReward(1.2, {"a": 1.0, "b": 0.2})
    copied = pickle.loads(pickle.dumps(reward))
    assert (copied, dict(copied.parts)) == (1.2, {"a": 1.0, "b": 0.2})
    assert dict(parts_of(reward * 0.5)) == {"a": 0.5, "b": 0.1}
    assert part_columns([reward, reward * 0.5]) == {"a": [1.0, 0.5], "b": [0.2, 0.1]}
    assert part_columns([reward, 1.0]) == part_columns([]) == {}
    assert as_reward(reward) == 1.2


def z_scores(values):
    """(x - mean) / population deviation; 0 where all are equal."""
    deviation = statistics.pstdev(values)
    return [(x - statistics.fmean(values)) / deviation if deviation else 0.0 for x in values]


def test_normalized_parts_are_z_scores_within_each_prompt_before_they_are_weighted():
    parts = {"format": [0, 1, 1, 1, 0, 0], "answer": [10, 20, 60, 5, 5, 5]}
    groups, weights = [0, 0, 0, 1, 1, 1], {"format": 0.2}
    rewards = [WeightedReward(f + a, {"format": f, "answer": a}) for f, a in zip(*parts.values(), strict=True)]
    expected = []
    for members in (slice(0, 3), slice(3, 6)):
        columns = [z_scores(parts["format"][members]), z_scores(parts["answer"][members])]
        expected += [0.2 * f + 1.0 * a for f, a in zip(*columns, strict=True)]
    assert normalized_parts(rewards, groups, weights) == pytest.approx(expected, rel=1e-6)
    shaped = RewardShaping(reward_clip=math.inf, part_weights=weights).rewards(rewards, [1] * 6, groups)
    assert shaped.tolist() == pytest.approx(expected, rel=1e-6)
    plain = RewardShaping(reward_clip=math.inf).rewards(rewards, [1] * 6, groups)
    assert plain.tolist() == [10, 21, 61, 6, 5, 5]


def test_a_reward_without_parts_cannot_be_normalized():
    with pytest.raises(RewardError, match=r"the reward has no parts to normalize; .*--reward-normalize-parts"):
        normalized_parts([1.0, 2.0], [0, 0], {})
