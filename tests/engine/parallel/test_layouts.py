"""Weights, statistics, tokens and scores are the same in every layout; states move between layouts.

The ground truth is the engine in one process, which other tests compare with stock transformers and torch's AdamW.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial

import pytest
from safetensors.torch import load_file

from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from areno.engine.plan import trial
from areno.engine.train.microbatch import MicroBatching
from areno.engine.train.optimizer import OptimizerOptions
from areno.errors import EngineError, UsageError
from areno.loss_fns import dpo_loss_fn, grpo_loss_fn, ppo_loss_fn, sft_loss_fn, value_loss_fn
from areno.types import ModelRole, Request, SamplingParams
from tests.engine.test_equivalences import rows
from tests.support.processes import workers_of
from tests.support.tiny import save_tiny_checkpoint

STEPS = 3
SETTINGS = {"lr": 1e-3, "eps": 1e-6, "grad_clip_norm": 0.5, "weight_decay": 0.01}
# Rows per step, including fewer than ranks, uneven numbers, and odd numbers of pairs.
COUNTS = {"sft": (7, 1, 8), "dpo": (6, 2, 10), "grpo": (7, 1, 8), "ppo": (6, 3, 1)}
LOSSES = {
    "sft": sft_loss_fn,
    "dpo": dpo_loss_fn,
    "grpo": partial(grpo_loss_fn, kl_coef=0.1),
    "ppo": partial(ppo_loss_fn, use_kl_loss=True, kl_loss_coef=0.1),
}
REQUESTS = [
    Request(
        [3 + i, 5, 7, 9][: 2 + i % 3],
        SamplingParams(max_new_tokens=12, ignore_eos=True, greedy=i == 0, top_logprobs=2 if i == 1 else 0),
        [i * 10, i * 10 + 1],
    )
    for i in range(5)
]
PROMPTS = [[3, 4, 5], [7, 8], [9, 9, 9, 9], [6]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    # Each rank gets only a part of the gradient of qwen3's per-head norms: a pitfall of the stock plan.
    return save_tiny_checkpoint(
        tmp_path_factory.mktemp("ckpt") / "qwen3", "qwen3", heads=4, hidden=64, max_position_embeddings=8192
    )


def engine(path, layout=None, **more):
    config = EngineConfig(optimizer=OptimizerOptions(**SETTINGS), kv_cache_tokens=4096, decode="eager", **more)
    return Engine(str(path), config) if layout is None else EngineGroup(str(path), config, layout)


def lesson(engine, name, step):
    batch = rows(COUNTS[name][step], seed=10 + step)
    return engine.train(batch, LOSSES[name], mini_bs=2)


def critic(path, settings):
    return ModelRole("critic", str(path), trainable=True, kind="value", optimizer=settings)


def course(engine, folder, roles=None, file="model.safetensors", temperatures=(1.0, 0.5, 1.0, 2.0)):
    """Return everything that is compared: saved weights and statistics per algorithm, then samples and scores."""
    found = {"stats": {}, "weights": {}}
    engine.ensure_roles(roles or {"critic": critic(engine.path, SETTINGS)})
    for name in LOSSES:
        for step in range(STEPS):
            stats = lesson(engine, name, step)
            if name == "ppo":
                found["stats"]["critic"] = engine.train(rows(6, seed=step), value_loss_fn, 2, role="critic")
        found["stats"][name] = stats
        engine.save_model(folder / name)
        found["weights"][name] = load_file(folder / name / file)
    engine.save_model(folder)
    engine.save_state(folder)
    found["weights"]["critic"] = load_file(folder / "critic" / file)
    found["logprobs"] = engine.score_logprobs("actor", PROMPTS, list(temperatures))
    found["values"] = engine.score_values("critic", PROMPTS)
    if isinstance(engine, EngineGroup) and engine.layout.pp_size > 1:
        return found
    found["results"] = [future.result() for future in engine.submit(REQUESTS)]
    first = [result.sequences[0].resp_tokens for result in found["results"]]
    spoken = [request.prompt_tokens + tokens for request, tokens in zip(REQUESTS, first, strict=True)]
    found["again"] = engine.score_logprobs("actor", spoken, [1.0] * len(spoken))
    return found


@pytest.fixture(scope="module")
def truth(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    alone = engine(checkpoint)
    found = course(alone, folder)
    alone.close()
    return found | {"folder": folder}


def assert_weights(got, expected, tolerance=1e-4):
    # A tied output layer may be written besides the embedding.
    assert set(expected) <= set(got)
    for name, tensor in expected.items():
        gap, scale = (got[name] - tensor).abs().max(), tensor.abs().max()
        assert gap <= tolerance * scale, f"{name}: {gap} of {scale}"


def assert_near(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


LAYOUTS = [
    pytest.param(Layout(2, 1), id="dp2"),
    pytest.param(Layout(1, 2), id="tp2"),
    pytest.param(Layout(2, 1, fsdp=True), id="fsdp2"),
    pytest.param(Layout(2, 2), id="dp2xtp2", marks=pytest.mark.long),
    pytest.param(Layout(3, 1, fsdp=True), id="fsdp3", marks=pytest.mark.long),  # shares of unequal size
    pytest.param(Layout(2, 2, fsdp=True), id="fsdp2xtp2", marks=pytest.mark.long),
    pytest.param(Layout(1, 1, cp_size=2), id="cp2", marks=pytest.mark.long),
    pytest.param(Layout(1, 2, cp_size=2), id="tp2xcp2", marks=pytest.mark.long),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_generation_and_scores_equal_those_of_one_rank(layout, checkpoint, truth, tmp_path):
    group = engine(checkpoint, layout)
    try:
        found = course(group, tmp_path)
        assert group.load().waiting == group.load().running == 0
        heard = []
        say = SamplingParams(max_new_tokens=4, ignore_eos=True)
        listened = Request([5, 6], say, [3], listener=lambda sample, token: heard.append((sample, token.token)))
        [result] = [future.result() for future in group.submit([listened])]
        assert heard == [(0, token) for token in result.sequences[0].resp_tokens]
        endless = Request([5], SamplingParams(max_new_tokens=4000, ignore_eos=True), [4])
        [future] = group.submit([endless])
        group.cancel(future)
        assert future.result(timeout=60).sequences[0].finish_reason == "abort"
        with pytest.raises(EngineError, match="cannot fit in the KV cache of 4096 tokens"):
            group.submit([Request([5], SamplingParams(max_new_tokens=5000), [4])])
        with pytest.raises(ValueError, match="even number of rows"):  # on all ranks alike, so the group keeps running
            group.train(rows(3), dpo_loss_fn, 2)
        with pytest.raises(EngineError, match="there is no role 'nobody'"):
            group.score_values("nobody", PROMPTS)
        group.set_learning_rate("actor", 0.5)
        assert group.learning_rate("actor") == 0.5
    finally:
        group.close()
    assert_learned(found, truth)
    for mine, theirs in zip(found["results"], truth["results"], strict=True):
        for got, expected in zip(mine.sequences, theirs.sequences, strict=True):
            assert got.resp_tokens == expected.resp_tokens
            assert got.versions == expected.versions
            assert got.resp_logprobs == pytest.approx(expected.resp_logprobs, abs=1e-4)
            assert [[t for t, _ in top] for top in got.top_logprobs] == [
                [t for t, _ in top] for top in expected.top_logprobs
            ]
    for request, result, again in zip(REQUESTS, found["results"], found["again"], strict=True):
        # The sampler's log-probs from whole logits equal those that training computes from slices.
        assert result.sequences[0].resp_logprobs == pytest.approx(again[len(request.prompt_tokens) :], abs=1e-5)


def assert_learned(found, truth):
    for name, weights in truth["weights"].items():
        assert_weights(found["weights"][name], weights)
    for name, stats in truth["stats"].items():
        assert found["stats"][name] == pytest.approx(stats, rel=1e-3, abs=1e-5), name
    assert_near(found["logprobs"], truth["logprobs"])
    assert_near(found["values"], truth["values"])


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(pp_size=2), id="pp2"),
        pytest.param(Layout(2, fsdp=True, pp_size=2), id="fsdp2xpp2", marks=pytest.mark.long),
        pytest.param(Layout(1, 2, pp_size=2), id="tp2xpp2", marks=pytest.mark.long),
    ],
)
def test_stages_train_score_and_save_but_refuse_to_generate(layout, checkpoint, truth, tmp_path):
    group = engine(checkpoint, layout)
    try:
        assert_learned(course(group, tmp_path), truth)
        measured = group.measure(rows(5, seed=3), sft_loss_fn, 2)
        with pytest.raises(EngineError, match="an engine with pipeline parallelism cannot generate"):
            [future.result() for future in group.submit(REQUESTS[:1])]
        saved = engine(tmp_path)
        assert saved.measure(rows(5, seed=3), sft_loss_fn, 2) == pytest.approx(measured, rel=1e-4)
        for made, replicas in ((saved, 1), (group, layout.dp_size)):
            stats = made.train(rows(6, seed=3), sft_loss_fn, MicroBatching(3))
            assert stats["num_micro_batches"] == 3 * replicas
        saved.close()
    finally:
        group.close()


def test_a_reward_model_on_two_ranks_refuses_to_generate_and_an_interrupted_start_leaves_no_process(
    checkpoint, monkeypatch
):
    group = engine(checkpoint, Layout(2), trains="reward")
    try:
        with pytest.raises(EngineError, match="a reward model cannot generate"):
            group.submit(REQUESTS[:1])
    finally:
        group.close()

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineGroup, "_read_limits", interrupt)  # Ctrl-C while the limits are read
    with pytest.raises(KeyboardInterrupt):
        engine(checkpoint, Layout(2))
    assert workers_of(os.getpid()) == []


def test_rows_that_do_not_fill_pairs_or_blocks_are_treated_alike_by_one_and_by_two_replicas(checkpoint):
    alone, group = engine(checkpoint), engine(checkpoint, Layout(2))
    try:
        for backend in (alone, group):
            with pytest.raises(ValueError, match=r"pairs needs an even number of rows, got 5"):
                backend.measure(rows(5, seed=3), dpo_loss_fn, 2)
        found = [
            backend.measure(rows(5, seed=3), sft_loss_fn, MicroBatching(granularity=2))["loss"]
            for backend in (alone, group)
        ]
        assert found == pytest.approx([alone.measure(rows(5, seed=3), sft_loss_fn, 5)["loss"]] * 2, rel=1e-5)
    finally:
        alone.close()
        group.close()


CHAINS = {
    "tensor": (Layout(2, 2), None, Layout(1, 2)),
    "fsdp": (Layout(2, 1, fsdp=True), None, Layout(2, 1), Layout(2, 1, fsdp=True)),
    "stages": (Layout(pp_size=2), None, Layout(2, fsdp=True, pp_size=2), Layout(2, 1)),
    "divided": (Layout(2, 2, fsdp=True), Layout(1, 2, cp_size=2), None, Layout(2, 1, cp_size=2)),
}


@pytest.mark.long
@pytest.mark.parametrize("chain", CHAINS)
def test_a_state_moves_between_layouts(chain, checkpoint, truth, tmp_path):
    """Two more steps after each resume in another layout, there and back, equal those after resumes in one process."""
    critic = {"critic": ModelRole("critic", str(checkpoint), trainable=True, kind="value", optimizer=SETTINGS)}

    def resume_and_train(source, layout, folder):
        resumed = engine(source, layout)
        try:
            resumed.ensure_roles(critic)
            resumed.load_state(source)
            for step in range(2):
                lesson(resumed, "grpo", step)
                resumed.train(rows(6, seed=step), value_loss_fn, 2, role="critic")
            resumed.save_model(folder)
            resumed.save_state(folder)
        finally:
            resumed.close()

    source, truth_source = truth["folder"], truth["folder"]
    for index, layout in enumerate(CHAINS[chain]):
        target, true_target = tmp_path / f"{index}", tmp_path / f"{index}-truth"
        resume_and_train(source, layout, target)
        resume_and_train(truth_source, None, true_target)
        for part in ("", "critic"):
            got, expected = (load_file(folder / part / "model.safetensors") for folder in (target, true_target))
            assert_weights(got, expected)
        source, truth_source = target, true_target
    assert json.loads((source / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


LOW_CHAIN = [(Layout(2, 1), 2), (None, 1), (Layout(1, 2), 1), (Layout(2, fsdp=True), 1), (Layout(pp_size=2), 1)]


@pytest.mark.long
@pytest.mark.parametrize("moments", ["adam_8bit", "adam_bf16"])
def test_low_precision_moments_move_between_layouts(moments, checkpoint, tmp_path):
    """Two updates on replicas, one in one process and one in each of three layouts, against six in one process."""
    settings = OptimizerOptions(**SETTINGS, **{moments: True})
    config = EngineConfig(optimizer=settings, kv_cache_tokens=4096, decode="eager")
    source = checkpoint
    for index, (layout, steps) in enumerate(LOW_CHAIN):
        made = Engine(str(source), config) if layout is None else EngineGroup(str(source), config, layout)
        try:
            if index:
                made.load_state(source)
            for step in range(steps):
                lesson(made, "grpo", (index + step) % STEPS)
            source = tmp_path / f"{index}"
            source.mkdir()
            made.save_model(source)
            made.save_state(source)
        finally:
            made.close()
    alone = Engine(str(checkpoint), config)
    for index, (_, steps) in enumerate(LOW_CHAIN):
        for step in range(steps):
            lesson(alone, "grpo", (index + step) % STEPS)
    alone.save_model(tmp_path / "alone")
    alone.close()
    got, expected = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "alone"))
    start = load_file(checkpoint / "model.safetensors")
    for name, tensor in expected.items():
        gap = (got[name] - tensor).norm() / (tensor - start[name]).norm()
        assert gap < 0.1, f"{name}: {gap}"


def test_training_waits_on_every_rank_for_requests_submitted_just_before(checkpoint):
    found = []
    for layout in (None, Layout(1, 2)):
        made = engine(checkpoint, layout)
        try:
            for step in range(2):
                futures = made.submit(REQUESTS)
                loss = lesson(made, "sft", step)["loss"]
                assert all(future.done() for future in futures)
                results = [sequence for future in futures for sequence in future.result().sequences]
                found.append((pytest.approx(loss, rel=1e-4), [s.resp_tokens for s in results], results[0].versions))
        finally:
            made.close()
    assert found[2:] == found[:2]


def test_limits_that_only_the_leader_has_been_told_hold_for_every_rank(checkpoint):
    """If only one rank kept a prefix, the ranks would prefill different numbers of tokens."""
    group = engine(checkpoint, Layout(1, 2), prefix_cache_tokens=0)
    again = Request(list(range(3, 43)), SamplingParams(max_new_tokens=8, ignore_eos=True), [1])
    try:
        expected = group.submit([again])[0].result(timeout=60).sequences[0].resp_tokens
        busy = group.submit(REQUESTS)
        group.workers.call("engine.set_max_running", 1, ranks=[0])
        for enabled, reused in ((True, 32), (False, 0), (True, 32)):
            group.workers.call("engine.enable_prefix_cache", enabled, ranks=[0])
            for count in (0, reused):
                before = group.load().reused_total
                assert group.submit([again])[0].result(timeout=60).sequences[0].resp_tokens == expected
                assert group.load().reused_total - before == count
        assert all(future.done() for future in busy)
        assert group.run_on_all_ranks(limits) == [(1024, 1)] * 2
    finally:
        group.close()


def limits(engine):
    return engine.loop.prefixes.budget_tokens, engine.loop.scheduler.max_running


def break_rank(engine, rank):
    def refuse(_hidden):
        raise MemoryError("no memory on this rank")

    if engine.config.peers.rank == rank:
        engine.loop.model.logits = refuse


@pytest.mark.parametrize("broken", [0, 1], ids=["leader", "follower"])
def test_an_error_while_generating_on_one_rank_ends_the_group_and_is_reported(broken, checkpoint):
    group = engine(checkpoint, Layout(1, 2))
    group.run_on_all_ranks(break_rank, broken)
    (future,) = group.submit(REQUESTS[:1])
    began = time.monotonic()
    with pytest.raises(EngineError, match="no memory on this rank"):
        future.result(timeout=60)
    with pytest.raises(
        EngineError, match=rf"rank {broken} of 2 failed while generating:\n(?s:.*)MemoryError: no memory"
    ):
        group.run_on_all_ranks(trial.recover)
    group.close()
    assert time.monotonic() - began < 30


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [Layout(1, 2), Layout(2, 1, fsdp=True), Layout(1, 1, cp_size=2)],
    ids=["tp2", "fsdp2", "cp2"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "qwen3_moe"])
def test_families_on_two_ranks_learn_and_generate_as_in_one_process(family, layout, tmp_path):
    path = save_tiny_checkpoint(tmp_path / family, family, heads=4, hidden=64)
    found = {}
    for name, ranks in (("alone", None), ("spread", layout)):
        one = engine(path, ranks)
        try:
            for step in range(STEPS):
                lesson(one, "sft", step)
            one.save_model(tmp_path / name)
            found[name] = [future.result().sequences[0].resp_tokens for future in one.submit(REQUESTS[:2])]
        finally:
            one.close()
    assert_weights(
        load_file(tmp_path / "spread" / "model.safetensors"), load_file(tmp_path / "alone" / "model.safetensors")
    )
    assert found["spread"] == found["alone"]


@pytest.mark.long
@pytest.mark.parametrize("layout", [Layout(2, ep_size=2), Layout(2, 2, ep_size=2)], ids=["d2e2", "d2t2e2"])
def test_expert_parallelism_trains_scores_generates_and_resumes(layout, tmp_path):
    path = save_tiny_checkpoint(tmp_path / "moe", "qwen3_moe", heads=4, hidden=64)
    found = {}
    for name, order in (("alone", (None, None)), ("there", (layout, None)), ("back", (None, layout))):
        source = path
        for step, ranks in enumerate(order):
            made = engine(source, ranks)
            try:
                if step:
                    made.load_state(source)
                lesson(made, "grpo", 0)
                source = tmp_path / f"{name}-{step}"
                source.mkdir()
                scores = made.score_logprobs("actor", PROMPTS)
                tokens = [future.result().sequences[0].resp_tokens for future in made.submit(REQUESTS[:2])]
                lesson(made, "sft", 1)  # the experts are sharded again
                made.save_model(source)
                made.save_state(source)
            finally:
                made.close()
        found[name] = load_file(source / "model.safetensors"), scores, tokens
    weights, scores, tokens = found.pop("alone")
    for other in found.values():
        assert_weights(other[0], weights)
        assert_near(other[1], scores)
        assert other[2] == tokens


def test_expert_parallelism_without_experts_is_refused_by_name(tmp_path):
    dense = save_tiny_checkpoint(tmp_path / "llama", "llama", heads=4, hidden=64)
    with pytest.raises(UsageError, match="LlamaForCausalLM has no experts to divide among 2 ranks"):
        engine(dense, Layout(2, ep_size=2))


def test_impossible_layouts_are_refused(tmp_path):
    with pytest.raises(UsageError, match="world_size=3 is not divisible by tp_size=2"):
        Layout.of(3, 2, None)
    with pytest.raises(UsageError, match="dp_size=3 times tp_size=2 is not world_size=4"):
        Layout.of(4, 2, 3)
    with pytest.raises(UsageError, match="tp_size=0: use at least 1"):
        Layout.of(4, 0, None)


@pytest.mark.long
def test_models_without_a_plan_or_with_too_few_heads_are_refused_by_name(tmp_path):
    gpt2 = save_tiny_checkpoint(tmp_path / "gpt2", "gpt2", heads=4, hidden=64)
    with pytest.raises(UsageError, match=r"no tensor-parallel plan for GPT2Config; use --tp-size 1"):
        engine(gpt2, Layout(1, 2))
    few = save_tiny_checkpoint(tmp_path / "few", "llama", heads=2, hidden=64)
    with pytest.raises(UsageError, match=r"num_key_value_heads 1, which is not divisible by 2; use 1"):
        engine(few, Layout(1, 2))
