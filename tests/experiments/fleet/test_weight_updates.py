"""After a weight update, replicas have the trainer's weights, bit for bit, in every transfer mode."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from areno.engine.engine import Engine
from areno.engine.model.adapter import AdapterOptions
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.segment import Segment
from areno.errors import EngineError, UsageError
from areno.rollouts.fleet import weight_update
from areno.rollouts.fleet.tensors import layout, rollout_specs
from areno.rollouts.fleet.weight_transfer import WeightOptions
from areno.rollouts.fleet.weight_update import Update
from areno.types import Request, SamplingParams
from tests.experiments.fleet.conftest import config
from tests.experiments.fleet.support import (
    adapter_of,
    answers,
    generated,
    learn,
    parameters_of,
    requests,
    same,
    wait_for_tokens,
    wait_until,
)

MODES = ("shm", "xccl", "disk")


def replicas_of(fleet, function=parameters_of):
    return [found for group in fleet._up().values() for found in group.run_on_all_ranks(function)]


def test_every_mode_transfers_the_same_bits_and_a_fresh_engine_gives_the_same_answers(
    policy, trainer, open_fleet, tmp_path
):
    fleet = open_fleet(replicas=2, weights=WeightOptions(weight_chunked_mem_mb=1, folder=tmp_path / "updates"))
    before = answers(trainer, requests(4))
    assert answers(fleet, requests(4)) == before
    for version, mode in enumerate((*MODES, "shm", "xccl"), start=1):
        learn(trainer, seed=version)
        report = fleet.update_weights(trainer, version, mode, verify=True)
        assert (report.version, report.mode, set(report.pauses_s)) == (version, mode, {0, 1})
        assert report.nbytes == sum(p.numel() * 4 for _, p in trainer.actor.model.parameters())  # tied weights once
        for found in replicas_of(fleet):
            assert same(found, parameters_of(trainer))
        trainer.save_model(tmp_path / f"new-{version}")
        fresh = Engine(str(tmp_path / f"new-{version}"), config())
        expected = answers(fresh, requests(4))
        fresh.close()
        results = [future.result(60).sequences[0] for future in fleet.submit(requests(4))]
        assert [result.resp_tokens for result in results] == expected
        assert {v for result in results for v in result.versions} == {version}
        assert expected != before
    assert os.listdir(tmp_path / "updates") == []  # each update clears the folder of the previous one


def test_each_token_carries_the_version_of_the_weights_that_sampled_it(policy, trainer, open_fleet):
    """Replay each sample with the weights of every version: a token is the likeliest under the version that it carries."""
    fleet = open_fleet()
    weights = [parameters_of(trainer)]
    futures = fleet.submit(requests(3, tokens=900))
    for version, mode in enumerate(MODES, start=1):
        wait_for_tokens(fleet, 60)
        learn(trainer, seed=version)
        weights.append(parameters_of(trainer))
        fleet.update_weights(trainer, version, mode)
    module = AutoModelForCausalLM.from_pretrained(policy)
    for request, future in zip(requests(3), futures, strict=True):
        sample = future.result(timeout=120).sequences[0]
        assert sample.versions == sorted(sample.versions)
        assert set(sample.versions) == {0, 1, 2, 3}
        context = request.prompt_tokens + sample.resp_tokens
        for version, tensors in enumerate(weights):
            module.load_state_dict(tensors, strict=False)
            module.tie_weights()
            with torch.no_grad():
                logits = module(torch.tensor([context])).logits[0][len(request.prompt_tokens) - 1 : -1]
            places = [i for i, v in enumerate(sample.versions) if v == version]
            logp = logits.log_softmax(-1)
            for i in places:
                token = sample.resp_tokens[i]
                assert logp[i, token] >= logp[i].max() - 1e-4
                assert sample.resp_logprobs[i] == pytest.approx(float(logp[i, token]), abs=1e-4)


def test_saving_training_and_evaluating_do_not_block_generation(trainer, open_fleet, tmp_path):
    fleet = open_fleet()
    futures = fleet.submit(requests(3, tokens=2000))
    stop, counts = threading.Event(), []

    def look():
        while not stop.wait(0.02):
            counts.append(generated(fleet))

    watcher = threading.Thread(target=look)
    wait_until(lambda: generated(fleet) > 20)
    watcher.start()
    for _ in range(5):
        trainer.save_model(tmp_path / "saved")
        learn(trainer)
    evaluated = answers(fleet, requests(2, tokens=4))
    stop.set()
    watcher.join()
    assert [len(tokens) for tokens in evaluated] == [4, 4]
    assert not any(future.done() for future in futures) or counts[-1] > 1000
    assert counts[-1] > counts[0] + 50
    for future in futures:
        assert len(future.result(timeout=120).sequences[0].resp_tokens) == 2000


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float32, id="fp32", marks=pytest.mark.long)]
)
def test_master_weights_are_rounded_as_the_trainer_rounds_them(policy, open_fleet, dtype):
    """A bf16 trainer has fp32 master weights; an fp32 trainer has a bf16 replica. Both round to nearest."""
    trainer = Engine(str(policy), config(dtype=dtype))
    fleet = open_fleet(config(dtype=torch.bfloat16))
    learn(trainer)
    for version, mode in enumerate(MODES, start=1):
        fleet.update_weights(trainer, version, mode, verify=mode != "disk" or dtype == torch.bfloat16)
        found = replicas_of(fleet)[0]
        expected = {name: p.to(torch.bfloat16) for name, p in parameters_of(trainer).items()}
        assert same(found, expected)
    if dtype == torch.bfloat16:
        masters = {p.key.removeprefix("master."): p.values for p in trainer.actor.optimizer.state_parts()}
        assert all(torch.equal(found[name], masters[name].to(torch.bfloat16)) for name in found)
    trainer.close()


# -- adapters --------------------------------------------------------------------------------------------------------

LORA = AdapterOptions(rank=4)


def test_only_the_adapter_is_sent_and_generation_uses_the_new_merged_weights(policy, open_fleet):
    trainer = Engine(str(policy), config(adapter=LORA))
    fleet = open_fleet(config(adapter=LORA))
    futures = fleet.submit(requests(2, tokens=600))
    wait_until(lambda: generated(fleet) > 40)
    for version, mode in enumerate(MODES, start=1):
        learn(trainer, seed=version)
        report = fleet.update_weights(trainer, version, mode, verify=True)
        assert report.nbytes == sum(p.numel() * 4 for _, p in trainer.actor.model.parameters())  # far less than all
        assert same(replicas_of(fleet, adapter_of)[0], adapter_of(trainer))
        assert answers(fleet, requests(3)) == answers(trainer, requests(3))
        trainer.wait_idle()
    assert {3} < {v for future in futures for v in future.result(60).sequences[0].versions}
    trainer.close()


def test_a_request_during_a_weight_change_leaves_no_partially_merged_weights(policy):
    """Submitting merges the adapter into the weights; a merge while the adapter changes must not persist."""
    replica = Engine(str(policy), config(adapter=LORA, trains="nothing"))
    answers(replica, requests(1))
    adapter, module = replica.actor.model.adapter, replica.actor.model.module
    assert adapter.merged
    named = dict(module.named_parameters())
    lora = [name for name in named if ".lora_" in name]
    with replica.loop.weights_changing(1), torch.no_grad():
        assert not adapter.merged
        for half in (lora[::2], lora[1::2]):
            for name in half:
                named[name].normal_(0, 0.1)
            future = replica.submit(requests(1))[0]
    layer = module.model.layers[0].self_attn.q_proj
    summed = layer.base_layer.weight.clone()
    assert adapter.merged
    assert set(future.result(60).sequences[0].versions) == {1}
    adapter.unmerge()
    delta = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert torch.allclose(summed, layer.base_layer.weight + delta, atol=1e-6)
    assert not torch.allclose(summed, layer.base_layer.weight, atol=1e-3)
    replica.close()


@pytest.mark.parametrize("mode", ["shm", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("xccl", "disk"))])
def test_replicas_without_an_adapter_get_the_merged_weights(policy, open_fleet, mode):
    trainer = Engine(str(policy), config(adapter=LORA))
    fleet = open_fleet()
    learn(trainer)
    fleet.update_weights(trainer, 1, mode, verify=True)
    trainer.actor.model.adapter.merge()
    merged = {name.replace(".base_layer", ""): p for name, p in parameters_of(trainer).items() if ".lora_" not in name}
    assert same(replicas_of(fleet)[0], merged)
    trainer.close()


@pytest.mark.long
def test_an_adapter_that_cannot_be_merged_exactly_is_refused(policy, open_fleet):
    trainer = Engine(str(policy), config(adapter=LORA, dtype=torch.bfloat16))
    fleet = open_fleet(config(dtype=torch.bfloat16))
    with pytest.raises(UsageError, match="give the fleet an EngineConfig with the trainer's adapter"):
        fleet.update_weights(trainer, 1)
    trainer.close()


def versions_while_learning(trainer, fleet):
    """Make three updates, one in each mode, while requests run; returns the versions that sampled each answer's tokens."""
    futures = fleet.submit(requests(2, tokens=150))
    for version, mode in enumerate(MODES, start=1):
        wait_for_tokens(fleet, 8)
        learn(trainer, seed=version)
        fleet.update_weights(trainer, version, mode, verify=True)
    found = [set(future.result(timeout=120).sequences[0].versions) for future in futures]
    assert all(versions == found[0] for versions in found)
    return found[0]


# -- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grid",
    [
        pytest.param(Layout(2, 1), id="dp2", marks=pytest.mark.long),
        pytest.param(Layout(2, 1, fsdp=True), id="fsdp2"),
        pytest.param(Layout(1, 2), id="tp2"),
        pytest.param(Layout(2, 2, fsdp=True), id="fsdp2xtp2", marks=pytest.mark.long),
        pytest.param(Layout(cp_size=2), id="cp2", marks=pytest.mark.long),
    ],
)
def test_a_trainer_on_several_ranks_updates_replicas_on_one_rank(policy, open_fleet, grid):
    group = EngineGroup(str(policy), config(), grid)
    try:
        fleet = open_fleet()
        for version, mode in enumerate(MODES, start=1):
            learn(group, seed=version)
            fleet.update_weights(group, version, mode, verify=True)
            assert same(replicas_of(fleet)[0], group.run_on_all_ranks(parameters_of)[0])
            assert answers(fleet, requests(2)) == answers(group, requests(2))
    finally:
        group.close()


@pytest.mark.parametrize(
    "grid",
    [
        pytest.param(Layout(pp_size=2), id="pp2"),
        pytest.param(Layout(2, fsdp=True, pp_size=2), id="fsdp2xpp2", marks=pytest.mark.long),
    ],
)
def test_the_pipeline_stages_of_a_trainer_update_replicas_with_all_layers(policy, open_fleet, grid, tmp_path):
    group = EngineGroup(str(policy), config(), grid)
    try:
        fleet = open_fleet()
        for version, mode in enumerate(MODES, start=1):
            learn(group, seed=version)
            fleet.update_weights(group, version, mode, verify=True)
            stages = [found for found in group.run_on_all_ranks(parameters_of) if found]
            assert same(replicas_of(fleet)[0], {name: value for found in stages for name, value in found.items()})
        group.save_model(tmp_path)
        saved = Engine(str(tmp_path), config())
        assert answers(fleet, requests(2)) == answers(saved, requests(2))
        saved.close()
    finally:
        group.close()


@pytest.mark.long
def test_an_adapter_is_sent_to_ranks_that_generate_with_sharded_merged_weights(policy, open_fleet):
    trainer = Engine(str(policy), config(adapter=LORA))
    fleet = open_fleet(config(adapter=LORA), tp_size=2)
    assert versions_while_learning(trainer, fleet) == {0, 1, 2, 3}
    for found in replicas_of(fleet, adapter_of):
        assert same(found, adapter_of(trainer))
    assert answers(fleet, requests(2)) == answers(trainer, requests(2))
    trainer.close()


@pytest.mark.long
def test_a_tensor_parallel_trainer_with_an_adapter_updates_replicas_without_one(policy, open_fleet):
    group = EngineGroup(str(policy), config(adapter=LORA), Layout(1, 2))
    try:
        fleet = open_fleet()
        learn(group)
        fleet.update_weights(group, 1, "shm", verify=True)
        assert answers(fleet, requests(2)) == answers(group, requests(2))
        summed = group.run_on_all_ranks(parameters_of)[0]  # generation has left the adapter merged
        merged = {name.replace(".base_layer", ""): p for name, p in summed.items() if ".lora_" not in name}
        assert same(replicas_of(fleet)[0], merged)
        group.end_rollout()
        apart = group.run_on_all_ranks(parameters_of)[0]
        assert not torch.equal(apart[first := next(n for n in apart if n.endswith("base_layer.weight"))], summed[first])
    finally:
        group.close()


def test_weights_change_while_tensor_parallel_ranks_generate(policy, trainer, open_fleet):
    fleet = open_fleet(tp_size=2)
    assert versions_while_learning(trainer, fleet) == {0, 1, 2, 3}
    for found in replicas_of(fleet):
        assert same(found, parameters_of(trainer))
    assert answers(fleet, requests(2)) == answers(trainer, requests(2))
    learn(trainer)
    fleet.update_weights(trainer, 4)  # while no request runs
    assert answers(fleet, requests(2)) == answers(trainer, requests(2))


# -- corrupted and failed updates ------------------------------------------------------------------------------------


def written(trainer, memory) -> Update:
    specs = tuple(rollout_specs(trainer))
    update = Update(version=1, specs=specs, segment=memory.path, digests=weight_update.checksums(trainer, specs))
    weight_update.send(trainer, update)
    return update


def test_a_bit_flipped_in_transfer_is_found_and_the_old_weights_stay(policy, trainer):
    replica = Engine(str(policy), config(trains="nothing"))
    memory = Segment(layout(rollout_specs(trainer))[1])
    learn(trainer)
    update = written(trainer, memory)
    before = parameters_of(replica)
    with open(memory.path, "r+b") as file:
        file.seek(1001)
        byte = file.read(1)[0]
        file.seek(1001)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(EngineError, match=r"1 of \d+ received tensors differ from the sent tensors"):
        weight_update.receive(replica, update)
    assert same(parameters_of(replica), before)
    assert replica.loop.version == 0
    weight_update.receive(replica, replace(written(trainer, memory), version=7))
    assert same(parameters_of(replica), parameters_of(trainer))
    assert replica.loop.version == 7
    memory.close()
    replica.close()


def test_a_failed_weight_change_answers_no_request_from_partial_weights(policy):
    replica = Engine(str(policy), config(trains="nothing"))
    future = replica.submit(requests(1, tokens=4000))[0]
    wait_until(lambda: replica.load().generated_total > 5)
    with pytest.raises(RuntimeError, match="half way"), replica.loop.weights_changing(1):
        raise RuntimeError("half way")
    with pytest.raises(EngineError, match="half way"):
        future.result(timeout=10)
    with pytest.raises(EngineError, match="the rollout loop has failed"):
        replica.submit(requests(1))
    replica.close()


def test_mistakes_are_named(policy, trainer, open_fleet, tiny_checkpoint):
    fleet = open_fleet(path=tiny_checkpoint)
    with pytest.raises(UsageError, match="weight_update_mode=nccl is unknown; use one of shm, xccl, disk"):
        fleet.update_weights(trainer, 1, "nccl")
    with pytest.raises(UsageError, match="the same checkpoint"):
        fleet.update_weights(trainer, 1)
    with pytest.raises(UsageError, match="replicas must be at least 1, got 0"):
        open_fleet(replicas=0)
    with pytest.raises(EngineError, match="5000 tokens leaves no room for an answer in a context of 4096"):
        fleet.submit([Request([5] * 5000, SamplingParams())])
