"""LoRA adapters: what is trained, what is kept bit for bit, and that ``peft`` and ``transformers`` compute the same."""

from __future__ import annotations

import contextlib
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

peft = pytest.importorskip("peft")

from areno.engine.checkpoint.export import export_model  # noqa: E402
from areno.engine.engine import Engine  # noqa: E402
from areno.engine.engine_config import EngineConfig  # noqa: E402
from areno.engine.model.adapter import AdapterOptions  # noqa: E402
from areno.engine.plan import trial  # noqa: E402
from areno.errors import UsageError  # noqa: E402
from areno.loss_fns import grpo_loss_fn, sft_loss_fn  # noqa: E402
from areno.types import ModelRole  # noqa: E402
from tests.support.adapters import (  # noqa: E402
    IDS,
    LR,
    PROMPT,
    ROWS,
    base_weights,
    generate,
    logprobs,
    row,
    same,
    scored,
    train_some,
    trained_weights,
)
from tests.support.tiny import save_tiny_checkpoint  # noqa: E402

# -- what is trained ---------------------------------------------------------------------------------------------------


def test_only_the_adapter_moves(open_engine, tiny_checkpoint):
    engine = open_engine()
    before, adapter = base_weights(engine), trained_weights(engine)
    assert {name.split(".")[-3] for name in adapter} == {"lora_A", "lora_B"}
    stored = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    assert same(before, dict(stored.named_parameters()))
    train_some(engine)
    generate(engine)
    engine.score_logprobs("actor", IDS.tolist())
    assert same(before, base_weights(engine))
    assert not any(torch.equal(value, adapter[name]) for name, value in trained_weights(engine).items())


def test_steps_equal_those_of_peft_with_adamw(open_engine, tiny_checkpoint):
    engine = open_engine()
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    expected = peft.get_peft_model(stock, config)
    names = [name for name, p in expected.named_parameters() if p.requires_grad]
    start = trained_weights(engine)
    assert [name.removeprefix("base_model.model.") for name in names] == list(start)
    parameters = [p for p in expected.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter, value in zip(parameters, start.values(), strict=True):
            parameter.copy_(value)
    adamw = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    for _ in range(3):
        losses = []
        for entry in ROWS:
            ids = torch.tensor([entry.tokens])
            found = expected(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
            losses.append(-found[1:])
        adamw.zero_grad()
        torch.cat(losses).mean().backward()
        adamw.step()
    train_some(engine)
    for parameter, value in zip(parameters, trained_weights(engine).values(), strict=True):
        torch.testing.assert_close(value, parameter.detach(), rtol=0, atol=2e-5)


def test_the_optimizer_holds_only_the_adapter(open_engine):
    engine = open_engine()
    train_some(engine, 1)
    optimizer = engine.actor.trained_by()
    head, parts = optimizer.state_head(), list(optimizer.state_parts())
    assert head["names"] == list(trained_weights(engine))
    assert not head["masters"]
    moments = sum(part.values.numel() for part in parts if part.key.endswith(".exp_avg"))
    assert moments == sum(value.numel() for value in trained_weights(engine).values())
    assert engine.checkpoint_bytes() == 12 * moments


def test_the_seed_decides_how_a_new_adapter_starts(open_engine):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = open_engine(seed=1), open_engine(seed=1), open_engine(seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(trained_weights(first), trained_weights(again))
    assert not same(trained_weights(first), trained_weights(other))


# -- applied, merged, off ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3_moe", "phi3", "qwen3_5"])
def test_a_rollout_on_merged_weights_matches_training_and_leaves_the_weights_unchanged(family, open_engine, tmp_path):
    engine = open_engine(save_tiny_checkpoint(tmp_path / family, family))
    train_some(engine, 4)
    adapter = engine.actor.model.adapter
    before, score = base_weights(engine), scored(engine)
    sequences = generate(engine)
    assert adapter.merged == (family != "qwen3_moe")  # its experts are not linear layers
    engine.end_rollout()
    assert not adapter.merged
    assert same(before, base_weights(engine))
    rows = [[*PROMPT, *s.resp_tokens] for s in sequences]
    again = engine.score_logprobs("actor", rows)
    gap = max(
        abs(a - b)
        for s, found in zip(sequences, again, strict=True)
        for a, b in zip(s.resp_logprobs, found[len(PROMPT) :], strict=True)
    )
    assert gap < 1e-5
    assert torch.equal(scored(engine), score)


def test_merged_weights_equal_those_of_peft(open_engine, tiny_checkpoint, tmp_path):
    engine = open_engine(target_modules="q_proj,down_proj", alpha=3.0)
    train_some(engine)
    engine.save_model(tmp_path / "adapter")
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(stock, tmp_path / "adapter").merge_and_unload()
    engine.actor.model.adapter.merge()
    mine = base_weights(engine)
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(mine[name], parameter.detach(), rtol=0, atol=1e-7)


def test_a_rehearsal_after_a_rollout_trial_backpropagates_through_the_adapter(open_engine):
    engine = open_engine()
    computed = []
    weights = [weight for _, weight in engine.actor.model.parameters()]
    for weight in weights:
        weight.register_hook(lambda gradient: computed.append(gradient.shape))
    generate(engine)
    assert engine.actor.model.adapter.merged
    trial.clean(engine)
    trial.rehearse(engine, ROWS, sft_loss_fn, 2)
    assert len(computed) == 2 * len(weights)  # two passes


def test_training_right_after_a_rollout_changes_the_next_one(open_engine):
    engine = open_engine()
    first = generate(engine)
    train_some(engine, 6)
    second = generate(engine)
    assert [s.resp_tokens for s in first] != [s.resp_tokens for s in second]
    engine.end_rollout()
    rows = [[*PROMPT, *s.resp_tokens] for s in second]
    found = engine.score_logprobs("actor", rows)
    assert all(
        a == pytest.approx(b, abs=1e-5)
        for s, values in zip(second, found, strict=True)
        for a, b in zip(s.resp_logprobs, values[len(PROMPT) :], strict=True)
    )


def test_grpo_rows_of_a_rollout_have_a_ratio_of_one(open_engine):
    engine = open_engine()
    train_some(engine)
    rows = [
        row(
            [*PROMPT, *s.resp_tokens],
            prompt=len(PROMPT),
            logprobs=[0.0] * len(PROMPT) + list(s.resp_logprobs),
            advantages=[0.0] * len(PROMPT) + [1.0 - index] * len(s.resp_tokens),
        )
        for index, s in enumerate(generate(engine))
    ]
    stats = engine.train(rows, grpo_loss_fn, mini_bs=2)
    assert stats["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert stats["logp_abs_diff_mean"] < 1e-5


def test_the_reference_is_the_actor_with_its_adapter_off(open_engine, tiny_checkpoint):
    engine = open_engine()
    engine.ensure_roles({"ref": ModelRole("ref", str(tiny_checkpoint), trainable=False)})
    assert engine.role("ref").model is engine.actor.model  # no second copy
    train_some(engine)
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    expected = logprobs(stock)
    generate(engine)  # also while the adapter is merged
    torch.testing.assert_close(scored(engine, "ref"), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(scored(engine), expected, atol=1e-3)
    with_own = Engine(str(tiny_checkpoint), EngineConfig(trains="nothing", decode="eager"))
    assert torch.equal(scored(with_own), scored(engine, "ref"))
    with_own.close()
    train_some(engine)  # scoring with the adapter off leaves it trainable
    assert engine.actor.trained_by().steps == 6


def test_a_reference_of_another_checkpoint_is_a_separate_model(open_engine, tmp_path):
    other = save_tiny_checkpoint(tmp_path / "other", seed=3)
    engine = open_engine()
    engine.ensure_roles({"ref": ModelRole("ref", str(other), trainable=False)})
    expected = logprobs(AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32))
    torch.testing.assert_close(scored(engine, "ref"), expected, rtol=0, atol=1e-5)


def test_in_bf16_the_adapter_is_fp32_and_not_merged(open_engine):
    engine = open_engine(dtype=torch.bfloat16)
    assert {value.dtype for value in trained_weights(engine).values()} == {torch.float32}
    train_some(engine)
    before = base_weights(engine)
    sequences = generate(engine)
    assert not engine.actor.model.adapter.merged
    assert same(before, base_weights(engine))
    rows = [[*PROMPT, *s.resp_tokens] for s in sequences]
    found = engine.score_logprobs("actor", rows)
    gaps = [
        abs(a - b)
        for s, values in zip(sequences, found, strict=True)
        for a, b in zip(s.resp_logprobs, values[len(PROMPT) :], strict=True)
    ]
    assert max(gaps) < 0.1
    assert not engine.actor.trained_by().state_head()["masters"]


def owners(tensor):
    """Return the number of tensors that share this one's storage."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


@pytest.mark.long
def test_a_compiled_decode_step_uses_the_merged_weights(open_engine):
    """The package, about 40 seconds to build, is that of the model without an adapter. Old merged weights are freed."""
    compiled, eager = open_engine(decode="compiled"), open_engine()
    for engine in (compiled, eager):
        for _ in range(2):
            train_some(engine, 2)
            engine.last = generate(engine)
            summed = [layer.get_base_layer().weight.data for layer in engine.actor.model.adapter._layers]
            engine.end_rollout()
            assert {owners(tensor) for tensor in summed} == {owners(torch.zeros(3))}
    assert compiled.loop.decode.compiled
    assert [s.resp_tokens for s in compiled.last] == [s.resp_tokens for s in eager.last]
    pairs = zip(compiled.last, eager.last, strict=True)
    for a, b in chain.from_iterable(zip(x.resp_logprobs, y.resp_logprobs, strict=True) for x, y in pairs):
        assert a == pytest.approx(b, abs=1e-5)


# -- dropout -----------------------------------------------------------------------------------------------------------


def test_dropout_applies_only_in_training(open_engine):
    losses = {}
    for dropout in (0.0, 0.5):
        engine = open_engine(dropout=dropout)
        assert torch.equal(scored(engine), scored(engine))
        train_some(engine, 2)
        torch.manual_seed(1)
        assert torch.equal(scored(engine), scored(engine))
        weights = engine.actor.trained_by()
        losses[dropout] = set()
        for _ in range(3):
            weights.zero_grad()
            engine.actor.training.set_training(True)
            losses[dropout].add(round(engine.actor.training.accumulate(ROWS, sft_loss_fn, 4)["loss"], 6))
            engine.actor.training.set_training(False)
    assert len(losses[0.0]) == 1
    assert len(losses[0.5]) == 3


# -- on disk -----------------------------------------------------------------------------------------------------------


def test_a_saved_adapter_loads_in_peft_and_gives_the_same_scores(open_engine, tiny_checkpoint, tmp_path):
    engine = open_engine()
    train_some(engine)
    engine.save_model(tmp_path / "adapter")
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert not files & {"model.safetensors", "config.json", "README.md"}
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(stock, tmp_path / "adapter").eval()
    torch.testing.assert_close(scored(engine), logprobs(loaded), rtol=0, atol=1e-5)
    assert loaded.peft_config["default"].base_model_name_or_path == str(tiny_checkpoint.absolute())


def test_training_continues_from_an_adapter(open_engine, tmp_path):
    engine = open_engine(alpha=5.0)
    train_some(engine)
    engine.save_model(tmp_path / "adapter")
    again = open_engine(rank=0, adapter_path=str(tmp_path / "adapter"))
    assert same(trained_weights(engine), trained_weights(again))
    assert torch.equal(scored(engine), scored(again))
    engine.train(ROWS, sft_loss_fn, mini_bs=4)
    again.train(ROWS, sft_loss_fn, mini_bs=4)
    assert not torch.equal(scored(again), scored(engine))  # an adapter has no moments; the resume tests cover those


def test_an_adapter_of_another_tool_can_be_loaded(open_engine, tiny_checkpoint, tmp_path):
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    config = peft.LoraConfig(r=3, use_rslora=True, target_modules=["v_proj"], init_lora_weights=False, lora_dropout=0.3)
    foreign = peft.get_peft_model(stock, config).eval()
    foreign.save_pretrained(tmp_path / "foreign")
    engine = open_engine(rank=0, adapter_path=str(tmp_path / "foreign"))
    torch.testing.assert_close(scored(engine), logprobs(foreign), rtol=0, atol=1e-5)
    assert engine.actor.model.adapter.rank == 3


@pytest.mark.parametrize("more", [{"use_dora": True}, {"lora_bias": True}], ids=["dora", "biases"])
def test_an_adapter_that_adds_more_than_a_product_is_not_merged(more, open_engine, tmp_path):
    base = save_tiny_checkpoint(tmp_path / "base", attention_bias=True)
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False, **more)
    foreign = peft.get_peft_model(stock, config).eval()
    for name, weight in foreign.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    foreign.save_pretrained(tmp_path / "foreign")
    engine = open_engine(base, rank=0, adapter_path=str(tmp_path / "foreign"))
    torch.testing.assert_close(scored(engine), logprobs(foreign), rtol=0, atol=1e-5)
    generate(engine)
    assert not engine.actor.model.adapter.merged


def test_an_adapter_folder_loads_as_the_merged_model_if_nothing_is_trained(open_engine, tmp_path):
    engine = open_engine()
    train_some(engine)
    engine.save_model(tmp_path / "adapter")
    served = Engine(str(tmp_path / "adapter"), EngineConfig(trains="nothing", decode="eager"))
    assert served.actor.model.adapter is None
    assert served.eos_ids == engine.eos_ids
    assert served.tokenizer.get_vocab() == engine.tokenizer.get_vocab()
    torch.testing.assert_close(scored(served), scored(engine), rtol=0, atol=1e-5)
    assert [s.resp_tokens for s in generate(served)] == [s.resp_tokens for s in generate(engine)]
    served.close()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_export_is_a_full_checkpoint(dtype, open_engine, tmp_path):
    engine = open_engine()
    train_some(engine)
    engine.save_model(tmp_path / "adapter")
    folder = export_model(str(tmp_path / "adapter"), str(tmp_path / "full"), dtype=dtype)
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert exported.dtype == (torch.bfloat16 if dtype else torch.float32)
    difference = (logprobs(exported).float() - scored(engine)).abs().max()
    assert difference < (0.1 if dtype else 1e-5)
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "adapter_config.json").exists()


def test_a_tilde_in_the_paths_of_models_and_adapters_is_the_home_folder(open_engine, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    engine = open_engine()
    train_some(engine)
    engine.save_model(tmp_path / "adapter")
    export_model("~/adapter", "~/full")
    for path in ("~/adapter", "~/full"):
        with contextlib.closing(Engine(path, EngineConfig(trains="nothing", decode="eager"))) as served:
            torch.testing.assert_close(scored(served), scored(engine), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('{"model_type": "unheard_of"}', "unheard_of"),
        (
            '{"model_type": "llama", "vocab_size": "abc"}',
            "config.json: .*'vocab_size': TypeError: .* expected int, got str",
        ),
        ('{"model_type": "llama", "num_attention_heads": 0}', "modulo by zero"),
        ('{"model_type": "llama", "architectures": 3}', "architectures is 3, but must be a list"),
        ('{"model_type": "llama", "architectures": ["A", 3]}', r"architectures is \['A', 3\], but must be a list"),
        ('{"model_type": "llama", "dtype": [3]}', "list index out of range"),
    ],
)
def test_a_model_whose_configuration_cannot_be_read_is_not_exported(tmp_path, config, reason):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UsageError, match=rf"--ckpt .*: this folder could not be loaded: .*{reason}"):
        export_model(str(tmp_path), str(tmp_path / "full"))


# -- errors ------------------------------------------------------------------------------------------------------------


def test_missing_target_layers_are_named_with_the_existing_ones(open_engine):
    with pytest.raises(
        UsageError, match=r"LlamaForCausalLM has no linear layers named wq, o; .*down_proj, gate_proj, k_proj"
    ):
        open_engine(target_modules="q_proj, wq, o")


def test_an_adapter_on_a_tied_weight_is_refused(open_engine, tmp_path):
    tied = save_tiny_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    with pytest.raises(UsageError, match=r"model\.embed_tokens and lm_head share one weight"):
        open_engine(tied, target_modules="q_proj,lm_head")
    untied = save_tiny_checkpoint(tmp_path / "untied", tie_word_embeddings=False)
    engine = open_engine(untied, target_modules="q_proj,lm_head")
    train_some(engine)
    sequences = generate(engine, n=1)
    found = engine.score_logprobs("actor", [[*PROMPT, *sequences[0].resp_tokens]])[0][len(PROMPT) :]
    assert sequences[0].resp_logprobs == pytest.approx(found, abs=1e-5)


def test_an_adapter_of_another_model_or_type_is_refused(open_engine, tiny_checkpoint, tmp_path):
    wide = save_tiny_checkpoint(tmp_path / "wide", hidden=48)
    engine = open_engine(wide)
    engine.save_model(tmp_path / "adapter")
    with pytest.raises(UsageError, match=r"does not fit LlamaForCausalLM"):
        open_engine(rank=0, adapter_path=str(tmp_path / "adapter"))
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    peft.get_peft_model(stock, peft.IA3Config(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "ia3")
    with pytest.raises(UsageError, match=r"^the adapter \S+ has the type IA3, but areno supports only the type LORA"):
        open_engine(rank=0, adapter_path=str(tmp_path / "ia3"))
    with pytest.raises(UsageError, match="pass the base model, with this adapter as --lora-adapter-path"):
        open_engine(tmp_path / "adapter")
    with pytest.raises(UsageError, match=r"role 'critic' .* is an adapter"):
        open_engine(wide).ensure_roles({"critic": ModelRole("critic", str(tmp_path / "adapter"), trainable=True)})
    with pytest.raises(UsageError, match=r"peft rejects the adapter options rank=4, alpha=None, dropout=1\.5"):
        open_engine(dropout=1.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: {k.replace(".layers.", ".language_model.layers."): v for k, v in w.items()},
            r"the adapter has no \S+\.layers\.0",
        ),
        (
            lambda w: {k: v for k, v in w.items() if ".layers.0." in k},
            r"the adapter has no \S+\.layers\.1\.\S+, .* and 12 more",
        ),
        (
            lambda w: w | {k.replace(".layers.1.", ".layers.2."): v for k, v in w.items()},
            r"the model has no \S+\.layers\.2\.",
        ),
    ],
    ids=["other names", "a layer too few", "a layer too many"],
)
def test_an_adapter_whose_matrices_are_not_those_of_the_model_is_refused(change, message, open_engine, tmp_path):
    engine = open_engine()
    folder = tmp_path / "adapter"
    engine.save_model(folder)
    weights = folder / "adapter_model.safetensors"
    save_file({k: v.clone() for k, v in change(load_file(weights)).items()}, weights, {"format": "pt"})
    message = rf"^the adapter \S+ does not fit LlamaForCausalLM: .*{message}.*; use an adapter that was trained on this model$"
    with pytest.raises(UsageError, match=message):
        open_engine(rank=0, adapter_path=str(folder))
    with pytest.raises(UsageError, match=message):
        export_model(str(folder), str(tmp_path / "full"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rnk": 4}, "lora has no key rnk; its keys are adapter_path, alpha"),
        ({}, "lora rank=0: a new adapter needs a rank of at least 1"),
    ],
)
def test_invalid_adapter_options_are_refused(values, message):
    with pytest.raises(UsageError, match=message):
        AdapterOptions.of(values, "lora")
