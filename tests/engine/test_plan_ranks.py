"""The memory plan of several ranks, against what real ranks hold."""

from __future__ import annotations

import json

import pytest
import torch

from areno.cli.main import main
from areno.engine.engine_config import EngineConfig
from areno.engine.model.loading import LoadOptions, load_causal_lm
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.parts import local
from areno.engine.plan.memory_plan import make_plan
from areno.engine.plan.sizes import RunSizes
from areno.engine.train.optimizer import OptimizerOptions
from areno.errors import UsageError
from areno.types import Request, SamplingParams
from tests.engine.test_plan import MIB, options, part
from tests.support.examples import some_quick
from tests.support.tiny import save_tiny_checkpoint


def held(engine):
    """Return the bytes of one rank's weights, optimizer states and KV cache."""
    optimizer = engine.actor.trained_by()
    optimizer.allocate()
    states = [t for entry in optimizer._adam.state.values() for t in entry.values() if torch.is_tensor(t) and t.ndim]
    module = engine.actor.model.module
    tensors = {
        t.data_ptr(): t.numel() * t.element_size() for t in map(local, [*module.parameters(), *module.buffers()])
    }
    states_bytes = sum(
        t.numel() * t.element_size() for t in [*states, *([] if optimizer._shared_memory else [optimizer._master])]
    )
    return sum(tensors.values()), states_bytes, engine.loop.cache.nbytes()


@pytest.mark.parametrize(
    ("layout", "low"),
    [
        pytest.param(Layout(2, 1), True, id="dp2"),
        pytest.param(Layout(1, 2), False, id="tp2", marks=pytest.mark.long),
        pytest.param(Layout(2, 2), False, id="dp2xtp2", marks=pytest.mark.long),
    ],
)
def test_planned_weights_states_and_cache_match_real_ranks(layout, low, tmp_path):
    path = save_tiny_checkpoint(tmp_path / "model", "qwen3", hidden=128, heads=4)
    run = options(
        path, world_size=layout.world_size, tp_size=layout.tp_size, adam_8bit=low, max_new_tokens=100, n_samples=2
    )
    plan = make_plan(run)
    config = EngineConfig(optimizer=OptimizerOptions(adam_8bit=low), decode="eager", max_running=8)
    group = EngineGroup(str(path), config, layout)
    try:
        group.set_max_running(run.running_sequences)
        sampling = SamplingParams(max_new_tokens=100, ignore_eos=True)
        for future in group.submit([Request([i] * 40, sampling, [0, 1]) for i in range(1, 5)]):
            future.result()
        found = group.run_on_all_ranks(held)
    finally:
        group.close()
    assert max(weights for weights, _, _ in found) == pytest.approx(part(plan, "backward", "weights"), rel=0.001)
    assert max(states for _, states, _ in found) == pytest.approx(part(plan, "backward", "optimizer"), rel=0.001)
    assert max(cache for _, _, cache in found) == part(plan, "rollout", "kv_cache")


def test_replicas_divide_states_rows_and_sequences(tiny_checkpoint):
    one, two = (make_plan(options(tiny_checkpoint, world_size=n, batch_size=16, mini_bs=64)) for n in (1, 2))
    assert part(two, "backward", "weights") == part(one, "backward", "weights")
    # Moments of half the weights; the masters are the weights, which the replicas share.
    assert part(two, "backward", "optimizer") == pytest.approx(0.5 * part(one, "backward", "optimizer"), rel=0.01)
    assert part(one, "rollout", "gradients") == 0
    assert part(two, "rollout", "gradients") == part(two, "backward", "gradients"), "their memory stays allocated"
    assert part(two, "rollout", "kv_cache") < part(one, "rollout", "kv_cache")
    assert part(two, "forward", "activations") < part(one, "forward", "activations"), "half the rows in a pass"
    assert two.needed == 2 * two.peak.total - 4 * two.parameters, "the weights are in memory once"
    assert not make_plan(options(tiny_checkpoint, world_size=2), two.peak.total + MIB).fits


def test_a_replica_gets_the_larger_share_of_an_odd_number_of_rows(tiny_checkpoint):
    run = options(tiny_checkpoint, world_size=2, batch_size=5, n_samples=1, mini_bs=8)
    assert RunSizes(run, torch.device("cpu")).microbatch(10) == ([10] * 3, 1)
    pairs = options(tiny_checkpoint, algo="dpo", world_size=2, batch_size=5, mini_bs=8)
    assert RunSizes(pairs, torch.device("cpu")).microbatch(10) == ([10] * 6, 1)


@pytest.mark.parametrize("family", some_quick(["llama", "qwen3", "gemma3", "qwen3_moe", "phi3"], "gemma3", "qwen3_moe"))
def test_a_tensor_parallel_rank_holds_a_shard(family, tmp_path):
    path = save_tiny_checkpoint(tmp_path / family, family, heads=4, hidden=64)
    one, two = (make_plan(options(path, world_size=n, tp_size=n)) for n in (1, 2))
    module = load_causal_lm(str(path), LoadOptions(dtype=torch.float32)).module
    whole = sum(p.numel() for name, p in module.named_parameters() if "norm" in name or "mlp.gate.weight" in name)
    cut = two.parameters - whole
    tensors = part(one, "load", "weights") - 4 * one.parameters  # tables of positions and the like
    assert two.parameters == one.parameters
    assert part(two, "load", "weights") == pytest.approx(4 * (whole + cut / 2) + tensors, rel=0.001)
    # In one buffer, where each tensor begins at a multiple of 32 entries.
    assert part(two, "backward", "gradients") == pytest.approx(4 * (whole + cut / 2), rel=0.005)
    halves = part(two, "rollout", "kv_cache") / part(one, "rollout", "kv_cache")
    assert halves == pytest.approx(1.0 if family == "phi3" else 0.5), "phi3 gathers its keys"
    assert two.logits == pytest.approx(one.logits / 2, rel=0.01)


def test_an_adapter_is_planned_on_a_shard_or_refused_as_in_the_run(tmp_path):
    """phi3 gathers the outputs of adapted layers, and experts cannot be adapted on shards."""
    pytest.importorskip("peft")
    paths = {name: save_tiny_checkpoint(tmp_path / name, name, heads=4, hidden=64) for name in ("phi3", "qwen3_moe")}
    one, two = (make_plan(options(paths["phi3"], world_size=n, tp_size=n, lora_rank=4)) for n in (1, 2))
    assert part(two, "backward", "weights") < part(one, "backward", "weights")
    assert part(two, "backward", "activations") < part(one, "backward", "activations")
    with pytest.raises(
        UsageError, match=r"--tp-size: an adapter of model\.layers\.0\.mlp\.experts .* cannot be sharded"
    ):
        make_plan(options(paths["qwen3_moe"], world_size=2, tp_size=2, lora_rank=4))


def test_offloaded_activations_count_as_host_memory(tiny_checkpoint):
    run = {"device": "cuda", "dtype": "float32", "mini_bs": 4, "kv_cache_tokens": 4096, "available": 2**40}
    available = run.pop("available")
    near, far = (
        make_plan(options(tiny_checkpoint, offload_activations=offload, **run), available) for offload in (False, True)
    )
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    inputs = config["num_hidden_layers"] * 4 * 64 * config["hidden_size"] * 4  # layers, rows, tokens, width, bytes
    assert (near.host, far.host) == (0, inputs)
    assert part(near, "forward", "activations") - part(far, "forward", "activations") >= inputs / 2
    ranks = make_plan(options(tiny_checkpoint, offload_activations=True, world_size=2, **run), available)
    assert ranks.sharing == 1
    assert ranks.needed == ranks.peak.total
    assert ranks.host == 2 * inputs, "all ranks of the machine, each with its own rows"


def test_the_command_reports_one_rank_and_all_ranks(tmp_path, tiny_checkpoint, capsys):
    words = [
        "plan",
        "--ckpt",
        str(tiny_checkpoint),
        "--device",
        "cpu",
        "--world-size",
        "2",
        "--kv-cache-tokens",
        "9000",
    ]
    assert main(words) == 0
    text = capsys.readouterr().out
    for line in (
        "the columns show the memory of one rank at the peak of each phase",
        "all 2 ranks",
        "Ranks: 2 replicas; all share",
    ):
        assert line in text
    assert main([*words, "--tp-size", "2"]) == 2
    assert "num_key_value_heads 1, which is not divisible by 2" in capsys.readouterr().err
    words[2] = str(save_tiny_checkpoint(tmp_path / "model", heads=4))
    assert main([*words, "--tp-size", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ranks"] == {"world_size": 2, "tp_size": 2, "share_memory": True}
    assert data["peak"]["all_ranks"] == 2 * data["peak"]["bytes"]
