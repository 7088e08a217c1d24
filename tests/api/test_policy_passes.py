"""The parts of a policy step: passes over the samples, advantages, the reference, reward models."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from areno.errors import EngineError, RewardError, UsageError
from areno.loss_fns.advantages import group_advantages
from areno.training.objectives.passes import merge_stats, plan_passes
from tests.support.loops import equal, open_loop, open_trainer, save_classifier, step, weights_of
from tests.support.tiny import save_tiny_checkpoint

# -- the plan ----------------------------------------------------------------------------------------------------------

GROUPS = [prompt for prompt in range(8) for _ in range(4)]


def plan(groups=GROUPS, passes=1, minibatches=1, seed=0, step=0):
    return plan_passes(groups, passes=passes, minibatches=minibatches, seed=seed, step=step)


def test_one_pass_with_one_minibatch_keeps_the_row_order():
    assert plan() == [list(range(32))]


def test_each_pass_sees_every_row_once_and_never_splits_the_rows_of_a_prompt():
    calls = plan(passes=3, minibatches=4)
    assert len(calls) == 12
    for first in (0, 4, 8):
        of_pass = calls[first : first + 4]
        assert sorted(row for call in of_pass for row in call) == list(range(32))
        assert [len(call) for call in of_pass] == [8, 8, 8, 8]
        for call in of_pass:
            assert [row % 4 for row in call] == [0, 1, 2, 3] * 2
            assert [GROUPS[row] for row in call[::4]] == [GROUPS[row] for row in call[3::4]]


def test_the_order_differs_between_passes_and_steps_and_is_fixed_by_the_seed():
    one = plan(passes=2, minibatches=2)
    assert one == plan(passes=2, minibatches=2)
    assert one[:2] != one[2:]
    assert one != plan(passes=2, minibatches=2, step=1)
    assert one != plan(passes=2, minibatches=2, seed=1)
    assert one[:2] == plan(passes=1, minibatches=2)


def test_minibatches_are_as_equal_as_whole_prompts_allow():
    sizes = {0: 1, 1: 1, 2: 1, 3: 1, 4: 4, 5: 4}
    groups = [prompt for prompt, size in sizes.items() for _ in range(size)]
    for seed in range(20):
        calls = plan(groups, minibatches=3, seed=seed)
        assert sorted(row for call in calls for row in call) == list(range(12))
        # A prompt of 4 rows that straddles a minibatch boundary moves it by at most half of its rows.
        assert abs(len(calls[0]) - 4) <= 2
        assert abs(len(calls[2]) - 4) <= 2
        assert {groups[row] for row in calls[0]}.isdisjoint({groups[row] for row in calls[1] + calls[2]})


def test_there_is_at_most_one_minibatch_per_prompt():
    calls = plan([5, 5, 7, 7, 7, 9], minibatches=8)
    assert sorted(map(sorted, calls)) == [[0, 1], [2, 3, 4], [5]]
    assert plan([3, 3, 3], minibatches=8) == [[0, 1, 2]]


def test_the_first_pass_keeps_the_order_of_already_shuffled_rows():
    def by_rows(passes):
        return plan_passes(range(10), passes=passes, minibatches=4, seed=0, step=0, order="rows")

    assert by_rows(1) == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]
    assert by_rows(2)[:4] == by_rows(1)
    assert sorted(row for call in by_rows(2)[4:] for row in call) == list(range(10))
    assert by_rows(2)[4:] != by_rows(1)


def test_statistics_of_several_calls_are_merged():
    first = {"loss": 1.0, "logp_diff_mean": 0.25, "step_rollout_time_s": 2.0, "clip_fraction": 0.0, "lr": 2e-3}
    second = {
        "loss": 4.0,
        "lr": 1e-3,
        "logp_diff_mean": 9.0,
        "step_rollout_time_s": 0.5,
        "clip_fraction": 0.5,
        "kl_loss": 3.0,
    }
    assert merge_stats([first, second]) == {
        "loss": 2.5,
        "logp_diff_mean": 0.25,
        "step_rollout_time_s": 2.5,
        "clip_fraction": 0.25,
        "lr": 1e-3,
        "kl_loss": 3.0,
    }
    assert merge_stats([second]) == second


# -- passes in a step --------------------------------------------------------------------------------------------------


def watch_calls(loop, name="train"):
    """Record arguments and results of a step's calls to the SDK; the calls still run."""
    calls, real = [], getattr(loop.instance, name)

    def recorded(*arguments, **keywords):
        stats = real(*arguments, **keywords)
        calls.append((arguments, keywords, dict(stats)))
        return stats

    setattr(loop.instance, name, recorded)
    return calls


@pytest.mark.parametrize("algo", ["gspo", "grpo"])
def test_passes_equal_explicit_train_calls(algo, tmp_path, tiny_checkpoint):
    with open_loop(algo, tiny_checkpoint, tmp_path, update_epochs=2, update_minibatches=2) as loop:
        calls = watch_calls(loop)
        outcome = step(loop)
        loss_fn, trained = loop.loss_fn, weights_of(loop.instance)
    batches = [arguments[0] for arguments, _, _ in calls]
    assert [len(batch) for batch in batches] == [6, 6, 6, 6]
    for half in (batches[:2], batches[2:]):
        assert sorted(id(row) for batch in half for row in batch) == sorted(map(id, outcome.rows))
    with open_trainer(tiny_checkpoint) as trainer:
        assert not equal(weights_of(trainer), trained)
        for batch in batches:
            trainer.train(batch, loss_fn, 64)
        assert equal(weights_of(trainer), trained)


def test_the_ratio_is_one_in_the_first_call_and_clipped_in_later_ones(tmp_path, tiny_checkpoint):
    with open_loop("grpo", tiny_checkpoint, tmp_path, update_epochs=3, grpo_clip_eps=0.01) as loop:
        calls = watch_calls(loop)
        stats = step(loop).stats
    per_call = [stats for _, _, stats in calls]
    assert abs(per_call[0]["ratio_mean"] - 1) < 1e-5
    assert per_call[0]["ratio_std"] < 1e-5
    assert per_call[0]["clip_fraction"] == 0
    assert all(later["clip_fraction"] > 0 and later["ratio_std"] > 1e-3 for later in per_call[1:])
    assert stats["clip_fraction"] == pytest.approx(sum(one["clip_fraction"] for one in per_call) / 3)
    assert stats["logp_abs_diff_mean"] == per_call[0]["logp_abs_diff_mean"] < 1e-5
    assert stats["step_train_time_s"] == pytest.approx(sum(one["step_train_time_s"] for one in per_call))
    assert stats["step_rollout_time_s"] > 0


@pytest.mark.parametrize(
    ("algo", "option", "values"),
    [
        ("grpo", "grpo_clip_eps", (0.02, 0.5)),
        ("gspo", "gspo_clip_eps", (1e-3, 0.5)),
        ("grpo", "clip_eps_high", (0.02, 0.5)),
        ("ppo", "clip_eps", (0.02, 0.5)),
    ],
)
def test_clip_options_change_the_weights_once_the_policy_has_moved(algo, option, values, tmp_path, tiny_checkpoint):
    extra = {"critic_warmup_steps": 0, "critic_lr": 1e-3} if algo == "ppo" else {}

    def trained(value, passes):
        folder = tmp_path / f"{value}-{passes}"
        with open_loop(algo, tiny_checkpoint, folder, update_epochs=passes, **extra, **{option: value}) as loop:
            step(loop)
            return weights_of(loop.instance)

    # With one pass the ratio is 1, and no clip range can matter.
    assert equal(*(trained(value, 1) for value in values))
    assert not equal(*(trained(value, 3) for value in values))


def test_more_minibatches_than_prompts_are_reported_once(tmp_path, tiny_checkpoint, caplog):
    logger = logging.getLogger("areno")
    logger.propagate, before = True, logger.propagate
    try:
        with (
            caplog.at_level(logging.INFO, logger="areno"),
            open_loop("grpo", tiny_checkpoint, tmp_path, batch_size=2, update_minibatches=5) as loop,
        ):
            calls = watch_calls(loop)
            step(loop)
            step(loop)
    finally:
        logger.propagate = before
    assert [len(arguments[0]) for arguments, _, _ in calls] == [3, 3, 3, 3]
    messages = [record.getMessage() for record in caplog.records if "--update-minibatches 5" in record.getMessage()]
    assert messages == [
        "--update-minibatches 5 is more than the 2 prompts of step 0, so each prompt becomes one minibatch"
    ]


def test_an_error_between_two_calls_of_a_step_saves_no_partially_trained_weights(tmp_path, tiny_checkpoint):
    with open_loop("grpo", tiny_checkpoint, tmp_path, update_epochs=2) as loop:
        step(loop)
        real = loop.train
        seen = []

        def fails_second(rows):
            seen.append(rows)
            if len(seen) == 2:
                raise EngineError("the device is gone")
            return real(rows)

        loop.train = fails_second
        with pytest.raises(EngineError, match="device is gone") as caught:
            step(loop)
        loop._rescue(caught.value)
        assert len(seen) == 2
        assert not list((tmp_path / "checkpoints").glob("step_*"))


# -- samples and advantages --------------------------------------------------------------------------------------------


def test_empty_responses_are_dropped_and_counted(tmp_path, tiny_checkpoint):
    with open_loop("grpo", tiny_checkpoint, tmp_path) as loop:
        rollout = loop._rollout

        def with_empty_ones(batch):
            samples = rollout(batch)
            for sample in (samples[1], samples[7]):
                sample.sequence.resp_tokens, sample.sequence.resp_logprobs, sample.rows = [], [], []
            return samples

        loop._rollout = with_empty_ones
        outcome = step(loop)
        assert outcome.stats["empty_responses"] == 2
        assert outcome.stats["reward_errors"] == 0
        assert [row.group for row in outcome.rows] == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]

        def all_empty(batch):
            samples = rollout(batch)
            for sample in samples:
                sample.sequence.resp_tokens, sample.sequence.resp_logprobs, sample.rows = [], [], []
            return samples

        loop._rollout = all_empty
        with pytest.raises(EngineError, match="none of the 12 responses has a token"):
            step(loop)


def test_the_chosen_estimator_computes_the_advantages(tmp_path, tiny_checkpoint):
    with open_loop("grpo", tiny_checkpoint, tmp_path, advantage="rloo") as loop:
        rows = step(loop).rows
    assert len(rows) == 12
    for row in rows:
        others = [other.reward for other in rows if other.group == row.group and other is not row]
        expected = row.reward - sum(others) / len(others)
        response = [value for value, prompt in zip(row.advantages, row.prompt_mask, strict=True) if not prompt]
        assert response == pytest.approx([expected] * len(response), abs=1e-9)
        assert not any(value for value, prompt in zip(row.advantages, row.prompt_mask, strict=True) if prompt)
    assert len({row.reward for row in rows}) > 3


def test_a_custom_estimator_gets_rewards_and_groups_of_the_whole_step(tmp_path, tiny_checkpoint):
    (tmp_path / "own.py").write_text(
        "def by_rank(rewards, groups):\n"
        "    assert groups == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]\n"
        "    ranked = sorted(rewards)\n"
        "    return (2 * ranked.index(r) for r in rewards)\n"
    )
    with open_loop("gspo", tiny_checkpoint, tmp_path, advantage=f"{tmp_path / 'own.py'}:by_rank") as loop:
        rows = step(loop).rows
    ranked = sorted(row.reward for row in rows)
    assert [row.advantages[-1] for row in rows] == [2 * ranked.index(row.reward) for row in rows]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return rewards[1:]", "returned 11 numbers for 12 rewards"),
        ("return [float('nan')] * len(rewards)", "returned nan for reward 0"),
        ("return rewards[0] / 0", r"ZeroDivisionError.*own.py line 2: return rewards\[0\] / 0"),
        ("return None", "TypeError"),
    ],
)
def test_errors_of_a_custom_estimator_name_the_option_and_the_remedy(body, message, tmp_path, tiny_checkpoint):
    (tmp_path / "own.py").write_text(f"def advantage_fn(rewards, groups):\n    {body}\n")
    with open_loop("grpo", tiny_checkpoint, tmp_path, advantage=str(tmp_path / "own.py")) as loop:
        before = weights_of(loop.instance)
        with pytest.raises(UsageError, match=message) as caught:
            step(loop)
        assert "--advantage" in str(caught.value)
        assert "return" in str(caught.value)
        assert equal(before, weights_of(loop.instance))


# -- the reference -----------------------------------------------------------------------------------------------------


def transformers_logprobs(checkpoint, row, temperature):
    """Log-prob of each token after the first, by plain ``transformers``."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    ids = torch.tensor([row.tokens])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("algo", ["gspo", "grpo", "ppo"])
def test_reference_log_probs_are_of_the_initial_policy_at_the_sampling_temperature(algo, tmp_path, tiny_checkpoint):
    extra = {"critic_warmup_steps": 0, "kl_loss_coef": 0.5} if algo == "ppo" else {"kl_coef": 0.5}
    with open_loop(algo, tiny_checkpoint, tmp_path, temperature=0.6, **extra) as loop:
        first, second = step(loop), step(loop)
    for row in (*first.rows[:3], *second.rows[:3]):
        assert row.temperature == 0.6
        expected = transformers_logprobs(tiny_checkpoint, row, 0.6)
        assert torch.allclose(torch.tensor(row.ref_logprobs[1:]).double(), expected, atol=1e-4)
    # Before the first update the policy equals the reference; after it only the policy has moved.
    assert abs(first.stats["kl_loss"]) < 1e-8
    assert second.stats["kl_loss"] > 1e-4
    assert first.stats["ref_logprob_forward_time_s"] > 0
    scored = [v for r in second.rows for v, p in zip(r.ref_logprobs, r.prompt_mask, strict=True) if not p]
    assert second.stats["ref_logprob_mean"] == pytest.approx(sum(scored) / len(scored))
    assert second.stats["ref_logprob_min"] == min(scored)


def test_a_separate_reference_is_used_for_the_kl_terms(tmp_path, tiny_checkpoint):
    other = save_tiny_checkpoint(tmp_path / "other", seed=9, sharpen=2.0)
    weight = {"kl_coef": 0.1, "kl_reward_coef": 0.5, "kl_reward_type": "k2"}
    with open_loop("grpo", tiny_checkpoint, tmp_path / "run", ref_ckpt=str(other), **weight) as loop:
        outcome = step(loop)
    for row in outcome.rows[:3]:
        expected = transformers_logprobs(other, row, 1.0)
        assert torch.allclose(torch.tensor(row.ref_logprobs[1:]).double(), expected, atol=1e-4)
    assert outcome.stats["kl_loss"] > 0.01
    # A token's reward includes its own KL penalty; its advantage sums those from this token to the end of the answer.
    plain = group_advantages([row.reward for row in outcome.rows], [row.group for row in outcome.rows])
    paid = []
    for row, wanted in zip(outcome.rows, plain, strict=True):
        gaps = zip(row.logprobs, row.ref_logprobs, row.prompt_mask, strict=True)
        kl = [-0.5 * (0.5 * (x - y) ** 2) for x, y, prompt in gaps if not prompt]
        advantages = [a for a, prompt in zip(row.advantages, row.prompt_mask, strict=True) if not prompt]
        assert advantages == pytest.approx([wanted + sum(kl[place:]) for place in range(len(kl))], abs=1e-6)
        paid.append(sum(kl))
    assert outcome.stats["kl_reward_min"] == pytest.approx(min(paid))
    assert outcome.stats["kl_reward_mean"] < -0.001


def test_without_a_kl_term_no_reference_is_loaded(tmp_path, tiny_checkpoint):
    with open_loop("grpo", tiny_checkpoint, tmp_path) as loop:
        outcome = step(loop)
        assert "ref" not in loop.instance.backend.roles
    assert not any(row.ref_logprobs for row in outcome.rows)
    assert not any(name.startswith(("ref_", "kl_")) for name in outcome.stats)


# -- reward models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["gspo", "ppo"])
def test_a_reward_model_scores_prompt_and_response(algo, tmp_path, tiny_checkpoint):
    judge = save_classifier(tmp_path / "judge", tiny_checkpoint)
    options = {"reward_ckpt": str(judge), "score_micro_bs": 5}
    with open_loop(algo, tiny_checkpoint, tmp_path / "run", reward=None, **options) as loop:
        outcome = step(loop)
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float64).eval()
    for row in outcome.rows:
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([row.tokens])).logits.item()
        assert row.reward == pytest.approx(expected, abs=1e-4)
    rewards = [row.reward for row in outcome.rows]
    assert outcome.rewards == rewards
    assert len(set(rewards)) > 6
    stats = outcome.stats
    assert stats["reward_model_raw_reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert stats["reward_model_raw_reward_max"] == max(rewards)
    assert stats["reward_score_time_s"] > 0


def test_non_finite_scores_of_a_reward_model_are_an_error(tmp_path, tiny_checkpoint):
    judge = save_classifier(tmp_path / "judge", tiny_checkpoint, head=math.inf)
    with open_loop("grpo", tiny_checkpoint, tmp_path / "run", reward=None, reward_ckpt=str(judge)) as loop:
        before = weights_of(loop.instance)
        with pytest.raises(
            RewardError, match=r"judge gave the non-finite score (inf|-inf|nan) to the completion .*--dtype float32"
        ):
            step(loop)
        assert equal(before, weights_of(loop.instance))
