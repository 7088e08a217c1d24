"""Records of an update equal the log-probs of stock transformers before it, and what the losses' formulas clip.

Every row is computed alone and unpadded by ``transformers``, in fp32; ratios and clip ranges in Python's float64.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from areno.engine.train.optimizer import OptimizerOptions
from areno.loss_fns import (
    PolicyLossConfig,
    grpo_loss_fn,
    gspo_loss_fn,
    policy_loss_fn,
    ppo_loss_fn,
    reduces_over,
    sft_loss_fn,
)
from areno.types import TrainSequence
from tests.support.tiny import save_tiny_checkpoint

PROMPTS, ANSWERS = 3, 4
LAYOUTS = {
    "replicas": Layout(2),
    "fsdp": Layout(2, fsdp=True),
    "tensor": Layout(1, 2),
    "context": Layout(cp_size=2),
    "stages": Layout(pp_size=2),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("ckpt") / "llama", heads=4, hidden=64, sharpen=3.0)


def configuration(**options):
    return EngineConfig(optimizer=OptimizerOptions(lr=0.05, eps=1e-6), kv_cache_tokens=256, **options)


@pytest.fixture
def engine(checkpoint):
    made = Engine(str(checkpoint), configuration())
    yield made
    made.close()


def reference(model, row):
    """Return the log-prob of each token given those before it; None for the first one."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0].double() / row.temperature
    logprobs = logits.log_softmax(-1)
    return [None, *(float(logprobs[i - 1, token]) for i, token in enumerate(row.tokens) if i > 0)]


@pytest.fixture(scope="module")
def truth(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    return partial(reference, model)


def observed_rows(truth, seed=0, spread=0.4):
    """Return answers to common prompts, sampled by a similar policy, with tokens of tools; some rows are observed."""
    rng, rows = random.Random(seed), []
    for group in range(PROMPTS):
        prompt = [rng.randrange(5, 300) for _ in range(rng.randint(4, 30))]
        for _ in range(ANSWERS):
            answer = [rng.randrange(5, 300) for _ in range(rng.randint(3, 12))]
            n, begin = len(prompt) + len(answer), len(prompt)
            row = TrainSequence(
                [i < begin for i in range(n)],
                prompt + answer,
                advantages=[rng.gauss(0, 1)] * n,
                loss_mask=[i != begin + 1 for i in range(n)],
                group=group,
                temperature=rng.choice([0.7, 1.0]),
                observed=len(rows) if len(rows) % 3 else -1,
            )
            logprobs = truth(row)
            row.logprobs = [(x or 0.0) + rng.gauss(0, spread) if i >= begin else 0.0 for i, x in enumerate(logprobs)]
            rows.append(row)
    return rows


def clipped_tokens(row, logprobs, eps, eps_high, dual=math.inf):
    """Return the flags by the formula: the ratio is out of range on the side to which the advantage pushes it."""
    flags = []
    for i, trained in enumerate(row.trainable()):
        ratio = math.exp(logprobs[i] - row.logprobs[i]) if trained else 1.0
        a = row.advantages[i] if trained else 0.0
        flags.append((ratio > 1 + eps_high and a > 0) or (ratio < 1 - eps and a < 0) or (ratio > dual and a < 0))
    return flags


def clipped_sequence(row, logprobs, eps):
    trained = [i for i, counts in enumerate(row.trainable()) if counts]
    ratio = math.exp(sum(logprobs[i] - row.logprobs[i] for i in trained) / len(trained))
    out = ratio > 1 + eps if row.advantages[-1] > 0 else ratio < 1 - eps
    return [out and i in trained for i in range(len(row.tokens))]


CLIPPING = {
    "grpo": (
        partial(grpo_loss_fn, clip_eps=0.2, clip_eps_high=0.3, dual_clip=1.5),
        lambda row, x: clipped_tokens(row, x, 0.2, 0.3, 1.5),
    ),
    "gspo": (partial(gspo_loss_fn, clip_eps=0.05), lambda row, x: clipped_sequence(row, x, 0.05)),
    "ppo": (ppo_loss_fn, lambda row, x: clipped_tokens(row, x, 0.2, 0.2, 3.0)),
    "family": (
        partial(policy_loss_fn, knobs=PolicyLossConfig(eps_clip=0.1)),
        lambda row, x: clipped_tokens(row, x, 0.1, 0.1),
    ),
}


def check(records, rows, truth, formula):
    assert records.keys() == {row.observed for row in rows} - {-1}
    marked = 0
    for row in rows:
        if row.observed < 0:
            continue
        record, expected, trained = records[row.observed], truth(row), row.trainable()
        for i, counts in enumerate(trained):
            assert record.logprobs[i] == (pytest.approx(expected[i], abs=2e-5) if counts else 0.0)
        assert record.clipped == formula(row, expected)
        marked += sum(record.clipped)
    assert 0 < marked < sum(sum(row.trainable()) for row in rows) / 2, "both kinds of tokens are compared"


@pytest.mark.parametrize("name", CLIPPING)
@pytest.mark.parametrize("tree", [False, True], ids=["packed", "tree"])
def test_records_are_the_logprobs_before_the_update_and_what_the_formula_clips(name, tree, checkpoint, truth):
    rows = observed_rows(truth)
    loss_fn, formula = CLIPPING[name]
    engine = Engine(str(checkpoint), configuration(tree_training=tree))
    stats = engine.train(rows, loss_fn, 4)
    assert ("tree_token_ratio" in stats) == tree
    check(engine.take_token_records(), rows, truth, formula)
    assert engine.take_token_records() == {}, "taking the records clears them"
    engine.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_are_the_same_on_two_ranks(layout, checkpoint, truth):
    rows = observed_rows(truth)
    loss_fn, formula = CLIPPING["gspo"]
    group = EngineGroup(str(checkpoint), configuration(), LAYOUTS[layout], stall_s=60)
    group.train(rows, loss_fn, 4)
    check(group.take_token_records(), rows, truth, formula)
    assert group.take_token_records() == {}
    group.close()


@pytest.mark.parametrize("begin", [1, 3, 4])
def test_the_first_trained_token_is_predicted_from_the_last_token_of_the_prompt(begin, engine, truth):
    """Off-by-one errors would show here: at the boundary, at both ends of the row, and between rows of a pass."""
    tokens = [11, 23, 35, 47, 59]
    row = TrainSequence(
        [i < begin for i in range(5)], tokens, advantages=[1.0] * 5, logprobs=[0.0] * begin + [-3.0] * (5 - begin)
    )
    expected = truth(row)
    row.logprobs[begin] = expected[begin] - 1  # a ratio of e, the others are far below 1
    engine.train([row, replace(row, observed=7), row], partial(grpo_loss_fn, clip_eps=0.2), 3)
    (record,) = engine.take_token_records().values()
    assert record.logprobs == pytest.approx([0.0] * begin + expected[begin:], abs=2e-5)
    assert record.clipped is not None
    assert record.clipped[: begin + 1] == [False] * begin + [True]
    others = [expected[i] + 3 > math.log(1.2) for i in range(begin + 1, 5)]
    assert record.clipped[begin + 1 :] == others


def test_only_the_first_pass_over_a_row_is_recorded(engine, checkpoint, truth):
    rows = observed_rows(truth)
    loss_fn = partial(grpo_loss_fn, clip_eps=0.2)
    half = len(rows) // 2
    engine.train(rows, loss_fn, half, 1)  # two optimizer steps
    records = engine.take_token_records()
    engine.train(rows, loss_fn, len(rows))
    engine.take_token_records()
    other = Engine(str(checkpoint), configuration())
    other.train(rows[:half], loss_fn, half)
    other.train(rows[half:], loss_fn, half)
    other.train(rows, loss_fn, len(rows))  # these were trained before
    assert other.take_token_records() == records
    gaps = [
        max(abs(a - b) for a, b, counts in zip(record, truth(row), row.trainable(), strict=True) if counts)
        for row in rows
        if row.observed >= 0
        for record in [records[row.observed].logprobs]
    ]
    assert max(gaps[: len(gaps) // 2]) < 2e-5
    assert min(gaps[len(gaps) // 2 :]) > 1e-3, "the policy has moved between the two optimizer steps"
    other.close()


def test_on_two_replicas_too_only_the_first_pass_over_a_row_is_recorded(checkpoint, truth):
    rows = observed_rows(truth)
    loss_fn, formula = CLIPPING["gspo"]
    group = EngineGroup(str(checkpoint), configuration(), LAYOUTS["replicas"], stall_s=60)
    for order in range(4):  # the replicas divide the rows differently in each pass
        group.train(random.Random(order).sample(rows, len(rows)), loss_fn, 4)
    check(group.take_token_records(), rows, truth, formula)
    group.close()


def test_a_loss_that_marks_nothing_records_only_logprobs(engine, truth):
    rows = observed_rows(truth)

    @reduces_over("token")
    def own_loss(pack, logprobs):
        mask = pack["packed_response_mask"]
        return -torch.where(mask, logprobs * pack["packed_advantages"], 0.0).sum() / mask.sum()

    for loss_fn in (own_loss, sft_loss_fn):
        engine.train(rows, loss_fn, 4)
        records = engine.take_token_records()
        assert len(records) == sum(row.observed >= 0 for row in rows)
        assert {record.clipped for record in records.values()} == {None}


def test_a_users_loss_around_a_built_in_one_keeps_its_marks(engine, truth):
    rows = observed_rows(truth)

    def own_loss(pack, logprobs):
        loss, metrics = grpo_loss_fn(pack, logprobs, 0.2)
        return 2 * loss, metrics

    engine.train(rows, own_loss, 4)
    check(engine.take_token_records(), rows, truth, lambda row, x: clipped_tokens(row, x, 0.2, 0.2))


def test_rows_that_are_not_observed_leave_nothing(engine, truth):
    rows = [replace(row, observed=-1) for row in observed_rows(truth)]
    engine.train(rows, grpo_loss_fn, 4)
    assert engine.take_token_records() == {}
