"""FSDP: each rank holds its shard, and gathers weights only to compute with them.

``test_layouts.py`` checks that weights, statistics, tokens and scores equal those of one process.
"""

from __future__ import annotations

import dataclasses
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.model.adapter import AdapterOptions
from areno.engine.model.loading import LoadOptions
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.rank_context import RankContext
from areno.engine.role import load_role
from areno.engine.train.microbatch import MicroBatching
from areno.engine.train.optimizer import OptimizerOptions
from areno.errors import EngineError, UsageError
from areno.loss_fns import dpo_loss_fn, sft_loss_fn, value_loss_fn
from areno.types import ModelRole, Request, SamplingParams
from tests.engine.test_equivalences import rows
from tests.support.optimizer_states import contents
from tests.support.tiny import save_tiny_checkpoint

FSDP = Layout(2, 1, fsdp=True)
SETTINGS = {"lr": 1e-3, "eps": 1e-6, "grad_clip_norm": 0.5, "weight_decay": 0.01}
REQUESTS = [
    Request([3 + i, 5, 7], SamplingParams(max_new_tokens=10, ignore_eos=True, greedy=i == 0), [i]) for i in range(6)
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    # Large enough that the weights dominate a rank's memory; an untied output layer; 3 heads, which do not halve.
    folder = tmp_path_factory.mktemp("ckpt") / "llama"
    return save_tiny_checkpoint(folder, "llama", heads=3, hidden=192, layers=6, tie_word_embeddings=False)


def alone(path, **more):
    return Engine(str(path), EngineConfig(optimizer=OptimizerOptions(**SETTINGS), kv_cache_tokens=256, **more))


@pytest.fixture(scope="module")
def group(checkpoint):
    config = EngineConfig(optimizer=OptimizerOptions(**SETTINGS), kv_cache_tokens=256)
    made = EngineGroup(str(checkpoint), config, FSDP, stall_s=60)  # ranks that wait for each other fail soon
    yield made
    made.close()


@pytest.fixture(scope="module")
def one(checkpoint):
    made = alone(checkpoint)
    yield made
    made.close()


def sampled_tokens(engine, requests=REQUESTS):
    return [future.result(timeout=60).sequences[0].resp_tokens for future in engine.submit(requests)]


def live_bytes(engine):
    """Return the bytes of all tensors of a process without the KV cache; shared storage counts once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided:
            tensor = getattr(thing, "_local_tensor", thing)
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values()) - engine.loop.cache.nbytes()


def parameters_of(engine):
    return sum(p.numel() for p in engine.actor.model.module.parameters())


def test_each_rank_holds_its_share_between_phases_and_all_weights_in_a_rollout(group, checkpoint):
    count = group.run_on_all_ranks(parameters_of)[0]
    slack = 0.1 * 4 * count  # tables, and tensors with an odd number of rows
    loaded = group.run_on_all_ranks(live_bytes)
    assert all(found == pytest.approx(4 * count / 2, abs=slack) for found in loaded), (loaded, count)
    group.train(rows(6), sft_loss_fn, 2)
    trained = group.run_on_all_ranks(live_bytes)
    assert all(found == pytest.approx(12 * count / 2, abs=slack) for found in trained), (trained, count)
    sampled_tokens(group)
    rolling = group.workers.call(
        "apply", live_bytes
    )  # unlike run_on_all_ranks, it does not end the phase for the group
    assert all(found == pytest.approx(12 * count / 2 + 4 * count, abs=slack) for found in rolling), (rolling, count)
    group.train(rows(6), sft_loss_fn, 2)
    again = group.run_on_all_ranks(live_bytes)
    assert all(found == pytest.approx(12 * count / 2, abs=slack) for found in again), (again, count)
    group.ensure_roles({"ref": ModelRole("ref", str(checkpoint), trainable=False)})
    group.score_logprobs("ref", [[3, 4, 5], [6, 7]])
    frozen = group.run_on_all_ranks(live_bytes)
    assert all(found == pytest.approx((12 + 4) * count / 2, abs=slack) for found in frozen), (frozen, count)
    sampled_tokens(group)
    group.end_rollout()
    ended = group.run_on_all_ranks(live_bytes)
    assert all(found == pytest.approx((12 + 4) * count / 2, abs=slack) for found in ended), (ended, count)
    group.drop_role("ref")


@pytest.mark.long
def test_every_tensor_rank_frees_the_gathered_weights_after_a_rollout(tmp_path):
    folder = save_tiny_checkpoint(tmp_path / "llama", "llama", heads=4, hidden=192, tie_word_embeddings=False)
    made = EngineGroup(str(folder), EngineConfig(kv_cache_tokens=256), Layout(4, 2, fsdp=True), stall_s=120)
    try:
        loaded = made.run_on_all_ranks(live_bytes)
        sampled_tokens(made)
        rolling = made.workers.call("apply", live_bytes)
        made.end_rollout()
        ended = made.workers.call("apply", live_bytes)
        for before, during, after in zip(loaded, rolling, ended, strict=True):
            assert during > 1.5 * before
            assert after == pytest.approx(before, rel=0.1)
    finally:
        made.close()


def test_scores_of_a_frozen_role_equal_those_of_one_process(group, one, checkpoint):
    role = {"ref": ModelRole("ref", str(checkpoint), trainable=False)}
    found = []
    for engine in (group, one):
        engine.ensure_roles(role)
        found.append(engine.score_logprobs("ref", [[3, 4, 5], [6, 7], [8, 9, 10, 11]], [1.0, 0.5, 2.0]))
        engine.drop_role("ref")
    for mine, theirs in zip(*found, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def count_gathers(engine):
    """Start counting how often weights are gathered."""
    import torch.distributed as dist

    engine.gathers = 0

    def counting(call):
        def counted(*args, **kwargs):
            engine.gathers += 1
            return call(*args, **kwargs)

        return counted

    for name in ("all_gather_single", "all_gather_into_tensor"):  # PyTorch 2.13 has a new name for it
        if hasattr(dist, name):
            setattr(dist, name, counting(getattr(dist, name)))


def gathers(engine):
    found, engine.gathers = engine.gathers, 0
    return found, len(list(engine.actor.model.module.model.layers)) + 1


def test_a_rollout_gathers_the_weights_once_for_all_callers(group):
    group.end_rollout()
    group.run_on_all_ranks(count_gathers)
    expected = sampled_tokens(group)  # one call
    with ThreadPoolExecutor(6) as pool:  # as agents do; samples depend only on their seeds
        futures = [pool.submit(sampled_tokens, group, [request]) for request in REQUESTS]
        assert [future.result(timeout=60)[0] for future in futures] == expected
    for found, parts in group.run_on_all_ranks(gathers):
        assert found == parts
    group.train(rows(2), sft_loss_fn, 2)
    assert all(found > parts for found, parts in group.run_on_all_ranks(gathers)), "training gathers layers one by one"


def test_generating_on_one_replica_does_not_disturb_the_backward_pass_of_the_others(group):
    for _ in range(2):
        for request in REQUESTS:  # one at a time: all go to the first replica
            sampled_tokens(group, [request])
        assert group.train(rows(8), sft_loss_fn, 2)["update_skipped"] == 0.0


def test_requests_during_a_training_step_are_answered_after_it(group):
    with ThreadPoolExecutor(3) as pool:
        trained = [pool.submit(group.train, rows(8, seed=i), sft_loss_fn, 2) for i in range(2)]
        asked = [pool.submit(sampled_tokens, group, [request]) for request in REQUESTS]
        assert all(len(future.result(timeout=60)[0]) == 10 for future in asked)
        assert all(future.result(timeout=60)["update_skipped"] == 0.0 for future in trained)


def masked(batch):
    for row in batch:
        row.prompt_mask[:] = [True] * len(row.tokens)
    return batch


def steps(engine):
    """Run steps in which ranks have unequal work: packed passes, a rank without tokens to train on, a measurement."""
    packed = MicroBatching(max_tokens_per_mb=20)
    lonely = rows(3, seed=3)
    masked(lonely[:2])
    found = [
        engine.train(rows(5, seed=1), sft_loss_fn, packed),
        engine.train(rows(6, seed=2), dpo_loss_fn, 2),
        engine.train(lonely, sft_loss_fn, 1),
        engine.train(rows(9, seed=4), sft_loss_fn, 2, 2),
    ]
    found.append(engine.measure(rows(5, seed=5), sft_loss_fn, 2))
    found.append(engine.train(masked(rows(3, seed=6)), sft_loss_fn, 2))
    found.append(engine.train(rows(1, seed=7), sft_loss_fn, 2))
    return found


def test_ranks_with_unequal_work_keep_step(checkpoint, group, one, tmp_path):
    group.save_model(tmp_path / "begin")
    group.save_state(tmp_path / "begin")
    began = alone(tmp_path / "begin")  # with what the group learned in earlier tests
    began.load_state(tmp_path / "begin")
    try:
        expected, found = steps(began), steps(group)
        for mine, theirs in zip(found, expected, strict=True):
            for stats in (mine, theirs):
                stats.pop("num_micro_batches", None)  # ranks pack their own rows
            assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
        assert found[5]["update_skipped"] == 1.0, "no rank has anything to train on, so there is no update"
        began.save_model(tmp_path / "one")
    finally:
        began.close()
    group.save_model(tmp_path / "group")
    got, truth = (load_file(tmp_path / name / "model.safetensors") for name in ("group", "one"))
    assert set(got) == set(truth)
    for name, tensor in truth.items():
        assert (got[name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name
    assert (tmp_path / "group" / "config.json").read_text() == (tmp_path / "one" / "config.json").read_text()


def optimizer_bytes(engine):
    """Return the reported bytes of a rank's optimizer state, and those of its tensors that are not the model's weights."""
    optimizer = engine.actor.trained_by()
    optimizer.allocate()
    weights = {p.to_local().untyped_storage().data_ptr() for p in engine.actor.model.module.parameters()}
    masters = [share for share in optimizer._shares if share.untyped_storage().data_ptr() not in weights]
    moments = [v for state in optimizer._adam.state.values() for v in state.values() if torch.is_tensor(v) and v.dim()]
    return optimizer.held_bytes(), sum(tensor.nbytes for tensor in masters + moments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reported_size_of_the_optimizer_state_is_that_of_its_tensors(tmp_path, dtype):
    folder = save_tiny_checkpoint(tmp_path / "llama", "llama", hidden=96, layers=1)
    settings = OptimizerOptions(lr=1e-3, adam_8bit=True)
    made = EngineGroup(str(folder), EngineConfig(optimizer=settings, kv_cache_tokens=64, dtype=dtype), FSDP)
    try:
        for reported, stored in made.run_on_all_ranks(optimizer_bytes):
            assert reported == stored > 0
    finally:
        made.close()


@pytest.mark.long
def test_small_steps_move_the_fp32_masters_of_bf16_weights(checkpoint, tmp_path):
    settings = OptimizerOptions(lr=1e-5, eps=1e-6)
    found = {}
    for name, layout in (("one", None), ("two", FSDP)):
        config = EngineConfig(optimizer=settings, kv_cache_tokens=256, dtype=torch.bfloat16)
        engine = Engine(str(checkpoint), config) if layout is None else EngineGroup(str(checkpoint), config, layout)
        try:
            for step in range(3):
                engine.train(rows(6, seed=step), sft_loss_fn, 2)
            (tmp_path / name).mkdir()
            engine.save_model(tmp_path / name)
            engine.save_state(tmp_path / name)
            sampled_tokens(engine)
        finally:
            engine.close()
        found[name] = contents(tmp_path / name / "trainer_state" / "optimizer")
    begin = load_file(checkpoint / "model.safetensors")
    one, two = ({k.removeprefix("master."): v for k, v in found[n].items() if k.startswith("master.")} for n in found)
    assert one.keys() == two.keys() == begin.keys()
    for name in one:
        start = begin[name].to(torch.bfloat16).float()
        moved, expected = (two[name] - start).flatten(), (one[name] - start).flatten()
        assert torch.nn.functional.cosine_similarity(moved, expected, dim=0) > 0.95, name
        with safe_open(tmp_path / "two" / "model.safetensors", "pt") as file:
            assert torch.equal(file.get_tensor(name), two[name].to(torch.bfloat16))
    assert '"dtype": "bfloat16"' in (tmp_path / "two" / "config.json").read_text()
    resumed = Engine(str(tmp_path / "two"), EngineConfig(optimizer=settings, kv_cache_tokens=256, dtype=torch.bfloat16))
    resumed.load_state(tmp_path / "two")
    resumed.close()


@pytest.mark.long
def test_adapters_and_heads_of_bf16_models_resume_in_other_layouts(tmp_path):
    """One step in each of four layouts, each resumed from the one before, ends near four steps in one process."""
    pytest.importorskip("peft")
    base = str(save_tiny_checkpoint(tmp_path / "base", heads=4, hidden=64))
    critic = ModelRole("critic", base, trainable=True, optimizer={"lr": 1e-3, "eps": 1e-6})
    values = [row_with_values(row) for row in rows(6)]

    def steps(count, layout=None, source=None):
        target = tmp_path / f"saved-{len(list(tmp_path.iterdir()))}"
        adapter = AdapterOptions(rank=4) if source is None else AdapterOptions(adapter_path=str(source))
        settings = {"optimizer": OptimizerOptions(lr=1e-3, eps=1e-6), "adapter": adapter, "dtype": torch.bfloat16}
        config = EngineConfig(kv_cache_tokens=256, decode="eager", **settings)
        engine = Engine(base, config) if layout is None else EngineGroup(base, config, layout)
        try:
            engine.ensure_roles({"critic": critic}, source)
            if source is not None:
                engine.load_state(source)
            for _ in range(count):
                engine.train(rows(6), sft_loss_fn, 2)
                engine.train(values, value_loss_fn, 2, role="critic")
            target.mkdir()
            engine.save_model(target)
            engine.save_state(target)
        finally:
            engine.close()
        return target

    source = None
    for layout in (None, FSDP, Layout(2, 1), None):
        source = steps(1, layout, source)
    expected = steps(4)
    for name in ("optimizer", "critic_optimizer"):
        found, wanted = (contents(folder / "trainer_state" / name) for folder in (source, expected))
        assert found["head"] == wanted["head"]
        assert found.keys() == wanted.keys()
        masters = [key for key in wanted if key.startswith("master.")]
        assert masters == (["master.score.modules_to_save.default.weight"] if name == "critic_optimizer" else [])
        for key in masters:
            torch.testing.assert_close(found[key], wanted[key], rtol=0, atol=2e-4)


def row_with_values(row):
    length = len(row.tokens)
    return dataclasses.replace(row, values=[0.0] * length, returns=[1.0] * length)


def test_a_limit_on_sequences_below_one_is_refused_alike_by_one_and_by_two_replicas(group, one):
    for engine in (group, one):
        with pytest.raises(ValueError, match="max_running must be at least 1, got 0"):
            engine.set_max_running(0)


def test_a_rank_refuses_requests_while_its_weights_are_sharded(group):
    group.end_rollout()
    with pytest.raises(EngineError, match="call begin_rollout on all ranks first"):
        group.workers.call("engine.submit", REQUESTS)


def test_invalid_combinations_are_refused_before_loading():
    for ranks in (1, 2):
        with pytest.raises(
            UsageError, match=f"fsdp with world_size={ranks}, .*: FSDP needs at least two replicas.* or remove fsdp"
        ):
            Layout.of(ranks, ranks, None, fsdp=True)
    for option, layout, optimizer, adapter in (
        ("--load-in-4bit", FSDP, OptimizerOptions(), AdapterOptions(rank=4, load_in_4bit=True)),
        ("--lora-rank and --tp-size", Layout(2, 2, fsdp=True), OptimizerOptions(), AdapterOptions(rank=4)),
    ):
        options = LoadOptions(dtype=torch.float32, peers=RankContext(layout))
        with pytest.raises(UsageError, match=f"--fsdp with {option}: FSDP cannot shard "):
            load_role("actor", "/nowhere", "policy", options, optimizer, True, adapter)
