"""What ``samples.jsonl`` records of training, per token: log-probs, compared with stock transformers, and clipping."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from areno.observability import samples as samples_module
from areno.observability.samples import observe, row_segments
from areno.serving.token_text import TokenTexts
from areno.training.loop import TrainingLoop
from areno.types import TokenRecord, TrainSequence
from tests.experiments.trainer_stage import run_kind
from tests.replay.conftest import of_step
from tests.support.tiny import TEXTS, bpe_tokenizer


def flat(row, name):
    return [value for segment in row for value in segment[name]]


def logprobs_by_transformers(checkpoint, tokens, temperature):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double() / temperature
    return [None, *(float(logits[i - 1].log_softmax(-1)[token]) for i, token in enumerate(tokens) if i > 0)]


def check_rows(samples, checkpoint, temperature):
    """Every trained token has its log-prob before the update, every other token null."""
    tokens_of_answers = 0
    for sample in samples:
        (row,) = sample["rows"]
        tokens, recorded = flat(row, "tokens"), flat(row, "train_logprobs")
        expected = logprobs_by_transformers(checkpoint, tokens, temperature)
        trained = [segment["trained"] for segment in row for _ in segment["tokens"]]
        assert sum(trained) == sample["response_len"] > 0
        for i, counts in enumerate(trained):
            assert recorded[i] == (pytest.approx(expected[i], abs=2e-5) if counts else None)
        tokens_of_answers += sum(trained)
        assert [flag is None for flag in flat(row, "clipped")] == [not counts for counts in trained]
    assert tokens_of_answers > 20


def test_a_run_records_logprobs_before_the_update_and_clipped_tokens(runs, tiny_checkpoint):
    """Each step starts from known weights, and gspo makes one update per step, so its log-probs are those of these weights."""
    run = runs("gspo")
    for step, checkpoint in ((0, tiny_checkpoint), (1, run / "checkpoints" / "step_000001")):
        samples = of_step(run, step, "samples.jsonl")
        assert len(samples) > 6
        check_rows(samples, checkpoint, 0.9)
        assert not any(any(flat(sample["rows"][0], "clipped")) for sample in samples), "every ratio is 1"


def test_clipped_tokens_follow_from_ratio_and_advantage(runs):
    """In the second minibatch the policy has moved; the clip range is that of ``--grpo-clip-eps``."""
    clipped = 0
    for sample in of_step(runs("grpo"), 2, "samples.jsonl"):
        for segment in sample["rows"][0]:
            if not segment["trained"]:
                continue
            columns = (segment[name] for name in ("train_logprobs", "logprobs", "advantages", "clipped"))
            for new, old, advantage, flag in zip(*columns, strict=True):
                ratio = math.exp(new - old)
                if abs(abs(ratio - 1) - 0.002) > 1e-5:  # the file has rounded values
                    assert flag == ((ratio > 1.002 and advantage > 0) or (ratio < 0.998 and advantage < 0))
                    clipped += flag
    assert clipped > 5


def test_an_experiment_records_the_same(tmp_path, tiny_checkpoint):
    run = run_kind("rl", tiny_checkpoint, tmp_path, {"actor.eps_clip": 0.001, "gconfig.temperature": 0.8})
    samples = of_step(run.folder, 0, "samples.jsonl")
    assert len(samples) >= 4
    check_rows(samples, tiny_checkpoint, 0.8)


def test_with_a_critic_only_the_policys_update_is_recorded(runs, tiny_checkpoint):
    """In its first step PPO trains only the critic, in the second both."""
    first, second = (of_step(runs("ppo"), step, "samples.jsonl") for step in (0, 1))
    assert not any("train_logprobs" in segment for sample in first for segment in sample["rows"][0])
    check_rows(second, tiny_checkpoint, 0.9)


def row(length, group=0, reward=0.0):
    return TrainSequence([True] + [False] * (length - 1), list(range(length)), reward=reward, group=group)


def test_only_rows_that_will_be_recorded_are_observed(monkeypatch):
    monkeypatch.setattr(samples_module, "MAX_TOKENS", 100)
    rows = [[row(10), row(20)], [row(10)], [row(30)], [row(40)], [row(1)]]
    observe([0, 0, 0, 1, 1], [0.5, 0.4, 1.0, 2.0, 0.0], rows)
    # First, worst and best of prompt 0 have 70 tokens; the first of prompt 1 would exceed the limit, which ends the selection.
    assert [[each.observed for each in of_sample] for of_sample in rows] == [[0, 1], [2], [3], [-1], [-1]]


def test_segments_hold_the_values_of_their_tokens():
    tokenizer = bpe_tokenizer(TEXTS)
    sequence = TrainSequence(
        [True, True, False, True, False, False],
        [5, 6, 7, 8, 9, 10],
        logprobs=[0.0, 0.0, -1.0, 0.0, -2.0, -3.0],
        versions=[-1, -1, 4, -1, 5, 5],
        loss_mask=[False, False, True, False, True, False],
    )
    computed = TokenRecord([0.0, 0.0, -1.5, 0.0, -2.25, 0.0], [False, False, True, False, False, False])
    segments = row_segments(sequence, TokenTexts(tokenizer), computed=computed)
    assert [segment["train_logprobs"] for segment in segments] == [[None, None], [-1.5], [None], [-2.25], [None]]
    assert [segment["clipped"] for segment in segments] == [[None, None], [True], [None], [False], [None]]
    unmarked = row_segments(sequence, TokenTexts(tokenizer), computed=TokenRecord(computed.logprobs, None))
    assert not any("clipped" in segment for segment in unmarked)
    assert all("train_logprobs" in segment for segment in unmarked)
    assert not any("train_logprobs" in segment for segment in row_segments(sequence, TokenTexts(tokenizer)))


def test_a_backend_without_token_records_gives_none():
    class Loop(TrainingLoop):
        backend = object()

        run_step = steps = measure = total_steps = None

    assert Loop().token_records() == {}
