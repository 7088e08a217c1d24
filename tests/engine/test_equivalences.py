"""An optimizer step does not depend on how its rows are split, packed, padded or recomputed.

The ground truth is a stock transformers model on one padded batch with torch's own AdamW; only the loss function is shared.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers as tf

from areno.engine.model.loading import prepare, prepare_as
from areno.engine.model.value_model import ValueModel
from areno.engine.train import step as step_module
from areno.engine.train.batch import pack_rows
from areno.engine.train.optimizer import MasterAdamW, OptimizerOptions
from areno.engine.train.step import TrainStep
from areno.loss_fns import (
    dpo_loss_fn,
    grpo_loss_fn,
    gspo_loss_fn,
    ppo_loss_fn,
    reward_model_loss_fn,
    sft_loss_fn,
    value_loss_fn,
)
from areno.types import TrainSequence
from tests.support.tiny import VOCAB, tiny_config, tiny_module

LOSSES = {
    "sft": ("policy", sft_loss_fn),
    "gspo": ("policy", partial(gspo_loss_fn, clip_eps=0.1, kl_coef=0.1)),
    "grpo": ("policy", partial(grpo_loss_fn, kl_coef=0.1)),
    "grpo-sequence": ("policy", partial(grpo_loss_fn, loss_mean="sequence", dual_clip=3.0)),
    "dr-grpo": ("policy", partial(grpo_loss_fn, loss_mean="dr_grpo", max_tokens=20)),
    "ppo": ("policy", partial(ppo_loss_fn, use_kl_loss=True, kl_loss_coef=0.1)),
    "dpo": ("policy", dpo_loss_fn),
    "value": ("value", value_loss_fn),
    "reward": ("reward", reward_model_loss_fn),
}
SETTINGS = {"lr": 2e-4, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.01}
losses = pytest.mark.parametrize("name", LOSSES)


def rows(count=8, seed=0):
    own = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        prompt, answer = (int(torch.randint(1, 14, (), generator=own)) for _ in range(2))
        total = prompt + answer
        lists = torch.randn(5, total, generator=own)
        mask = (torch.rand(total, generator=own) < 0.85).tolist() if index % 3 == 2 else None
        made.append(
            TrainSequence(
                prompt_mask=[True] * prompt + [False] * answer,
                tokens=torch.randint(1, VOCAB, (total,), generator=own).tolist(),
                logprobs=(-4.5 + 0.3 * lists[0]).tolist(),
                advantages=lists[1].tolist(),
                ref_logprobs=(-4.5 + 0.3 * lists[2]).tolist(),
                values=lists[3].tolist(),
                returns=lists[4].tolist(),
                loss_mask=mask,
                temperature=(1.0, 0.8)[index % 2],
            )
        )
    return made


def stock(kind):
    if kind == "policy":
        return tiny_module("llama", sharpen=1.0, layers=2)
    torch.manual_seed(4)
    config = tiny_config("llama", layers=2)
    config.num_labels = 1
    module = tf.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    torch.nn.init.normal_(module.score.weight, std=0.1)
    return module


def make_step(kind, checkpointing=True):
    model = prepare(stock(kind)) if kind == "policy" else prepare_as(ValueModel, stock(kind))
    optimizer = MasterAdamW(model.parameters(), OptimizerOptions(**SETTINGS))
    return TrainStep(model, optimizer, checkpointing, kind=kind)


def padded_loss(module, kind, loss_fn, batch_rows):
    """Return the loss of one padded batch, from predictions that are sliced out of it row by row."""
    longest = max(len(row.tokens) for row in batch_rows)
    ids = torch.tensor([row.tokens + [0] * (longest - len(row.tokens)) for row in batch_rows])
    keep = torch.tensor([[1] * len(row.tokens) + [0] * (longest - len(row.tokens)) for row in batch_rows])
    pack = pack_rows(batch_rows).data
    mask = pack["packed_response_mask"]
    if kind == "policy":
        logits = module(input_ids=ids, attention_mask=keep, use_cache=False).logits
        parts = []
        for row, own in zip(batch_rows, logits, strict=True):
            scaled = own[: len(row.tokens) - 1] / row.temperature
            parts.append(scaled.log_softmax(-1).gather(-1, torch.tensor(row.tokens[1:])[:, None])[:, 0])
        predicted = torch.where(mask, torch.cat(parts), 0.0)
    else:
        values = module.score(module.model(input_ids=ids, attention_mask=keep, use_cache=False)[0])[..., 0]
        if kind == "value":
            parts = [own[: len(row.tokens) - 1] for row, own in zip(batch_rows, values, strict=True)]
            predicted = torch.where(mask, torch.cat(parts), 0.0)
        else:
            predicted = torch.stack([own[len(row.tokens) - 1] for row, own in zip(batch_rows, values, strict=True)])
    if kind == "policy":
        pack["packed_entropy"] = torch.zeros(mask.shape)
    return loss_fn(pack, predicted)[0]


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max().clamp(min=1e-12), name


@losses
@pytest.mark.parametrize(
    ("mini_bs", "checkpointing", "most_tokens"),
    [(1, True, 3072), (2, True, 3072), (8, True, 3072), (8, False, 3072), (8, True, 40)],
)
def test_gradients_equal_those_of_one_padded_batch(name, mini_bs, checkpointing, most_tokens, monkeypatch):
    kind, loss_fn = LOSSES[name]
    if name in ("dpo", "reward"):
        mini_bs = max(mini_bs, 2)
    monkeypatch.setattr(step_module, "MAX_TOKENS", most_tokens)
    reference = stock(kind)
    loss = padded_loss(reference, kind, loss_fn, rows())
    loss.backward()
    step = make_step(kind, checkpointing)
    step.set_training(True)
    stats = step.accumulate(rows(), loss_fn, mini_bs)
    assert stats["loss"] == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-7)
    names = [name for name, _ in step.model.parameters()]
    gradients = dict(zip(names, step.optimizer.gradients(), strict=True))
    assert_close(gradients, {n: p.grad for n, p in reference.named_parameters()})


@losses
@pytest.mark.parametrize(
    ("mini_bs", "accumulation"),
    [*(pytest.param(*cut, marks=pytest.mark.long) for cut in [(1, None), (8, None), (1, 8)]), (2, None), (2, 4)],
)
def test_weights_after_five_steps_equal_those_of_adamw_on_padded_batches(name, mini_bs, accumulation):
    kind, loss_fn = LOSSES[name]
    if name in ("dpo", "reward") and mini_bs == 1:
        mini_bs, accumulation = 2, accumulation and accumulation // 2
    reference, step = stock(kind), make_step(kind)
    adam = torch.optim.AdamW(reference.parameters(), **SETTINGS)
    for seed in range(5):
        stats = step.run(rows(seed=seed), loss_fn, mini_bs, accumulation)
        adam.zero_grad()
        padded_loss(reference, kind, loss_fn, rows(seed=seed)).backward()
        adam.step()
    assert step.optimizer.steps == 5
    assert stats["update_skipped"] == 0.0
    assert_close(
        {n: p.detach() for n, p in step.model.parameters()}, {n: p.detach() for n, p in reference.named_parameters()}
    )


def test_fp32_masters_keep_small_updates_that_bf16_weights_lose():
    settings = {"lr": 1e-6, "eps": 1e-8, "weight_decay": 0.0}
    model = prepare(stock("policy").to(torch.bfloat16))
    step = TrainStep(model, MasterAdamW(model.parameters(), OptimizerOptions(**settings)))
    plain = stock("policy").to(torch.bfloat16)
    adam = torch.optim.AdamW(plain.parameters(), **settings)
    start = {name: p.detach().clone() for name, p in model.parameters()}
    for seed in range(3):
        step.run(rows(seed=seed), sft_loss_fn, 4)
        adam.zero_grad()
        padded_loss(plain, "policy", sft_loss_fn, rows(seed=seed)).backward()
        adam.step()
    masters = {part.key.removeprefix("master."): part.values for part in step.optimizer.state_parts()}
    name = "model.layers.0.mlp.up_proj.weight"
    large = start[name].abs() > 1e-3  # the next bf16 number is further away than three steps of 1e-6
    assert large.float().mean() > 0.9
    assert torch.equal(dict(plain.named_parameters())[name][large], start[name][large])
    moved = (masters[name] - start[name].float()).abs()
    assert moved[large].median() > 1e-6
    # Enough small updates add up to a step that bf16 can represent.
    for seed in range(3, 60):
        step.run(rows(seed=seed % 5), sft_loss_fn, 8)
    changed = dict(model.parameters())[name] != start[name]
    assert changed.float().mean() > 0.05
