"""Health warnings: each cause is reported once per episode, and healthy runs get no warnings."""

import json
import math

import pytest

from areno.observability.health import (
    LOGPROB_GAP_LIMIT,
    LOGPROB_GAP_LIMIT_FP32,
    PARTS_WINDOW,
    HealthMonitor,
    unusable,
)
from areno.observability.metric_advice import advice_for
from areno.types import WeightedReward

HEALTHY = {"loss": -0.01, "grad_norm": 0.5, "response_len": 40.0, "logp_abs_diff_mean": 1e-6, "reward_errors": 0}
REWARDS, GROUPS = [0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1]


def observe(monitor, step, rewards=REWARDS, truncated=(False, True), **stats):
    return monitor.observe(step, HEALTHY | stats, rewards, GROUPS[: len(rewards)], truncated)


def test_a_healthy_run_gets_no_warnings():
    monitor = HealthMonitor()
    assert [observe(monitor, step) for step in range(20)] == [[]] * 20


def test_equal_rewards_for_several_steps_warn_once_with_reason_and_remedy():
    monitor = HealthMonitor(window=3)
    warnings = [observe(monitor, step, rewards=[0.0] * 4) for step in range(10)]
    assert [len(texts) for texts in warnings] == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    text = warnings[2][0]
    assert text.startswith("step 2: all rewards are 0 for 3 steps")
    assert "nothing can be learned" in text
    assert "--n-samples" in text


def test_rewards_that_are_equal_within_each_group_warn_too():
    monitor = HealthMonitor(window=2)
    observe(monitor, 0, rewards=[0.0, 0.0, 1.0, 1.0])
    (text,) = observe(monitor, 1, rewards=[1.0, 1.0, 0.0, 0.0])
    assert "equal within every prompt's group" in text


def test_one_sample_per_prompt_compares_across_the_batch():
    monitor = HealthMonitor(window=1)
    assert monitor.observe(0, {}, [0.0, 1.0], [0, 1]) == []
    assert "all rewards are 1" in monitor.observe(1, {}, [1.0, 1.0], [0, 1])[0]


def test_an_interrupted_streak_gives_no_warning():
    monitor = HealthMonitor(window=3)
    pattern = [[0.0] * 4, [0.0] * 4, REWARDS] * 5
    assert not any(observe(monitor, step, rewards=rewards) for step, rewards in enumerate(pattern))


def test_a_new_episode_warns_again_and_a_flicker_does_not():
    monitor = HealthMonitor(window=3)
    truncated = [True, False, True, False, False, False, True]
    counts = [len(observe(monitor, i, truncated=(cut, cut))) for i, cut in enumerate(truncated)]
    assert counts == [1, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ({"grad_norm": 0.0}, "the gradient is exactly zero"),
        ({"loss": math.nan}, "loss is nan"),
        ({"grad_norm": math.inf}, "grad_norm is inf"),
        ({"response_len": 1.0}, "responses have collapsed to 1.0 tokens"),
        ({"logp_abs_diff_mean": 0.06}, "train log-prob| is 0.06, above 0.05"),
        ({"reward_errors": 3}, "the reward function failed on 3 samples"),
    ],
)
def test_each_cause_is_reported_at_its_first_step_and_not_again(stats, expected):
    monitor = HealthMonitor()
    (text,) = observe(monitor, 4, **stats)
    assert text.startswith("step 4: ")
    assert expected in text
    assert observe(monitor, 5, **stats) == []


def test_an_overflow_that_a_loss_scale_handles_is_normal():
    overflow = {"grad_norm": math.inf, "update_skipped": 1.0, "loss_scale": 2.0**16}
    assert observe(HealthMonitor(), 0, **overflow) == []
    assert not unusable(HEALTHY | overflow)
    assert unusable(HEALTHY | overflow | {"loss": math.nan})
    assert len(observe(HealthMonitor(), 0, **overflow | {"loss": math.nan})) == 1


def test_a_warning_that_every_response_is_truncated_names_the_option():
    (text,) = observe(HealthMonitor(), 0, truncated=(True, True))
    assert "all 2 responses were truncated" in text
    assert "--max-new-tokens" in text


def test_a_zero_gradient_from_equal_rewards_gives_only_one_warning():
    monitor = HealthMonitor(window=1)
    (text,) = observe(monitor, 0, rewards=[0.0] * 4, grad_norm=0.0, loss=0.0)
    assert "nothing can be learned" in text


def test_the_gap_limit_is_tighter_in_fp32():
    assert observe(HealthMonitor(), 0, logp_abs_diff_mean=2e-3) == []
    (text,) = observe(HealthMonitor(logprob_gap_limit=LOGPROB_GAP_LIMIT_FP32), 0, logp_abs_diff_mean=2e-3)
    assert "above 0.001" in text


@pytest.mark.parametrize(
    ("limit", "remedy"), [(LOGPROB_GAP_LIMIT, "--dtype float32"), (LOGPROB_GAP_LIMIT_FP32, "same weights")]
)
def test_the_remedies_for_a_gap_can_change_the_first_optimizer_step(limit, remedy):
    """The gap is measured before the weights change, so the number of later optimizer steps does not matter."""
    (text,) = observe(HealthMonitor(logprob_gap_limit=limit), 0, logp_abs_diff_mean=0.2)
    assert remedy in text
    assert "--return-routed-experts" in text
    assert "optimizer step" not in text + advice_for("train/logp_abs_diff_mean").remedy


def test_a_loss_near_zero_is_explained_once_in_a_run():
    monitor = HealthMonitor()
    stats = {"loss": 1e-9, "grad_norm": 0.5}
    assert "which is normal" in monitor.explain(3, stats, [0.0, 1.0])
    assert [monitor.explain(step, stats, [0.0, 1.0]) for step in range(4, 50)] == [""] * 46
    resumed = HealthMonitor()
    resumed.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    assert resumed.explain(51, stats, [0.0, 1.0]) == ""


@pytest.mark.parametrize(
    ("stats", "rewards"),
    [
        ({"loss": 0.5, "grad_norm": 0.5}, [0.0]),
        ({"loss": 0.0, "grad_norm": 0.0}, [0.0]),
        ({"loss": 0.0, "grad_norm": 1.0}, []),
    ],
)
def test_only_a_vanishing_policy_loss_with_a_gradient_is_explained(stats, rewards):
    assert HealthMonitor().explain(0, stats, rewards) == ""


def test_supervised_steps_are_checked_by_the_statistics_they_have():
    monitor = HealthMonitor()
    assert monitor.observe(0, {"loss": 0.0, "grad_norm": 0.5}) == []
    assert "gradient is exactly zero" in monitor.observe(1, {"loss": 0.3, "grad_norm": 0.0})[0]


def test_a_resumed_monitor_warns_like_an_uninterrupted_one():
    script = [{"rewards": [0.0] * 4, "loss": 0.0, "truncated": (step % 3 == 0,) * 2} for step in range(12)]
    whole = HealthMonitor()
    expected = [observe(whole, step, **kwargs) for step, kwargs in enumerate(script)]
    for cut in range(12):
        first, second = HealthMonitor(), HealthMonitor()
        texts = [observe(first, step, **script[step]) for step in range(cut)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        texts += [observe(second, step, **script[step]) for step in range(cut, 12)]
        assert texts == expected
        assert second.state_dict() == whole.state_dict()


def test_rewards_without_groups_are_refused():
    with pytest.raises(ValueError, match="must have the same length, got 2 and 0"):
        HealthMonitor().observe(0, {}, [0.0, 1.0])


def test_a_window_below_one_is_refused():
    with pytest.raises(ValueError, match="window"):
        HealthMonitor(window=0)


def test_the_warning_names_the_limit_that_truncated_the_responses():
    monitor = HealthMonitor(max_new_tokens=64)
    for length, option in ((64.0, "Raise --max-new-tokens."), (40.5, "Raise --max-context-len (")):
        [text] = monitor.observe(0, {"response_len": length}, [0.0, 1.0], [0, 0], [True, True])
        assert option in text
        monitor = HealthMonitor(max_new_tokens=64)


def test_a_loss_near_zero_is_not_attributed_to_groups_if_there_are_none():
    assert HealthMonitor(grouped=False).explain(3, {"loss": 1e-9, "grad_norm": 0.5}, [0.0, 1.0]) == ""


def in_parts(**parts):
    """Two samples for each of two prompts: the means of their parts are ``parts``, and no rewards of a prompt tie."""
    spread = [{name: mean + shift for name, mean in parts.items()} for shift in (-0.1, 0.1, -0.1, 0.1)]
    return [WeightedReward(sum(each.values()), each) for each in spread]


def follow(monitor, script, first=0):
    return [
        text for step, parts in enumerate(script, first) for text in observe(monitor, step, rewards=in_parts(**parts))
    ]


HACKED = [{"length": 0.1 * step, "answer": 0.8 - 0.02 * step, "format": 1.0} for step in range(30)]


def test_parts_that_move_against_each_other_while_the_reward_rises_are_reported_once():
    (text,) = follow(HealthMonitor(), HACKED)
    assert text.startswith(f"step {PARTS_WINDOW - 1}: ")
    # The means of ten steps each, by hand: 0.1 (0 + ... + 9) / 10 = 0.45, 0.8 - 0.02 * 4.5 = 0.71.
    assert (
        "`length` rose from 0.45 to 1.45, and the mean of `answer` fell from 0.71 to 0.51 (correlation -1.00)" in text
    )
    assert "--reward-weights length=..." in text
    experiment = HealthMonitor(settings={"--reward-weights": "reward.weights"})
    assert "lower the weight of `length` (reward.weights length=...)" in follow(experiment, HACKED)[0]


@pytest.mark.parametrize(
    "script",
    [
        [{"a": 0.1 * step, "b": 0.02 * step} for step in range(30)],  # both rise
        [{"a": 0.02 * step, "b": 1 - 0.1 * step} for step in range(30)],  # the reward falls
        [{"a": 0.1 * step, "b": 0.5} for step in range(30)],  # one stays constant
        [{"a": 0.1 * step, "b": 0.5 + 0.1 * (-1) ** step - 1e-3 * step} for step in range(30)],  # noise
        HACKED[: PARTS_WINDOW - 1],  # too early to tell
    ],
)
def test_other_movements_of_parts_are_not_reported(script):
    assert follow(HealthMonitor(), script) == []


def test_a_resumed_monitor_remembers_the_parts():
    for cut in (1, 12, PARTS_WINDOW, 25):
        first, second = HealthMonitor(), HealthMonitor()
        texts = follow(first, HACKED[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert len(texts + follow(second, HACKED[cut:], cut)) == 1
    old = HealthMonitor()
    old.load_state_dict({"episodes": {}, "loss_explained": False})  # from a checkpoint of an older version
    assert len(follow(old, HACKED)) == 1


def through(monitor, first, then, truncated=False, steps=12):
    """The warnings of a run with the rewards ``first`` for five steps, and ``then`` afterwards."""
    return [
        text
        for step in range(steps)
        for text in observe(
            monitor, step, rewards=first if step < 5 else then, truncated=(truncated and step >= 5,) * 2
        )
    ]


def test_equal_rewards_are_explained_by_earlier_rewards():
    lost = " ".join(through(HealthMonitor(), REWARDS, [0.0] * 4))
    assert "the policy has collapsed. Start again with a lower --lr" in lost
    assert "solved" not in lost
    assert "the task is solved" in " ".join(through(HealthMonitor(), REWARDS, [1.0] * 4))
    cut = HealthMonitor()
    never = " ".join(through(HealthMonitor(), [0.0] * 4, [0.0] * 4))
    assert "Test the reward function on a correct answer" in never
    assert "solved" not in never
    _, unfinished = (text for step in range(9) for text in observe(cut, step, rewards=[0.0] * 4, truncated=(True,) * 2))
    assert "All responses are truncated, and truncation may be why their rewards are equal" in unfinished


def test_a_higher_limit_is_not_suggested_if_the_reward_rose_or_fell():
    better, worse = [2.0, 3.0, 2.0, 3.0], [0.0, 0.1, 0.0, 0.1]
    (risen,) = through(HealthMonitor(), REWARDS, better, truncated=True)
    assert "the reward may simply grow with length or repetition" in risen
    (fallen,) = through(HealthMonitor(), REWARDS, worse, truncated=True)
    assert "a lower --lr" in fallen
    assert "--max-new-tokens" not in risen + fallen
    (same,) = through(HealthMonitor(), REWARDS, REWARDS, truncated=True)
    assert "Raise --max-new-tokens" in same


def test_after_opposed_parts_no_warning_claims_a_solved_task_or_suggests_a_higher_limit():
    whole, resumed = HealthMonitor(), HealthMonitor()
    assert len(follow(whole, HACKED)) == 1
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for monitor in (whole, resumed):
        (text,) = [
            text
            for step in range(30, 40)
            for text in observe(
                monitor, step, rewards=[WeightedReward(9.0, {"length": 9.0})] * 4, truncated=(True, True)
            )
        ]
        assert "The policy may be exploiting the reward instead of solving the task" in text
        assert "opposite directions" in text
