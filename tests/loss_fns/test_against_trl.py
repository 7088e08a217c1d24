"""DPO and SFT against TRL: both read the same texts, build their own batches, and must compute the same loss and gradients.

TRL pads a batch, areno packs it and cuts it into microbatches of one pair. They name some things differently:
TRL's ``ipo`` compares means over the tokens, which is areno's ``ipo`` with ``length_normalized``; its ``sigmoid_norm`` is
areno's ``sigmoid`` with ``length_normalized``; and it has no label smoothing for ``sigmoid``, so the smoothed loss is
combined from two of its losses, the second one with the answers swapped.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from areno.algorithms.simpo import SimPOOptions, simpo_loss_fn
from areno.engine.model.loading import prepare
from areno.engine.scoring import score
from areno.engine.train.optimizer import MasterAdamW, OptimizerOptions
from areno.engine.train.step import TrainStep
from areno.loss_fns import dpo_loss_fn, sft_loss_fn
from areno.training.objectives.base import RowBounds
from areno.training.objectives.pairs import build_preference_rows
from areno.training.objectives.sft import build_sft_rows
from tests.loss_fns.packs import make_batch, value_of
from tests.support.tiny import save_tiny_checkpoint

trl = pytest.importorskip("trl")

ROWS = [
    {"prompt": f"What is {a} plus {b}?", "chosen": f"The answer is {a + b}.", "rejected": f"It is {a * b}, or {a}."}
    for a, b in [(1, 2), (12, 7), (5, 5), (20, 29)]
] + [{"prompt": "Say yes.", "chosen": "yes", "rejected": "What is 1 plus 2? The answer is 3. No."}]
LIMITS = {"max_prompt_tokens": 500, "max_new_tokens": 500, "eos_token_ids": frozenset()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A policy and another model as its reference, both with sharpened distributions: otherwise all margins are near zero."""
    folder = tmp_path_factory.mktemp("trl")
    return [save_tiny_checkpoint(folder / name, seed=seed, sharpen=3.0) for seed, name in enumerate(("policy", "ref"))]


def stock(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def conversation(row, *keys):
    """The row in the format of TRL: a user turn, and assistant turns under the keys."""
    turns = {key: [{"role": "assistant", "content": row[key]}] for key in keys}
    return {"prompt": [{"role": "user", "content": row["prompt"]}], **turns}


def by_trl(trainer_cls, config_cls, checkpoint, rows, folder, *, model_args=None, **options):
    """Loss, gradients and statistics of one batch of all rows, and the token ids in it."""
    config = config_cls(
        output_dir=str(folder),
        per_device_train_batch_size=len(rows),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **options,
    )
    trainer = trainer_cls(
        model=stock(checkpoint),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
        **(model_args or {}),
    )
    batch = trainer.data_collator(list(trainer.train_dataset))
    tokens = [ids[seen.bool()].tolist() for ids, seen in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    return loss.item(), gradients, trainer._metrics["train"], tokens


def by_areno(checkpoint, rows, loss_fn, mini_bs):
    """Loss, gradients and statistics of one optimizer step."""
    model = prepare(stock(checkpoint), "llama")
    step = TrainStep(model, MasterAdamW(model.parameters(), OptimizerOptions()))
    step.set_training(True)
    stats = step.accumulate(rows, loss_fn, mini_bs)
    names = [name for name, _ in model.parameters()]
    return stats, dict(zip(names, step.optimizer.gradients(), strict=True))


def assert_same_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    assert largest > 1e-4, "a gradient of zero would match anything"
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= 1e-5 * largest, name


def referenced_rows(checkpoints):
    """The preference rows that areno trains on, with the log-probs of the reference."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[0])
    pairs, dropped = build_preference_rows(ROWS, tokenizer, RowBounds(**LIMITS))
    assert dropped == 0
    rows = [row for pair in pairs for row in pair]
    model = prepare(stock(checkpoints[1]), "llama")
    logprobs = score(model, "logprobs", [r.tokens for r in rows], 3, [1.0] * len(rows))
    return [replace(row, ref_logprobs=values) for row, values in zip(rows, logprobs, strict=True)]


def dpo_by_trl(checkpoints, folder, loss_type, beta, swapped=False):
    rows = [conversation(row, "chosen", "rejected") for row in ROWS]
    if swapped:
        rows = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    reference = {"ref_model": stock(checkpoints[1])}
    options = {"loss_type": loss_type, "beta": beta, "model_args": reference}
    return by_trl(trl.DPOTrainer, trl.DPOConfig, checkpoints[0], rows, folder, **options)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"loss_type": "sigmoid", "beta": 0.1}, {"beta": 0.1}),
        ({"loss_type": "sigmoid", "beta": 0.5}, {"beta": 0.5}),
        ({"loss_type": "sigmoid_norm", "beta": 2.0}, {"beta": 2.0, "length_normalized": True}),
        ({"loss_type": "hinge", "beta": 0.3}, {"beta": 0.3, "loss_type": "hinge"}),
        ({"loss_type": "ipo", "beta": 0.4}, {"beta": 0.4, "loss_type": "ipo", "length_normalized": True}),
    ],
)
def test_dpo_matches_the_loss_gradients_and_statistics_of_trl(theirs, ours, checkpoints, tmp_path):
    loss, gradients, metrics, tokens = dpo_by_trl(checkpoints, tmp_path, **theirs)
    rows = referenced_rows(checkpoints)
    assert [row.tokens for row in rows[0::2] + rows[1::2]] == tokens
    stats, own = by_areno(checkpoints[0], rows, partial(dpo_loss_fn, **ours), mini_bs=2)
    assert stats["loss"] == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(own, gradients)
    if not ours.get("length_normalized"):  # TRL's statistics are based on sums
        for name, key in [
            ("dpo_margin", "rewards/margins"),
            ("dpo_accuracy", "rewards/accuracies"),
            ("dpo_chosen_reward", "rewards/chosen"),
            ("dpo_rejected_reward", "rewards/rejected"),
        ]:
            assert stats[name] == pytest.approx(metrics[key][0], rel=1e-4, abs=1e-6), name


def test_label_smoothing_mixes_the_loss_with_that_of_swapped_answers(checkpoints, tmp_path):
    straight = dpo_by_trl(checkpoints, tmp_path, "sigmoid", 0.3)
    swapped = dpo_by_trl(checkpoints, tmp_path, "sigmoid", 0.3, swapped=True)
    loss_fn = partial(dpo_loss_fn, beta=0.3, label_smoothing=0.2)
    stats, own = by_areno(checkpoints[0], referenced_rows(checkpoints), loss_fn, mini_bs=2)
    assert stats["loss"] == pytest.approx(0.8 * straight[0] + 0.2 * swapped[0], rel=1e-5)
    mixed = {name: 0.8 * gradient + 0.2 * swapped[1][name] for name, gradient in straight[1].items()}
    assert_same_gradients(own, mixed)


@pytest.mark.parametrize("mini_bs", [1, 2, 5])
def test_sft_matches_the_loss_and_gradients_of_trl(mini_bs, checkpoints, tmp_path):
    data = [{"prompt": row["prompt"], "response": row["rejected"]} for row in ROWS]
    conversations = [conversation(row | {"completion": row["rejected"]}, "completion") for row in ROWS]
    loss, gradients, _, tokens = by_trl(trl.SFTTrainer, trl.SFTConfig, checkpoints[0], conversations, tmp_path)
    rows, _ = build_sft_rows(data, AutoTokenizer.from_pretrained(checkpoints[0]), RowBounds(**LIMITS))
    assert [row.tokens for row in rows] == tokens
    stats, own = by_areno(checkpoints[0], rows, sft_loss_fn, mini_bs)
    assert stats["loss"] == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(own, gradients)


@pytest.mark.parametrize(("beta", "gamma"), [(2.0, 1.0), (0.5, 0.0)])
def test_simpo_matches_trl(beta, gamma):
    from trl.experimental.cpo import CPOTrainer

    batch = make_batch([5, 3, 4, 7, 2, 6], seed=2, mask_share=1.0)
    means = torch.tensor([sum(t["x"] for t in row) / len(row) for row in batch.rows], dtype=torch.float64)
    knobs = {"beta": beta, "simpo_gamma": gamma, "alpha": 0.0, "loss_type": "simpo", "label_smoothing": 0.0}
    theirs = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), **knobs)
    losses, chosen, rejected = CPOTrainer.cpo_loss(theirs, means[0::2], means[1::2])
    loss, metrics = simpo_loss_fn(batch.pack, batch.logprobs, SimPOOptions(beta, gamma))
    assert float(loss) == pytest.approx(float(losses.mean()), rel=1e-6)
    assert value_of(metrics["pair_chosen_reward"]) == pytest.approx(float(chosen.mean()), rel=1e-6)
    assert value_of(metrics["pair_rejected_reward"]) == pytest.approx(float(rejected.mean()), rel=1e-6)
    assert value_of(metrics["pair_accuracy"]) == pytest.approx(float((chosen > rejected).double().mean()))
