"""Reward shaping and advantages against formulas over Python floats, on rows with gaps, groups and truncated answers."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areno.loss_fns import Norm, RewardShaping, shape_advantages
from areno.loss_fns.shaping import row_counts, select_by_second_moment, summaries, untruncated, version_statistics
from areno.types import TrainSequence
from tests.loss_fns.packs import QUICK
from tests.loss_fns.test_norm import normalized
from tests.support.examples import examples

EXACT = {"rel": 1e-6, "abs": 1e-9}
log_probs = st.floats(-6, 0)


@st.composite
def row_lists(draw):
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 7))
        numbers = st.lists(log_probs, min_size=length, max_size=length)
        rows.append(
            TrainSequence(
                prompt_mask=draw(st.lists(st.booleans(), min_size=length, max_size=length)),
                tokens=list(range(1, length + 1)),
                logprobs=draw(numbers),
                ref_logprobs=draw(numbers),
                prox_logprobs=draw(numbers),
                reward=draw(st.sampled_from([-3.0, 0.0, 0.5, 1.0])),
                group=draw(st.sampled_from([0, 3, 9])),
                truncated=draw(st.booleans()),
            )
        )
    return rows


@st.composite
def shapings(draw):
    norms = st.none() | st.sampled_from([Norm(), Norm("group", std_level="batch"), Norm("group", True, None)])
    return RewardShaping(
        reward_bias=draw(st.sampled_from([0.0, -0.5])),
        reward_scaling=draw(st.sampled_from([1.0, 10.0])),
        reward_clip=draw(st.sampled_from([20.0, 4.0])),
        overlong_reward_penalty=draw(st.booleans()),
        overlong_tokens=4,
        overlong_penalty_factor=1.5,
        max_new_tokens=6,
        mask_no_eos_with_zero=draw(st.booleans()),
        reward_norm=draw(norms),
        kl_ctl=draw(st.sampled_from([0.0, 0.3])),
        kl_estimator=draw(st.sampled_from(["k1", "k2", "k3"])),
        discount=draw(st.sampled_from([1.0, 0.9])),
        gae_lambda=draw(st.sampled_from([1.0, 0.8])),
        adv_norm=draw(norms),
    )


def trained(row):
    return [i for i, prompt in enumerate(row.prompt_mask) if not prompt and i > 0]


def kl_of(kind, old, reference):
    d = old - reference
    value = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]
    return min(max(value, -10.0), 10.0)


def rewards_of(rows, s):
    shaped = []
    for row in rows:
        reward = row.reward
        if s.overlong_reward_penalty:
            over = len(trained(row)) - (s.max_new_tokens - s.overlong_tokens)
            reward += min(-over / s.overlong_tokens * s.overlong_penalty_factor, 0)
        shaped.append(min(max((reward + s.reward_bias) * s.reward_scaling, -s.reward_clip), s.reward_clip))
    if s.reward_norm is None:
        return shaped
    return normalized(s.reward_norm, shaped, [row.group for row in rows], [True] * len(rows))


def written_out(rows, s, values):
    """Normalized advantages and returns of each row at its trained tokens, and its final reward and KL reward."""
    advantages, returns, finals, kls = [], [], [], []
    for row, reward, after in zip(rows, rewards_of(rows, s), values or [None] * len(rows), strict=True):
        places = trained(row)
        kl = [-s.kl_ctl * kl_of(s.kl_estimator, row.logprobs[i], row.ref_logprobs[i]) for i in places]
        r = list(kl)
        if places and not (s.mask_no_eos_with_zero and row.truncated):
            r[-1] += reward
        v = [after[i - 1] if after else 0.0 for i in places]
        bootstrap = after[places[-1]] if after and places and row.truncated else 0.0
        following = [*v[1:], bootstrap]
        deltas = [r[t] + s.discount * following[t] - v[t] for t in range(len(places))]
        decay = s.discount * s.gae_lambda
        # The sum form of the recursion: A_t = sum over k >= t of (gamma lambda)^(k - t) delta_k.
        a = [sum(decay ** (k - t) * deltas[k] for k in range(t, len(places))) for t in range(len(places))]
        advantages.append(a)
        returns.append([x + y for x, y in zip(a, v, strict=True)])
        finals.append(sum(r))
        kls.append(sum(kl))
    out = [s.mask_no_eos_with_zero and row.truncated for row in rows]
    if s.adv_norm is not None:
        flat = [x for a in advantages for x in a]
        groups = [row.group for row, a in zip(rows, advantages, strict=True) for _ in a]
        mask = [not gone for gone, a in zip(out, advantages, strict=True) for _ in a]
        numbers = iter(normalized(s.adv_norm, flat, groups, mask))
        advantages = [[next(numbers) for _ in a] for a in advantages]
    advantages = [[0.0] * len(a) if gone else a for a, gone in zip(advantages, out, strict=True)]
    return advantages, returns, finals, kls


@settings(QUICK, max_examples=examples(200))
@given(rows=row_lists(), shaping=shapings(), critic=st.booleans(), seed=st.integers(0, 1000))
def test_advantages_and_returns_equal_their_formulas(rows, shaping, critic, seed):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(len(row.tokens), generator=generator).tolist() for row in rows] if critic else None
    advantages, returns, finals, kls = written_out(rows, shaping, values)
    populations = shape_advantages(rows, shaping, values)
    for row, expected_a, expected_r in zip(rows, advantages, returns, strict=True):
        places = trained(row)
        assert [row.advantages[i] for i in places] == pytest.approx(expected_a, **EXACT)
        assert [row.returns[i] for i in places] == pytest.approx(expected_r, **EXACT)
        assert not any(row.advantages[i] or row.returns[i] for i in range(len(row.tokens)) if i not in places)
    assert populations["final_reward"].tolist() == pytest.approx(finals, **EXACT)
    assert populations["kl_rewards"].tolist() == pytest.approx(kls, **EXACT)
    assert populations["advantages"].tolist() == pytest.approx([x for a in advantages for x in a], **EXACT)
    if critic:
        kept = [[row.values[i] for i in trained(row)] for row in rows]
        assert kept == [[v[i - 1] for i in trained(row)] for row, v in zip(rows, values, strict=True)]
    else:
        assert [row.values for row in rows] == [[] for _ in rows]


def answer(reward, tokens=3, group=0, truncated=False, **lists):
    return TrainSequence(
        [True] + [False] * tokens, [1] * (tokens + 1), reward=reward, group=group, truncated=truncated, **lists
    )


def test_by_default_the_advantage_of_every_token_is_the_reward_of_its_answer():
    rows = [answer(1.0), answer(-2.0, tokens=1)]
    shape_advantages(rows, RewardShaping())
    assert [row.advantages for row in rows] == [[0.0, 1.0, 1.0, 1.0], [0.0, -2.0]]


def test_tool_output_between_two_turns_adds_no_discount_to_the_first():
    plain = TrainSequence([True, False, False], [1] * 3, reward=1.0)
    tool = TrainSequence([True, False, True, True, True, False], [1] * 6, reward=1.0)
    shape_advantages([plain, tool], RewardShaping(discount=0.5))
    assert [plain.advantages[i] for i in (1, 2)] == [tool.advantages[i] for i in (1, 5)] == [0.5, 1.0]


def test_a_reward_reaches_the_tokens_even_if_the_row_ends_in_context():
    row = TrainSequence([True, False, False, True], [1] * 4, reward=1.0)
    shape_advantages([row], RewardShaping())
    assert row.advantages == [0.0, 1.0, 1.0, 0.0]


# -- defects of other implementations -------------------------------------------------------------------------------


def test_the_longest_answer_of_a_batch_is_not_mistaken_for_a_truncated_one():
    rows = [answer(1.0, tokens=9), answer(1.0, tokens=2, truncated=True)]
    populations = shape_advantages(rows, RewardShaping(mask_no_eos_with_zero=True))
    assert populations["no_eos_ratios"].tolist() == [0.0, 1.0]
    assert rows[0].advantages == [0.0] + [1.0] * 9
    assert rows[1].advantages == [0.0] * 3
    assert untruncated(rows) == rows[:1]


def test_only_a_truncated_answer_bootstraps_from_the_value_after_its_last_token():
    rows = [answer(1.0, tokens=9), answer(1.0, tokens=2, truncated=True)]
    shape_advantages(rows, RewardShaping(), [[0.0] * 9 + [5.0], [0.0, 0.0, 5.0]])
    assert rows[0].returns[-1] == 1.0
    assert rows[1].returns[-1] == 6.0


def test_a_masked_truncated_answer_does_not_affect_the_normalization_of_the_others():
    shaping = RewardShaping(mask_no_eos_with_zero=True, adv_norm=Norm())
    alone, mixed = [answer(1.0), answer(0.0)], [answer(1.0), answer(9.0, truncated=True), answer(0.0)]
    shape_advantages(alone, shaping)
    shape_advantages(mixed, shaping)
    assert [row.advantages for row in mixed] == [alone[0].advantages, [0.0] * 4, alone[1].advantages]


def test_a_kl_reward_without_a_reference_is_refused_instead_of_rewarding_unlikely_tokens():
    row = answer(1.0, logprobs=[0.0, -6.0, -6.0, -6.0])
    with pytest.raises(ValueError, match=r"kl_ctl=0\.1 .*configure a reference model \(ref\), or set kl_ctl=0"):
        shape_advantages([row], RewardShaping(kl_ctl=0.1))
    shape_advantages([row], RewardShaping())
    assert row.advantages == [0.0, 1.0, 1.0, 1.0]


@settings(QUICK, max_examples=examples(20))
@given(rows=row_lists(), order=st.randoms(use_true_random=False))
def test_groups_are_normalized_separately_even_if_shuffled_or_missing_answers(rows, order):
    shaping = RewardShaping(reward_norm=Norm("group", std_level="group"))
    shape_advantages(rows, shaping)
    before = {id(row): row.advantages for row in rows}
    order.shuffle(rows)
    shape_advantages(rows, shaping)
    for row in rows:
        assert row.advantages == pytest.approx(before[id(row)], rel=1e-9, abs=1e-9)
    for group in {row.group for row in rows}:  # each is normalized as it is alone
        alone = [copy.copy(row) for row in rows if row.group == group]
        shape_advantages(alone, shaping)
        for row, other in zip([row for row in rows if row.group == group], alone, strict=True):
            assert row.advantages == pytest.approx(other.advantages, rel=1e-9, abs=1e-9)


# -- statistics ------------------------------------------------------------------------------------------------------


def test_populations_are_summarized_under_their_documented_names():
    rows = [answer(1.0, tokens=2), answer(0.0, tokens=4), answer(-1.0, tokens=3, truncated=True)]
    stats = summaries(shape_advantages(rows, RewardShaping(reward_scaling=10.0)))
    assert (stats["task_reward/avg"], stats["task_reward/min"], stats["task_reward/max"]) == (0.0, -1.0, 1.0)
    assert stats["final_reward/max"] == 10.0
    assert stats["advantages/avg"] == pytest.approx((2 * 10 - 3 * 10) / 9)
    assert stats["no_eos_ratios/avg"] == pytest.approx(1 / 3)
    assert (stats["prompt_len/avg"], stats["seq_len/max"]) == (1.0, 5.0)
    assert (stats["correct_seq_len/avg"], stats["incorrect_seq_len/avg"]) == (3.0, 4.5)
    assert row_counts(rows) == {
        "n_seqs": 3.0,
        "correct_n_seqs": 1.0,
        "incorrect_n_seqs": 2.0,
        "n_tokens": 12.0,
        "n_valid_tokens": 9.0,
    }
    assert not any(name.startswith("correct") for name in summaries(shape_advantages(rows[1:], RewardShaping())))


def test_staleness_is_measured_in_versions_over_trained_tokens():
    rows = [answer(1.0, tokens=3, versions=[-1, 3, 4, 5]), answer(1.0, tokens=1, versions=[-1, 5])]
    stats = version_statistics(rows, version=6)
    assert {name.removeprefix("version_stats/"): value for name, value in stats.items()} == {
        "v_theta": 6.0,
        "v_proximal": 5.0,
        "n_valid_generated_tokens": 4.0,
        "sample_staleness_proximal_avg": 0.75,
        "sample_staleness_proximal_max": 2.0,
        "sample_staleness_proximal_min": 0.0,
        "sample_staleness_theta_avg": 1.75,
        "sample_staleness_theta_max": 3.0,
        "sample_staleness_theta_min": 1.0,
    }
    with pytest.raises(ValueError, match="row 1 has none"):
        version_statistics([rows[0], answer(1.0)], version=6)


@QUICK
@given(rows=row_lists())
def test_m2po_selects_tokens_over_the_whole_batch_and_stores_the_choice_in_the_rows(rows):
    share = select_by_second_moment(rows, 0.5)
    tokens = [(row, i) for row in rows for i in trained(row)]
    kept = [(row.logprobs[i] - row.prox_logprobs[i]) ** 2 for row, i in tokens if row.keep[i]]
    gone = [(row.logprobs[i] - row.prox_logprobs[i]) ** 2 for row, i in tokens if not row.keep[i]]
    assert share == pytest.approx(len(gone) / max(len(tokens), 1))
    assert not any(row.keep[i] for row in rows for i in range(len(row.tokens)) if i not in trained(row))
    if kept and gone:
        assert max(kept) <= min(gone)
        assert len(kept) == 1 or sum(kept) / len(kept) < 0.5
        assert (sum(kept) + min(gone)) / (len(kept) + 1) >= 0.5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reward_clip": 0.0}, "reward_clip must be above 0"),
        ({"kl_ctl": -0.1}, "kl_ctl must not be negative"),
        ({"kl_estimator": "k4"}, "kl_estimator must be k1, k2 or k3"),
        ({"discount": 1.5}, "discount must be between 0 and 1"),
        ({"gae_lambda": -1.0}, "gae_lambda must be between 0 and 1"),
        ({"overlong_reward_penalty": True}, "needs overlong_tokens of at least 1, got None"),
        ({"overlong_reward_penalty": True, "overlong_tokens": 4}, "needs overlong_penalty_factor of at least 0"),
    ],
)
def test_errors_name_bad_settings(options, text):
    with pytest.raises(ValueError, match=text):
        RewardShaping(**options)


def test_bad_batches_are_refused():
    with pytest.raises(ValueError, match="at least one row"):
        shape_advantages([], RewardShaping())
    with pytest.raises(ValueError, match="each of the 1 rows, got values for 0 rows"):
        shape_advantages([answer(1.0)], RewardShaping(), [])
    with pytest.raises(ValueError, match="set both in row 0"):
        select_by_second_moment([answer(1.0)], 0.04)


def test_settings_can_be_pickled():
    shaping = RewardShaping(reward_norm=Norm("group"), kl_ctl=0.1)
    assert pickle.loads(pickle.dumps(shaping)) == shaping
