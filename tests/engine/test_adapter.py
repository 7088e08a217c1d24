"""LoRA adapters: what is trained, what is kept bit for bit, and that ``peft`` and ``transformers`` compute the same."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

peft = pytest.importorskip("peft")

from areno.engine.checkpoint.export import export_model  # noqa: E402
from areno.engine.engine import Engine, EngineConfig  # noqa: E402
from areno.engine.model.adapter import AdapterOptions  # noqa: E402
from areno.engine.train.optimizer import OptimizerConfig  # noqa: E402
from areno.errors import UsageError  # noqa: E402
from areno.loss_fns import grpo_loss_fn, reward_model_loss_fn, sft_loss_fn, value_loss_fn  # noqa: E402
from areno.types import ModelRole, Request, SamplingParams, TrainSequence  # noqa: E402
from tests.support.loops import save_classifier  # noqa: E402
from tests.support.tiny import save_tiny_checkpoint  # noqa: E402

PROMPT = [5, 9, 30]
LR = 1e-2
IDS = torch.tensor([[5, 9, 30, 41, 7, 12, 3, 8]])


def row(tokens, prompt=2, **lists):
    return TrainSequence([i < prompt for i in range(len(tokens))], list(tokens), **lists)


ROWS = [row([5, 9, 30, 41, 7, 60]), row([12, 3, 8, 11]), row([8, 8, 15, 60, 22, 31, 2]), row([4, 6, 7])]


@pytest.fixture
def open_engine(tiny_checkpoint):
    """Engines with an adapter of rank 4 on a tiny llama."""
    engines = []

    def make(path=tiny_checkpoint, trains="policy", dtype=torch.float32, decode="eager", **options):
        adapter = AdapterOptions.of({"rank": 4, **options}, "lora")
        optimizer = OptimizerConfig(lr=LR, weight_decay=0.1, eps=1e-6)
        config = EngineConfig(optimizer=optimizer, adapter=adapter, trains=trains, dtype=dtype, decode=decode)
        engines.append(Engine(str(path), config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def base_weights(engine):
    """A copy of everything that is not the adapter's, by the name that it has in the base checkpoint."""
    named = engine.actor.model.module.named_parameters()
    return {
        name.replace(".base_layer", ""): p.detach().clone()
        for name, p in named
        if ".lora_" not in name and ".modules_to_save." not in name
    }


def trained_weights(engine):
    return {name: p.detach().clone() for name, p in engine.actor.model.parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def logprobs(module, ids=IDS):
    """Log-prob of each token after the first, by plain transformers."""
    with torch.no_grad():
        logits = module(input_ids=ids).logits
    return logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]


def scored(engine, role="actor"):
    return torch.tensor(engine.score_logprobs(role, IDS.tolist())[0][1:])


def generate(engine, n=4, tokens=12):
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    future = engine.submit([Request(PROMPT, sampling, list(range(n)))])[0]
    return future.result(timeout=120).sequences


def train_some(engine, steps=3):
    for _ in range(steps):
        engine.train(ROWS, sft_loss_fn, mini_bs=2)


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


def test_steps_are_those_of_peft_with_adamw(open_engine, tiny_checkpoint):
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


def test_the_optimizer_knows_the_adapter_only(open_engine):
    engine = open_engine()
    train_some(engine, 1)
    state = engine.actor.trained_by().state_dict()
    assert state["names"] == list(trained_weights(engine))
    assert not state["masters"]
    moments = sum(entry["exp_avg"].numel() for entry in state["adam"].values())
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
def test_a_rollout_on_the_sum_gives_what_training_gives_and_leaves_the_weights_as_they_were(
    family, open_engine, tmp_path
):
    engine = open_engine(save_tiny_checkpoint(tmp_path / family, family))
    train_some(engine, 4)
    adapter = engine.actor.model.adapter
    before, score = base_weights(engine), scored(engine)
    sequences = generate(engine)
    assert adapter.merged == (family != "qwen3_moe")  # whose experts are no linear layers
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


def test_the_sum_is_what_peft_merges(open_engine, tiny_checkpoint, tmp_path):
    engine = open_engine(target_modules="q_proj,down_proj", alpha=3.0)
    train_some(engine)
    engine.save_model(tmp_path / "adapter")
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(stock, tmp_path / "adapter").merge_and_unload()
    engine.actor.model.adapter.merge()
    mine = base_weights(engine)
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(mine[name], parameter.detach(), rtol=0, atol=1e-7)


def test_training_right_after_a_rollout_changes_what_the_next_one_says(open_engine):
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


def test_the_reference_is_the_actor_with_its_adapter_off(open_engine, tiny_checkpoint):
    engine = open_engine()
    engine.ensure_roles({"ref": ModelRole("ref", str(tiny_checkpoint), trainable=False)})
    assert engine.role("ref").model is engine.actor.model  # no second copy
    train_some(engine)
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    expected = logprobs(stock)
    generate(engine)  # also while the sum is in place
    torch.testing.assert_close(scored(engine, "ref"), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(scored(engine), expected, atol=1e-3)
    with_own = Engine(str(tiny_checkpoint), EngineConfig(trains="nothing", decode="eager"))
    assert torch.equal(scored(with_own), scored(engine, "ref"))
    with_own.close()
    train_some(engine)  # scoring with the adapter off has left it trainable
    assert engine.actor.trained_by().steps == 6


def test_another_reference_is_a_model_of_its_own(open_engine, tmp_path):
    other = save_tiny_checkpoint(tmp_path / "other", seed=3)
    engine = open_engine()
    engine.ensure_roles({"ref": ModelRole("ref", str(other), trainable=False)})
    expected = logprobs(AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32))
    torch.testing.assert_close(scored(engine, "ref"), expected, rtol=0, atol=1e-5)


def test_in_bf16_the_adapter_is_fp32_and_runs_beside_the_weights(open_engine):
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
    assert not engine.actor.trained_by().state_dict()["masters"]


@pytest.mark.long
def test_a_compiled_decode_step_computes_with_the_sum(open_engine):
    """It takes about 40 seconds to build; the package is that of the model without an adapter."""
    compiled, eager = open_engine(decode="compiled"), open_engine()
    for engine in (compiled, eager):
        for _ in range(2):
            train_some(engine, 2)
            engine.last = generate(engine)
            engine.end_rollout()
    assert compiled.loop.decode.compiled
    assert [s.resp_tokens for s in compiled.last] == [s.resp_tokens for s in eager.last]
    pairs = zip(compiled.last, eager.last, strict=True)
    for a, b in chain.from_iterable(zip(x.resp_logprobs, y.resp_logprobs, strict=True) for x, y in pairs):
        assert a == pytest.approx(b, abs=1e-5)


# -- dropout -----------------------------------------------------------------------------------------------------------


def test_dropout_is_drawn_in_training_and_nowhere_else(open_engine):
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


def test_what_is_saved_loads_in_plain_peft_and_gives_the_same(open_engine, tiny_checkpoint, tmp_path):
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


def test_training_goes_on_from_an_adapter(open_engine, tmp_path):
    engine = open_engine(alpha=5.0)
    train_some(engine)
    engine.save_model(tmp_path / "adapter")
    again = open_engine(rank=0, adapter_path=str(tmp_path / "adapter"))
    assert same(trained_weights(engine), trained_weights(again))
    assert torch.equal(scored(engine), scored(again))
    engine.train(ROWS, sft_loss_fn, mini_bs=4)
    again.train(ROWS, sft_loss_fn, mini_bs=4)
    assert not torch.equal(scored(again), scored(engine))  # the moments are another matter: see the tests of resume


def test_an_adapter_of_another_tool_can_be_the_start(open_engine, tiny_checkpoint, tmp_path):
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    config = peft.LoraConfig(r=3, use_rslora=True, target_modules=["v_proj"], init_lora_weights=False, lora_dropout=0.3)
    foreign = peft.get_peft_model(stock, config).eval()
    foreign.save_pretrained(tmp_path / "foreign")
    engine = open_engine(rank=0, adapter_path=str(tmp_path / "foreign"))
    torch.testing.assert_close(scored(engine), logprobs(foreign), rtol=0, atol=1e-5)
    assert engine.actor.model.adapter.rank == 3


def test_dora_runs_beside_the_weights_because_its_sum_is_not_plain(open_engine, tiny_checkpoint, tmp_path):
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    config = peft.LoraConfig(r=2, use_dora=True, target_modules=["v_proj"], init_lora_weights=False)
    foreign = peft.get_peft_model(stock, config).eval()
    foreign.save_pretrained(tmp_path / "dora")
    engine = open_engine(rank=0, adapter_path=str(tmp_path / "dora"))
    torch.testing.assert_close(scored(engine), logprobs(foreign), rtol=0, atol=1e-5)
    generate(engine)
    assert not engine.actor.model.adapter.merged


def test_an_adapter_folder_is_the_merged_model_where_nothing_is_trained(open_engine, tmp_path):
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


# -- critics and reward models -----------------------------------------------------------------------------------------


def test_a_critic_trains_an_adapter_and_its_head(open_engine, tiny_checkpoint, tmp_path):
    body = save_classifier(tmp_path / "critic", tiny_checkpoint)
    engine = open_engine()
    engine.ensure_roles({"critic": ModelRole("critic", str(body), trainable=True, optimizer_lr=LR)})
    critic = engine.role("critic")
    trained = [name for name, _ in critic.model.parameters()]
    assert sum("score" in name for name in trained) == 1
    assert all("score" in name or ".lora_" in name for name in trained)
    full = [float(i) for i in range(6)]
    rows = [row([5, 9, 30, 41, 7, 60], values=[0.0] * 6, returns=full)]
    head = critic.model.module.score.weight.detach().clone()
    for _ in range(3):
        engine.train(rows, value_loss_fn, mini_bs=1, role="critic")
    assert not torch.equal(head, critic.model.module.score.weight)
    critic.save_model(tmp_path / "saved", engine.tokenizer)
    stock = AutoModelForSequenceClassification.from_pretrained(body, num_labels=1, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(stock, tmp_path / "saved").eval()
    loaded.config.pad_token_id = None
    found = engine.score_values("critic", IDS.tolist())[0]
    with torch.no_grad():
        expected = [float(loaded(input_ids=IDS[:, : n + 1]).logits) for n in range(IDS.shape[1])]
    assert found == pytest.approx(expected, abs=1e-5)
    frozen = open_engine()
    frozen.ensure_roles({"reward": ModelRole("reward", str(tmp_path / "saved"), trainable=False)})
    assert frozen.score_rewards("reward", IDS.tolist()) == pytest.approx(found[-1:], abs=1e-5)


def test_a_reward_model_trained_with_an_adapter_scores_the_same_when_it_is_loaded(
    open_engine, tiny_checkpoint, tmp_path
):
    engine = open_engine(trains="reward")
    for _ in range(4):
        engine.train(ROWS, reward_model_loss_fn, mini_bs=2)
    found = engine.score_rewards("actor", IDS.tolist())
    assert found[0] != 0
    engine.save_model(tmp_path / "adapter")
    judge = open_engine()
    judge.ensure_roles({"reward": ModelRole("reward", str(tmp_path / "adapter"), trainable=False)})
    assert judge.score_rewards("reward", IDS.tolist()) == pytest.approx(found, abs=1e-5)
    folder = export_model(str(tmp_path / "adapter"), str(tmp_path / "full"))
    exported = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    exported.config.pad_token_id = None
    with torch.no_grad():
        assert exported(input_ids=IDS).logits[0].tolist() == pytest.approx(found, abs=1e-5)


# -- what cannot work --------------------------------------------------------------------------------------------------


def test_layers_that_are_not_there_are_named_with_those_that_are(open_engine):
    with pytest.raises(UsageError, match=r"wq, o: no linear layer of LlamaForCausalLM.*down_proj, gate_proj, k_proj"):
        open_engine(target_modules="q_proj, wq, o")


def test_a_weight_that_two_layers_share_gets_no_adapter(open_engine, tmp_path):
    tied = save_tiny_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    with pytest.raises(UsageError, match=r"model\.embed_tokens and lm_head share one weight"):
        open_engine(tied, target_modules="q_proj,lm_head")
    untied = save_tiny_checkpoint(tmp_path / "untied", tie_word_embeddings=False)
    engine = open_engine(untied, target_modules="q_proj,lm_head")
    train_some(engine)
    sequences = generate(engine, n=1)
    found = engine.score_logprobs("actor", [[*PROMPT, *sequences[0].resp_tokens]])[0][len(PROMPT) :]
    assert sequences[0].resp_logprobs == pytest.approx(found, abs=1e-5)


def test_an_adapter_that_is_of_another_model_or_kind_is_refused(open_engine, tiny_checkpoint, tmp_path):
    wide = save_tiny_checkpoint(tmp_path / "wide", hidden=48)
    engine = open_engine(wide)
    engine.save_model(tmp_path / "adapter")
    with pytest.raises(UsageError, match=r"does not fit LlamaForCausalLM"):
        open_engine(rank=0, adapter_path=str(tmp_path / "adapter"))
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    peft.get_peft_model(stock, peft.IA3Config(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "ia3")
    with pytest.raises(UsageError, match="of the kind IA3; areno reads and trains LORA"):
        open_engine(rank=0, adapter_path=str(tmp_path / "ia3"))
    with pytest.raises(UsageError, match="give its base model, and this folder as --lora-adapter-path"):
        open_engine(tmp_path / "adapter")
    with pytest.raises(UsageError, match=r"role 'critic' .* is an adapter"):
        open_engine(wide).ensure_roles({"critic": ModelRole("critic", str(tmp_path / "adapter"), trainable=True)})
    with pytest.raises(UsageError, match=r"no adapter can be made of rank=4, alpha=None, dropout=1\.5"):
        open_engine(dropout=1.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rnk": 4}, "lora has no key rnk; known keys: adapter_path, alpha"),
        ({}, "lora rank=0: give a rank of at least 1"),
    ],
)
def test_options_that_make_no_adapter_are_refused(values, message):
    with pytest.raises(UsageError, match=message):
        AdapterOptions.of(values, "lora")


# -- a base in 4 bits --------------------------------------------------------------------------------------------------


@pytest.fixture
def four_bit(open_engine, tmp_path):
    pytest.importorskip("bitsandbytes")
    return open_engine(save_tiny_checkpoint(tmp_path / "wide", hidden=128, sharpen=2.0), load_in_4bit=True)


def test_a_base_in_4_bits_is_small_stays_as_it_is_and_its_adapter_learns(four_bit):
    engine, module = four_bit, four_bit.actor.model.module
    packed = [p for name, p in module.named_parameters() if p.dtype == torch.uint8]
    assert len(packed) == 14  # seven linear layers in each of two blocks
    before = base_weights(engine)
    losses = [engine.train(ROWS, sft_loss_fn, mini_bs=4)["loss"] for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
    assert same(before, base_weights(engine))


def test_rollout_and_reference_of_a_base_in_4_bits(four_bit):
    engine = four_bit
    engine.ensure_roles({"ref": ModelRole("ref", engine.path, trainable=False)})
    start = scored(engine, "ref")
    assert torch.equal(start, scored(engine))  # a new adapter adds nothing
    train_some(engine)
    sequences = generate(engine)
    assert not engine.actor.model.adapter.merged
    found = engine.score_logprobs("actor", [[*PROMPT, *s.resp_tokens] for s in sequences])
    gaps = [
        abs(a - b)
        for s, values in zip(sequences, found, strict=True)
        for a, b in zip(s.resp_logprobs, values[len(PROMPT) :], strict=True)
    ]
    assert max(gaps) < 1e-4
    torch.testing.assert_close(scored(engine, "ref"), start, rtol=0, atol=1e-6)


def test_an_adapter_of_a_base_in_4_bits_is_exported_onto_the_weights_themselves(four_bit, tmp_path):
    train_some(four_bit)
    four_bit.save_model(tmp_path / "adapter")
    folder = export_model(str(tmp_path / "adapter"), str(tmp_path / "full"))
    stock = AutoModelForCausalLM.from_pretrained(four_bit.path, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(stock, tmp_path / "adapter").eval()
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logprobs(exported), logprobs(loaded), rtol=0, atol=1e-5)


def test_a_reward_model_on_a_base_in_4_bits_learns_with_its_whole_head(open_engine, tmp_path):
    pytest.importorskip("bitsandbytes")
    base = save_tiny_checkpoint(tmp_path / "wide", hidden=128)
    engine = open_engine(base, trains="reward", load_in_4bit=True)
    losses = [engine.train(ROWS, reward_model_loss_fn, mini_bs=4)["loss"] for _ in range(6)]
    assert losses[-1] < 0.5 * losses[0]
    assert engine.actor.model.module.score.weight.dtype == torch.float32
    assert float(engine.actor.model.module.score.weight.detach().abs().sum()) > 0


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
