"""Adapters of sharded models equal those of one process and are saved unsharded.

The ground truth is the engine in one process, whose adapters ``test_adapter.py`` compares with ``peft``.
"""

from __future__ import annotations

import functools
import json

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM

peft = pytest.importorskip("peft")

from areno.engine.engine import Engine  # noqa: E402
from areno.engine.engine_config import EngineConfig  # noqa: E402
from areno.engine.model.adapter import AdapterOptions  # noqa: E402
from areno.engine.model.loading import LoadOptions, add_adapter, load_causal_lm  # noqa: E402
from areno.engine.model.packing import PackedPlan  # noqa: E402
from areno.engine.parallel.group import EngineGroup  # noqa: E402
from areno.engine.parallel.layout import Layout  # noqa: E402
from areno.engine.parallel.rank_context import RankContext  # noqa: E402
from areno.engine.parallel.workers import WorkerGroup  # noqa: E402
from areno.engine.role import load_role  # noqa: E402
from areno.engine.train.optimizer import OptimizerOptions  # noqa: E402
from areno.errors import UsageError  # noqa: E402
from areno.loss_fns import sft_loss_fn, value_loss_fn  # noqa: E402
from areno.types import ModelRole  # noqa: E402
from tests.engine.parallel.replica import members  # noqa: E402
from tests.engine.parallel.test_layouts import (  # noqa: E402
    PROMPTS,
    REQUESTS,
    assert_near,
    assert_weights,
    critic,
    lesson,
    rows,
)
from tests.engine.parallel.test_layouts import course as layout_course  # noqa: E402
from tests.support.tiny import save_tiny_checkpoint, tiny_module  # noqa: E402

# Where a gradient is only rounding error, Adam divides it by eps; a smaller eps would amplify it.
SETTINGS = {"lr": 1e-2, "eps": 1e-4, "grad_clip_norm": 0.5, "weight_decay": 0.01}
FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("ckpt") / "qwen3", "qwen3", heads=4, hidden=64)


def engine(path, layout=None, **lora):
    adapter = AdapterOptions.of({"rank": 4, **lora}, "lora")
    config = EngineConfig(optimizer=OptimizerOptions(**SETTINGS), kv_cache_tokens=4096, decode="eager", adapter=adapter)
    return Engine(str(path), config) if layout is None else EngineGroup(str(path), config, layout)


def roles(path):
    settings = SETTINGS | {"eps": 1e-3}  # behind a zero-initialized head, the first gradients are only rounding error
    return {
        "critic": critic(path, settings),
        "ref": ModelRole("ref", str(path), trainable=False, kind="policy"),
    }


def course(engine, folder):
    """Return what is compared between layouts, with adapters instead of weights, and the reference's scores."""
    found = layout_course(engine, folder, roles(engine.path), FILE, [1.0] * len(PROMPTS))
    return found | {"reference": engine.score_logprobs("ref", PROMPTS, 1.0)}


@pytest.fixture(scope="module")
def truth(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    alone = engine(checkpoint)
    found = course(alone, folder)
    alone.close()
    return found | {"folder": folder}


def kept(engine):
    """Return, on a rank, whether the adapter can be merged and is, and which of its weights are sharded."""
    adapter = engine.actor.model.adapter
    named = dict(engine.actor.model.module.named_parameters())
    cut = {name for name, p in named.items() if isinstance(p, DTensor) and ".lora_" in name}
    return {"merged": adapter.merged, "merges": adapter.merges, "cut": cut, "partial": adapter.partial_names()}


def base_of(engine):
    """Return a rank's shards of the frozen weights."""
    module = engine.actor.model.module
    return {n: p.detach().to_local().clone() for n, p in module.named_parameters() if n.endswith("base_layer.weight")}


LAYOUTS = [
    pytest.param(Layout(1, 2), id="tp2"),
    pytest.param(Layout(2, 2), id="dp2xtp2", marks=pytest.mark.long),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_equal_those_of_one_rank(layout, checkpoint, truth, tmp_path):
    group = engine(checkpoint, layout)
    try:
        before = group.workers.call("apply", base_of)
        for found in group.workers.call("apply", kept):
            assert found["merges"]
            assert {name.split(".")[-3] for name in found["cut"] if "o_proj" in name or "down_proj" in name} == {
                "lora_A"
            }
            assert {name.split(".")[-3] for name in found["cut"] if "q_proj" in name or "up_proj" in name} == {"lora_B"}
            assert len(found["cut"]) == len(found["partial"]) == 2 * 7
        found = course(group, tmp_path)
        for future in group.submit(REQUESTS):
            future.result()
        # Every rank generates with its own shards merged, and afterwards uses the untouched weights again.
        assert all(found["merged"] for found in group.workers.call("apply", kept))
        group.end_rollout()
        assert not any(found["merged"] for found in group.workers.call("apply", kept))
        for mine, old in zip(group.workers.call("apply", base_of), before, strict=True):
            assert all(torch.equal(mine[name], old[name]) for name in old)
    finally:
        group.close()
    for name, weights in truth["weights"].items():
        assert found["weights"][name].keys() == weights.keys()
        assert_weights(found["weights"][name], weights)
    for name, stats in truth["stats"].items():
        assert found["stats"][name] == pytest.approx(stats, rel=1e-3, abs=1e-5), name
    for mine, theirs in zip(found["results"], truth["results"], strict=True):
        for got, expected in zip(mine.sequences, theirs.sequences, strict=True):
            assert got.resp_tokens == expected.resp_tokens
            assert got.resp_logprobs == pytest.approx(expected.resp_logprobs, abs=1e-4)
    for request, result, again in zip(REQUESTS, found["results"], found["again"], strict=True):
        assert result.sequences[0].resp_logprobs == pytest.approx(again[len(request.prompt_tokens) :], abs=1e-5)
    for key in ("logprobs", "values", "reference"):
        assert_near(found[key], truth[key])
    assert found["reference"][0] != pytest.approx(found["logprobs"][0], abs=1e-2)
    for part in ("", "critic"):
        mine, theirs = (json.loads((f / part / "adapter_config.json").read_text()) for f in (tmp_path, truth["folder"]))
        for config in (mine, theirs):
            config["target_modules"] = sorted(config["target_modules"])
        assert mine == theirs
    stock = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), str(tmp_path))
    with torch.no_grad():
        logits = stock(input_ids=torch.tensor([PROMPTS[0]])).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(PROMPTS[0])[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found["logprobs"][0][1:]), expected, rtol=0, atol=1e-5)


@pytest.mark.long
def test_an_adapter_moves_between_layouts(checkpoint, truth, tmp_path):
    """Two more steps after each resume in another layout, there and back, equal those after resumes in one process."""

    def resume_and_train(source, layout, folder):
        resumed = engine(checkpoint, layout, adapter_path=str(source), rank=0)
        try:
            resumed.ensure_roles(roles(checkpoint))
            resumed.load_state(source)
            for step in range(2):
                lesson(resumed, "grpo", step)
                resumed.train(rows(6, seed=step), value_loss_fn, 2, role="critic")
            resumed.save_model(folder)
            resumed.save_state(folder)
        finally:
            resumed.close()

    source, truth_source = truth["folder"], truth["folder"]
    for index, layout in enumerate((Layout(2, 2), None, Layout(1, 2))):
        target, true_target = tmp_path / f"{index}", tmp_path / f"{index}-truth"
        resume_and_train(source, layout, target)
        resume_and_train(truth_source, None, true_target)
        for part in ("", "critic"):
            assert_weights(load_file(target / part / FILE), load_file(true_target / part / FILE))
        source, truth_source = target, true_target


# -- layers of all kinds, without an engine ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    made = WorkerGroup(members(2, tmp_path_factory.mktemp("meet")))
    yield made
    made.close()


def made(family, folder, **config):
    tiny_module(family, vocab=513, layers=2, sharpen=1.0, **config).save_pretrained(folder)
    return str(folder)


def learned(peers, path, **lora):
    """Return the unsharded adapter after three steps of several microbatches, and its log-probs, unmerged and merged."""
    adapter, settings = AdapterOptions.of({"rank": 3, **lora}, "lora"), OptimizerOptions(**SETTINGS)
    role = load_role("actor", path, "policy", LoadOptions(dtype=torch.float32, peers=peers), settings, True, adapter)
    for step in range(3):
        role.training.run(rows(7, seed=step), sft_loss_fn, 2)
    state = role.model.adapter.state() or {
        f"base_model.model.{name}": p.detach() for name, p in role.model.parameters()
    }
    apart = role.score("logprobs", PROMPTS, 4)
    role.model.adapter.merge()
    assert role.model.adapter.merged
    together = role.score("logprobs", PROMPTS, 4)
    return {"state": state, "apart": apart, "together": together}


@pytest.mark.parametrize(
    ("family", "config", "lora"),
    [
        pytest.param("qwen2", {}, {}, marks=pytest.mark.long),
        # Gathered outputs, and inputs that are split.
        pytest.param("phi3", {}, {}, marks=pytest.mark.long),
        pytest.param("gemma2", {}, {"target_modules": "q_proj,down_proj", "alpha": 5.0}, marks=pytest.mark.long),
        ("llama", {"tie_word_embeddings": False}, {"target_modules": ["lm_head", "o_proj"]}),
        pytest.param("qwen3_moe", {}, {"target_modules": "q_proj,o_proj"}, marks=pytest.mark.long),
        ("llama", {"intermediate_size": 129}, {}),  # does not divide
    ],
)
def test_layers_of_every_kind_learn_as_in_one_process(family, config, lora, pair, tmp_path):
    path = made(family, tmp_path, **config)
    expected = learned(RankContext(), path, **lora)
    assert any("lora_B" in name for name in expected["state"])
    for found in pair.call("apply", functools.partial(learned, **lora), path):
        # Adam takes equally large steps where a gradient is almost zero, and there rounding matters.
        assert_weights(found["state"], expected["state"], tolerance=3e-5)
        for key in ("apart", "together"):
            assert_near(found[key], expected["apart"])


def count_collectives(peers, path, lora):
    """Return the number of collectives after a forward and after the backward pass."""
    options = LoadOptions(dtype=torch.float32, peers=peers)
    model = load_causal_lm(path, options)
    if lora:
        model = add_adapter(model, "policy", AdapterOptions(rank=3), path)
    plan = PackedPlan([9], model.device)
    counts = []
    with CommDebugMode() as heard:
        hidden = model.body(torch.arange(9), plan.position_ids, plan)
        counts.append(heard.get_total_counts())
        hidden.sum().backward()
    return [*counts, heard.get_total_counts()]


def test_an_adapter_adds_no_communication(pair, tmp_path):
    path = made("llama", tmp_path)
    [plain, _], [adapted, _] = (pair.call("apply", count_collectives, path, lora) for lora in (False, True))
    assert adapted[0] == plain[0] > 0
    assert adapted[1] <= plain[1]


def scored(peers, path):
    role = load_role("ref", path, "policy", LoadOptions(dtype=torch.float32, peers=peers), None, False)
    return role.score("logprobs", PROMPTS, 4)


def test_an_adapter_folder_is_loaded_as_a_model(pair, tmp_path):
    path = made("llama", tmp_path / "base")
    options = LoadOptions(dtype=torch.float32)
    model = add_adapter(load_causal_lm(path, options), "policy", AdapterOptions(rank=3), path)
    for _, parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.adapter.save(tmp_path / "adapter")
    expected, plain = scored(RankContext(), str(tmp_path / "adapter")), scored(RankContext(), path)
    assert expected[0] != pytest.approx(plain[0], abs=1e-2)
    for found in pair.call("apply", scored, str(tmp_path / "adapter")):
        assert_near(found, expected)


def adapter_of(path, folder, **config):
    """Save a random adapter, and return its model and its folder."""
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **config)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path), config).eval()
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(folder)
    return adapted, str(folder)


@pytest.mark.parametrize("more", [{"use_dora": True}, {"lora_bias": True}], ids=["dora", "biases"])
def test_an_adapter_of_a_replicated_layer_is_merged_completely(more, pair, tmp_path):
    path = made("granitemoe", tmp_path / "base", attention_bias=True)  # its attention is not sharded
    foreign, folder = adapter_of(path, tmp_path / "adapter", target_modules=["v_proj"], **more)
    with torch.no_grad():
        logits = foreign(torch.tensor([PROMPTS[0]]), use_cache=False).logits[0, :-1]
    expected = logits.log_softmax(-1)[range(len(logits)), PROMPTS[0][1:]].tolist()
    for found in [scored(RankContext(), folder), *pair.call("apply", scored, folder)]:
        assert found[0][1:] == pytest.approx(expected, abs=1e-4)


def test_an_adapter_with_a_bias_that_cannot_be_merged_is_refused(pair, tmp_path):
    path = made("llama", tmp_path / "base")
    _, folder = adapter_of(path, tmp_path / "adapter", target_modules=["v_proj"], lora_bias=True)
    for score in (functools.partial(scored, RankContext()), functools.partial(pair.call, "apply", scored)):
        with pytest.raises(UsageError, match=r"has a bias \(lora_bias\) for .*v_proj, but this layer has no bias"):
            score(folder)


def test_adapters_that_cannot_be_sharded_are_refused_by_name(pair, tmp_path):
    path = made("llama", tmp_path / "base", tie_word_embeddings=False)
    stock = AutoModelForCausalLM.from_pretrained(path)
    config = peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(stock, config).save_pretrained(tmp_path / "embedding")
    with pytest.raises(
        UsageError, match=r"adapter of model.embed_tokens .*remove the layer from --lora-target-modules"
    ):
        pair.call("apply", functools.partial(learned, adapter_path=str(tmp_path / "embedding"), rank=0), path)
    stock = AutoModelForCausalLM.from_pretrained(path)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
    peft.get_peft_model(stock, config).save_pretrained(tmp_path / "dora")
    with pytest.raises(
        UsageError, match=r"adapter of model.layers.0.self_attn.q_proj \(Linear, colwise\) cannot be sharded"
    ):
        pair.call("apply", functools.partial(learned, adapter_path=str(tmp_path / "dora"), rank=0), path)
    stored = json.loads((tmp_path / "dora" / "adapter_config.json").read_text())
    (tmp_path / "dora" / "adapter_config.json").write_text(json.dumps(stored | {"init_lora_weights": "pissa"}))
    with pytest.raises(UsageError, match=r"init_lora_weights='pissa'.* use --tp-size 1"):
        pair.call("apply", functools.partial(learned, adapter_path=str(tmp_path / "dora"), rank=0), path)
    mixture = made("qwen3_moe", tmp_path / "mixture")
    with pytest.raises(UsageError, match=r"adapter of model.layers.0.mlp.experts .*cannot be sharded"):
        pair.call("apply", learned, mixture)
    with pytest.raises(
        UsageError, match=r"--load-in-4bit with --tp-size 2: 4-bit weights cannot be sharded; remove --load-in-4bit, or"
    ):
        pair.call("apply", functools.partial(learned, load_in_4bit=True), path)
