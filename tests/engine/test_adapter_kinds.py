"""LoRA adapters of critics and reward models, and on a 4-bit base, against ``peft`` and ``transformers``."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

peft = pytest.importorskip("peft")

from areno.engine.checkpoint.export import export_model  # noqa: E402
from areno.loss_fns import reward_model_loss_fn, sft_loss_fn, value_loss_fn  # noqa: E402
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
)
from tests.support.loops import save_classifier  # noqa: E402
from tests.support.tiny import save_tiny_checkpoint  # noqa: E402

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


# -- a 4-bit base ------------------------------------------------------------------------------------------------------


@pytest.fixture
def four_bit(open_engine, tmp_path):
    pytest.importorskip("bitsandbytes")
    return open_engine(save_tiny_checkpoint(tmp_path / "wide", hidden=128, sharpen=2.0), load_in_4bit=True)


def test_a_4_bit_base_is_packed_and_unchanged_while_its_adapter_learns(four_bit):
    engine, module = four_bit, four_bit.actor.model.module
    packed = [p for name, p in module.named_parameters() if p.dtype == torch.uint8]
    assert len(packed) == 14  # seven linear layers in each of two blocks
    before = base_weights(engine)
    losses = [engine.train(ROWS, sft_loss_fn, mini_bs=4)["loss"] for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]
    assert same(before, base_weights(engine))


def test_rollout_and_reference_of_a_4_bit_base(four_bit):
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


def test_an_adapter_of_a_4_bit_base_is_exported_onto_the_unquantised_weights(four_bit, tmp_path):
    train_some(four_bit)
    four_bit.save_model(tmp_path / "adapter")
    folder = export_model(str(tmp_path / "adapter"), str(tmp_path / "full"))
    stock = AutoModelForCausalLM.from_pretrained(four_bit.path, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(stock, tmp_path / "adapter").eval()
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logprobs(exported), logprobs(loaded), rtol=0, atol=1e-5)


def test_a_reward_model_on_a_4_bit_base_trains_its_fp32_head(open_engine, tmp_path):
    pytest.importorskip("bitsandbytes")
    base = save_tiny_checkpoint(tmp_path / "wide", hidden=128)
    engine = open_engine(base, trains="reward", load_in_4bit=True)
    losses = [engine.train(ROWS, reward_model_loss_fn, mini_bs=4)["loss"] for _ in range(6)]
    assert losses[-1] < 0.5 * losses[0]
    assert engine.actor.model.module.score.weight.dtype == torch.float32
    assert float(engine.actor.model.module.score.weight.detach().abs().sum()) > 0
