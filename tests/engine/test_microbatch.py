"""Packing rows into bins of tokens, and training on such bins: budgets hold, and results do not depend on them."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areno.engine.train.batch import pack_rows
from areno.engine.train.microbatch import MicroBatching
from areno.engine.train.step import _chunks
from areno.loss_fns import Count, PolicyLossConfig, Range, RejectionSampling, dpo_loss_fn, policy_loss_fn, reduces_over
from areno.loss_fns.shaping import select_by_second_moment
from areno.types import TrainSequence
from tests.engine.test_model_families import random_rows
from tests.engine.test_train_step import make_step, weights
from tests.support.examples import examples

QUICK = settings(max_examples=examples(100), deadline=None, derandomize=True, database=None)
algorithms = st.sampled_from(["ffd", "kk"])


def rows_of(lengths):
    return [[0] * length for length in lengths]


@QUICK
@given(
    lengths=st.lists(st.integers(1, 60), max_size=30),
    most=st.none() | st.integers(1, 120),
    least=st.none() | st.integers(1, 6),
    divisor=st.integers(1, 4),
    algorithm=algorithms,
)
def test_bins_hold_every_row_once_within_the_budget_and_in_the_number_asked_for(
    lengths, most, least, divisor, algorithm
):
    bins = MicroBatching(least, 1, most, divisor, algorithm).bins(rows_of(lengths))
    assert sorted(index for bin_ in bins for index in bin_) == list(range(len(lengths)))
    assert all(bin_ == sorted(bin_) and bin_ for bin_ in bins)
    assert [bin_[0] for bin_ in bins] == sorted(bin_[0] for bin_ in bins)
    if most is not None:
        assert all(len(bin_) == 1 or sum(lengths[i] for i in bin_) <= most for bin_ in bins)
    assert len(bins) == len(lengths) or (len(bins) % divisor == 0 and len(bins) >= (least or 1))
    if most is None and len(lengths) > (least or 1) + divisor:
        assert len(bins) == math.ceil((least or 1) / divisor) * divisor


@QUICK
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30), most=st.integers(60, 200))
def test_first_fit_leaves_no_two_bins_that_would_fit_into_one(lengths, most):
    sums = [sum(lengths[i] for i in bin_) for bin_ in MicroBatching(max_tokens_per_mb=most).bins(rows_of(lengths))]
    assert all(left + right > most for left, right in itertools.combinations(sums, 2))


def test_first_fit_decreasing_by_hand():
    # 7 opens a bin, 5 a second, 4 joins the second, 3 the first, 1 the second.
    assert MicroBatching(max_tokens_per_mb=10).bins(rows_of([1, 5, 4, 3, 7])) == [[0, 1, 2], [3, 4]]


def test_differencing_balances_better_than_the_greedy_order():
    lengths = [8, 7, 6, 5, 4]
    kk = [sum(lengths[i] for i in bin_) for bin_ in MicroBatching(2, packing_algorithm="kk").bins(rows_of(lengths))]
    assert max(kk) - min(kk) <= 2
    greedy = [sum(lengths[i] for i in bin_) for bin_ in MicroBatching(2).bins(rows_of(lengths))]
    assert sorted(greedy) == [13, 17]


@QUICK
@given(pairs=st.lists(st.integers(1, 40), min_size=1, max_size=12), algorithm=algorithms)
def test_rows_of_a_block_stay_together(pairs, algorithm):
    lengths = [n for n in pairs for _ in range(2)]
    for bin_ in MicroBatching(1, 2, 50, 1, algorithm).bins(rows_of(lengths)):
        assert all(bin_[i] % 2 == 0 and bin_[i + 1] == bin_[i] + 1 for i in range(0, len(bin_), 2))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_mbs": 0}, "mb_spec.n_mbs must be at least 1, got 0"),
        ({"granularity": 0}, "mb_spec.granularity must be at least 1"),
        ({"max_tokens_per_mb": 0}, "mb_spec.max_tokens_per_mb must be at least 1"),
        ({"n_mbs_divisor": 0}, "mb_spec.n_mbs_divisor must be at least 1"),
        ({"packing_algorithm": "best"}, "must be ffd or kk, got 'best'"),
    ],
)
def test_bad_specifications_are_named(options, text):
    with pytest.raises(ValueError, match=text):
        MicroBatching(**options)


@pytest.mark.parametrize("more", [{}, {"max_tokens_per_mb": 3}, {"packing_algorithm": "kk"}, {"tree": True}])
def test_the_last_block_may_be_smaller(more):
    bins = MicroBatching(n_mbs=3, granularity=2, **more).bins(rows_of([1, 2, 3, 4, 5]))
    assert bins == [[0, 1], [2, 3], [4]]


# -- training on bins --------------------------------------------------------------------------------------------------


def family_rows(count=9, seed=0):
    """Return rows with every column that the policy losses read."""
    rows = random_rows(count, seed)
    generator = torch.Generator().manual_seed(seed)
    for row in rows:
        noise = 0.3 * torch.randn(2, len(row.tokens), generator=generator)
        row.prox_logprobs = [old + float(n) for old, n in zip(row.logprobs, noise[0], strict=True)]
        row.teacher_logprobs = [old + float(n) for old, n in zip(row.logprobs, noise[1], strict=True)]
        row.versions = [-1 if prompt else 3 + i % 3 for i, prompt in enumerate(row.prompt_mask)]
    select_by_second_moment(rows, 0.04)
    return rows


STALE = {"use_decoupled_loss": True}
KNOBS = {
    "dapo": PolicyLossConfig(eps_clip_higher=0.28, c_clip=3.0),
    "gspo": PolicyLossConfig(importance_sampling_level="sequence"),
    "sapo": PolicyLossConfig(use_sapo_loss=True),
    "cispo": PolicyLossConfig(use_cispo_loss=True),
    "m2po": PolicyLossConfig(eps_clip=0.0, m2_threshold=0.04, **STALE),
    "icepop": PolicyLossConfig(rejection_sampling=RejectionSampling(lower=0.5, upper=2.0), **STALE),
    "sequence": PolicyLossConfig(rejection_sampling=RejectionSampling(level="sequence", upper=1.05), **STALE),
    "loglinear": PolicyLossConfig(prox_logp_method="loglinear", **STALE),
    "distilled": PolicyLossConfig(distill_loss_weight=0.5),
}
CUTS = [9, 1, MicroBatching(max_tokens_per_mb=60), MicroBatching(3, packing_algorithm="kk"), MicroBatching(2, 3, 90)]


@pytest.mark.parametrize("name", KNOBS)
def test_every_policy_loss_learns_the_same_from_any_micro_batches(name):
    loss_fn = partial(policy_loss_fn, knobs=KNOBS[name], version=6)
    results = []
    for cut in CUTS:
        # Few tokens of a random model have plausible ratios, so gradients are tiny; the epsilon keeps rounding small.
        step = make_step(lr=2e-4, eps=1e-4)
        stats = step.run(family_rows(), loss_fn, cut)
        assert ("num_micro_batches" in stats) == isinstance(cut, MicroBatching)
        stats.pop("num_micro_batches", None)
        results.append((stats, weights(step)))
    (first, expected), others = results[0], results[1:]
    assert first["grad_norm"] > 0
    for stats, found in others:
        assert set(stats) == set(first)
        for key, value in first.items():
            assert stats[key] == pytest.approx(value, rel=2e-4, abs=2e-5), key
        for parameter, value in expected.items():
            assert (found[parameter] - value).abs().max() <= 1e-5 * value.abs().max(), parameter


def test_a_pass_has_at_most_the_allowed_number_of_tokens():
    seen = []

    @reduces_over("token")
    def watching(pack, logprobs):
        seen.append(len(pack["packed_tokens"]) + pack["packed_num_sequences"])
        return logprobs.sum()

    rows = random_rows(12)
    make_step().run(rows, watching, MicroBatching(max_tokens_per_mb=70))
    assert sum(seen) == sum(len(row.tokens) for row in rows)
    assert max(seen) <= 70
    assert len(seen) < len(rows)


def test_a_prompt_counts_once_in_a_pass_over_trees():
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3]]
    rows = [
        TrainSequence(prompt_mask=[True] * 6 + [False] * 2, tokens=[*prompt, answer, answer])
        for prompt in prompts
        for answer in (11, 12, 13)
    ]
    assert [len(chunk) for chunk in _chunks(rows, 6, 20)] == [2, 2, 2]
    assert [len(chunk) for chunk in _chunks(rows, 6, 20, tree=True)] == [4, 2], "12 tokens, 20 with the next, then 22"
    assert [len(chunk) for chunk in _chunks(rows, 6, 12, tree=True)] == [3, 3]
    assert [len(chunk) for chunk in _chunks(rows, 2, 99, tree=True)] == [2, 2, 2]


def test_packed_passes_refuse_unsupported_combinations():
    rows = random_rows(4)
    for row in rows:
        row.ref_logprobs = [0.0] * len(row.tokens)
    with pytest.raises(ValueError, match=r"even mb_spec\.granularity, got 4 rows and mb_spec\.granularity=1"):
        make_step().run(rows, dpo_loss_fn, MicroBatching())
    with pytest.raises(ValueError, match="one optimizer step uses all rows"):
        make_step().run(rows, policy_loss_fn, MicroBatching(), 2)
    make_step().run(rows, dpo_loss_fn, MicroBatching(granularity=2, max_tokens_per_mb=30))


def test_columns_of_rows_reach_the_loss_on_the_action_axis():
    rows = [
        TrainSequence(
            [True, False, False],
            [5, 6, 7],
            prox_logprobs=[0.0, -1.5, -2.5],
            teacher_logprobs=[0.0, -0.5, -0.25],
            versions=[-1, 3, 16_777_217],
            keep=[False, True, False],
        ),
        TrainSequence(
            [True, False],
            [8, 9],
            prox_logprobs=[0.0, -3.5],
            teacher_logprobs=[0.0, -4.0],
            versions=[-1, 2],
            keep=[True] * 2,
        ),
    ]
    data = pack_rows(rows).data
    assert data["packed_prox_logprobs"].tolist() == [-1.5, -2.5, -3.5]
    assert data["packed_teacher_logprobs"].tolist() == [-0.5, -0.25, -4.0]
    # Versions are integers: a float could not represent the last one.
    assert data["packed_versions"].tolist() == [3, 16_777_217, 2]
    assert data["packed_keep"].tolist() == [True, False, True]
    assert not {"packed_keep", "packed_versions"} & set(pack_rows([TrainSequence([True, False], [1, 2])]).data)
    rows[1].keep = []
    with pytest.raises(ValueError, match="row 1 has no keep"):
        make_step().run(rows, policy_loss_fn, 2)


def test_counts_are_summed_and_ranges_merged_over_micro_batches():
    def loss(pack, logprobs):
        n = torch.tensor(len(pack["packed_tokens"]))
        least, most = pack["packed_tokens"].min(), pack["packed_tokens"].max()
        nothing = Range(torch.tensor(0.0), torch.tensor(0), torch.tensor(torch.inf), torch.tensor(-torch.inf))
        ids = Range(pack["packed_tokens"].sum(), n, least, most)
        return logprobs.sum(), {"actions": Count(n), "id": ids, "nothing": nothing}

    rows = random_rows(6)
    stats = make_step().run(rows, loss, 2)
    ids = [token for row in rows for token in row.tokens[1:]]
    assert stats["actions"] == len(ids)
    assert stats["id/avg"] == pytest.approx(sum(ids) / len(ids))
    assert (stats["id/min"], stats["id/max"]) == (min(ids), max(ids))
    assert not any(name.startswith("nothing") for name in stats)
