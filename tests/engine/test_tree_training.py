"""Tree training on rows with common prefixes: log-probs, gradients and weights equal those of separate rows."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areno.algorithms import gmpo, simpo
from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.model.attention import LayerAttention
from areno.engine.model.loading import LoadOptions, load_value_model, prepare
from areno.engine.model.packing import PackedPlan
from areno.engine.model.tree import TokenTree, TreePlan
from areno.engine.train.batch import pack_rows
from areno.engine.train.microbatch import MicroBatching
from areno.engine.train.optimizer import MasterAdamW, OptimizerOptions
from areno.engine.train.outputs import predict
from areno.engine.train.step import TrainStep
from areno.errors import EngineError
from areno.loss_fns import (
    PolicyLossConfig,
    dpo_loss_fn,
    grpo_loss_fn,
    gspo_loss_fn,
    policy_loss_fn,
    ppo_loss_fn,
    reduces_over,
    sft_loss_fn,
    value_loss_fn,
)
from areno.types import TrainSequence
from tests.engine.test_microbatch import KNOBS
from tests.engine.test_train_step import make_step, weights
from tests.support.examples import examples, some_quick
from tests.support.tiny import FAMILIES, VOCAB, save_tiny_checkpoint, tiny_module

QUICK = settings(max_examples=examples(100), deadline=None, derandomize=True, database=None)
RECURRENT = {"qwen3_5"}
few_tokens = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=1, max_size=8)


def branching_rows(prompts=3, answers=4, seed=0):
    """Return answers to common prompts; half of them continue a common first turn, and one is a prefix of another."""
    rng = random.Random(seed)

    def random_tokens(least, most):
        return [rng.randrange(1, VOCAB) for _ in range(rng.randint(least, most))]

    rows = []
    for group in range(prompts):
        prompt, turn = [1, *random_tokens(5, 20)], random_tokens(4, 8)
        for number in range(answers):
            answer = (turn if number % 2 else []) + random_tokens(3, 12)
            tokens = prompt + (turn if number == 1 else answer)
            n = len(tokens)
            old = [0.0] * len(prompt) + [-4 + rng.random() for _ in range(n - len(prompt))]
            rows.append(
                TrainSequence(
                    [i < len(prompt) for i in range(n)],
                    tokens,
                    logprobs=old,
                    advantages=[rng.gauss(0, 1)] * n,
                    group=group,
                    temperature=0.5 + 0.25 * number,
                )
            )
    return rows


@QUICK
@given(sequences=few_tokens)
def test_a_tree_holds_each_prefix_once_and_every_token_attends_to_its_prefix(sequences):
    tree = TokenTree()
    paths = []
    for sequence in sequences:
        known = {tuple(s[:n]) for s in sequences[: len(paths)] for n in range(1, len(s) + 1)}
        assert tree.shared(sequence) == sum(tuple(sequence[:n]) in known for n in range(1, len(sequence) + 1))
        paths.append(tree.add(sequence))
    beginnings = {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}
    assert len(tree.tokens) == len(beginnings)
    plan = TreePlan(paths)
    # Equal scores give all visible tokens equal weights, and values that are unit vectors show which these are.
    nodes = torch.eye(len(tree.tokens))[:, None]
    seen = {
        window: plan.attend(LayerAttention(0, 1.0, window), 0 * nodes, 0 * nodes, nodes)[:, 0] for window in (None, 3)
    }
    for sequence, path in zip(sequences, paths, strict=True):
        assert [tree.tokens[node] for node in path] == sequence
        assert plan.position_ids[path].tolist() == list(range(len(sequence)))
        for depth, node in enumerate(path):
            for window, weight in seen.items():
                visible = path[max(0, depth + 1 - window) if window else 0 : depth + 1]
                assert weight[node].nonzero()[:, 0].tolist() == visible
                assert weight[node, visible].tolist() == pytest.approx([1 / len(visible)] * len(visible))


@pytest.mark.parametrize("family", some_quick(sorted(set(FAMILIES) - RECURRENT), "llama", "gemma2", "gpt_oss"))
def test_log_probs_and_gradients_on_a_tree_equal_the_flat_ones(family):
    rows, found = branching_rows(), []
    for tree in (False, True):
        model = prepare(tiny_module(family), family)
        batch = pack_rows(rows, tree=tree)
        logprobs = predict(model, "policy", batch, True, False)
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        gradients = {name: p.grad for name, p in model.parameters()}
        found.append((len(batch.tokens), logprobs.detach(), batch.data["packed_entropy"], gradients))
    (flat_tokens, flat, flat_entropy, flat_gradients), (tokens, logprobs, entropy, gradients) = found
    assert tokens < 0.6 * flat_tokens
    assert (logprobs - flat).abs().max() <= 1e-5
    assert (entropy - flat_entropy).abs().max() <= 1e-5
    for name, gradient in flat_gradients.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-6, name


@pytest.mark.parametrize("most", [None, 90])
def test_training_on_trees_gives_the_weights_of_training_on_rows(most):
    loss_fn = partial(policy_loss_fn, knobs=PolicyLossConfig(importance_sampling_level="sequence"))
    rows = branching_rows()
    flat, tree = make_step(lr=2e-4, eps=1e-4), make_step(lr=2e-4, eps=1e-4)
    expected = flat.run(rows, loss_fn, 12)
    stats = tree.run(rows, loss_fn, MicroBatching(max_tokens_per_mb=most, tree=True))
    assert stats.pop("tree_token_ratio") < 0.8
    for key, value in expected.items():
        assert stats[key] == pytest.approx(value, rel=2e-4, abs=2e-5), key
    for name, value in weights(flat).items():
        assert (weights(tree)[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


@QUICK
@given(sequences=few_tokens, most=st.none() | st.integers(3, 20), least=st.integers(1, 3))
def test_trees_stay_within_the_budget_and_hold_every_row_once(sequences, most, least):
    bins = MicroBatching(least, max_tokens_per_mb=most, tree=True).bins(sequences)
    assert sorted(row for bin_ in bins for row in bin_) == list(range(len(sequences)))
    assert len(bins) >= min(least, len(sequences))
    for bin_ in bins if most is not None else ():
        tree = TokenTree()
        for row in bin_:
            tree.add(sequences[row])
        assert len(tree.tokens) <= most or len(bin_) == 1


def test_rows_that_share_most_go_to_one_tree():
    rows = branching_rows(prompts=8, answers=8, seed=1)
    random.Random(0).shuffle(rows)

    def fed(cut):
        return sum(len(pack_rows([rows[i] for i in bin_], tree=True).tokens) for bin_ in cut)

    sequences = [row.tokens for row in rows]
    trees = MicroBatching(max_tokens_per_mb=150, tree=True).bins(sequences)
    assert len(trees) > 2
    # Only prompts that are split between two bins are computed twice.
    assert fed(trees) < 1.15 * fed([range(len(rows))])
    assert fed(trees) < 0.7 * fed(MicroBatching(max_tokens_per_mb=150).bins(sequences))


def test_models_and_options_that_do_not_support_trees_are_refused():
    model = prepare(tiny_module("qwen3_5"), "qwen3_5")
    batch = pack_rows(branching_rows(), tree=True)
    with pytest.raises(EngineError, match="recurrent layers, which cannot process a tree"):
        model.body(batch.tokens, batch.plan.position_ids, batch.plan)
    with pytest.raises(ValueError, match=r"set mb_spec\.packing_algorithm=ffd"):
        MicroBatching(packing_algorithm="kk", tree=True)
    step = make_step()
    step.kind = "reward"
    loss_fn = reduces_over("sequence")(lambda pack, scores: scores.sum())
    with pytest.raises(ValueError, match="reward models do not support tree training"):
        step.run(branching_rows(), loss_fn, MicroBatching(tree=True))


def test_an_engine_trains_on_trees_if_enabled(tiny_checkpoint):
    found = {}
    for tree in (False, True):
        config = EngineConfig(tree_training=tree, optimizer=OptimizerOptions(lr=2e-4, eps=1e-4))
        with contextlib.closing(Engine(str(tiny_checkpoint), config)) as engine:
            stats = engine.train(branching_rows(), policy_loss_fn, 12)
            found[tree] = stats, {name: p.detach().clone() for name, p in engine.actor.model.parameters()}
    assert "tree_token_ratio" not in found[False][0]
    assert found[True][0]["tree_token_ratio"] < 0.8
    for name, value in found[False][1].items():
        assert (found[True][1][name] - value).abs().max() <= 1e-5 * value.abs().max(), name


def test_a_model_that_does_not_support_trees_trains_on_separate_rows(tmp_path):
    path = save_tiny_checkpoint(tmp_path / "model", "qwen3_5")
    with contextlib.closing(Engine(str(path), EngineConfig())) as engine:
        assert "tree_token_ratio" not in engine.train(branching_rows(), policy_loss_fn, 12)


def test_a_rehearsal_computes_rows_without_shared_prefixes(monkeypatch):
    rows, step, computed = [branching_rows()[0]] * 4, make_step(), []
    step.tree, body = True, step.model.body
    monkeypatch.setattr(step.model, "body", lambda tokens, *plan: computed.append(len(tokens)) or body(tokens, *plan))
    step.rehearse(rows, grpo_loss_fn, 4)
    step.run(rows, grpo_loss_fn, 4)
    assert computed == [4 * len(rows[0].tokens), len(rows[0].tokens)]


def test_rows_that_share_little_are_packed_without_a_tree():
    rows = [TrainSequence([True, False] * 10, [1, *range(first, first + 19)], logprobs=[0.0] * 20) for first in (2, 40)]
    assert type(pack_rows(rows, tree=True).plan) is PackedPlan
    shared = [replace(row, tokens=[*rows[0].tokens[:-1], index]) for index, row in enumerate(rows)]
    assert isinstance(pack_rows(shared, tree=True).plan, TreePlan)


LOSSES = {
    "sft": sft_loss_fn,
    "dpo": dpo_loss_fn,
    "grpo": partial(grpo_loss_fn, kl_coef=0.1),
    "gspo": gspo_loss_fn,
    "ppo": ppo_loss_fn,
    "critic": value_loss_fn,
    "gmpo": partial(gmpo.gmpo_loss_fn, knobs=gmpo.GMPOOptions()),
    "simpo": partial(simpo.simpo_loss_fn, knobs=simpo.SimPOOptions()),
    **{f"family, {name}": partial(policy_loss_fn, knobs=knobs, version=6) for name, knobs in KNOBS.items()},
}


def step_of(name, checkpoint):
    if name != "critic":
        return make_step(lr=1e-3, eps=1e-4)
    model = load_value_model(str(checkpoint), LoadOptions(dtype=torch.float32))
    torch.nn.init.normal_(model.module.score.weight, generator=torch.Generator().manual_seed(0))
    return TrainStep(model, MasterAdamW(model.parameters(), OptimizerOptions(lr=1e-3, eps=1e-4)), kind="value")


@pytest.mark.parametrize("name", some_quick(LOSSES, "grpo", "critic", "family, gspo"))
def test_every_algorithm_learns_from_trees_what_it_learns_from_rows(name, tiny_checkpoint):
    """Gradients agree to 1e-5 of each tensor's largest entry, and weights to 1e-4 after five steps."""
    rng = random.Random(1)
    rows = [
        replace(
            row,
            ref_logprobs=[x - 0.1 for x in row.logprobs],
            prox_logprobs=[x + rng.gauss(0, 0.3) for x in row.logprobs],
            teacher_logprobs=[x + rng.gauss(0, 0.3) for x in row.logprobs],
            values=[rng.gauss(0, 1) for _ in row.tokens],
            returns=[rng.gauss(0, 1) for _ in row.tokens],
            versions=[rng.randint(4, 6) for _ in row.tokens],
            keep=[rng.random() < 0.9 for _ in row.tokens],
        )
        for row in branching_rows()
    ]
    flat, tree = (step_of(name, tiny_checkpoint) for _ in range(2))
    for step, shares in ((flat, False), (tree, True)):
        step.tree = shares
        step.set_training(True)
        step.accumulate(rows, LOSSES[name], 12)
        step.set_training(False)
    for ours, theirs in zip(tree.optimizer.gradients(), flat.optimizer.gradients(), strict=True):
        assert theirs.abs().max() > 0
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    for step in (flat, tree):
        for _ in range(5):
            stats = step.run(rows, LOSSES[name], 12)
    assert stats["tree_token_ratio"] < 0.8
    for parameter, value in weights(flat).items():
        assert (weights(tree)[parameter] - value).abs().max() <= 1e-4 * value.abs().max(), parameter
