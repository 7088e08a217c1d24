"""A sample's temperature stays attached to its log-probs, through list operations, until training."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from areno import ArenoConfig, SamplingParams, Trainer, TrainSequence, grpo_loss_fn
from areno.api.agentic import AgentTrajectoryTurn
from areno.errors import UsageError
from areno.types import Logprobs, RolloutSequence
from tests.agentic.stage import batch_of

PROMPT = [5, 6, 7]


@pytest.fixture
def trainer(tiny_checkpoint):
    with Trainer(1, str(tiny_checkpoint), custom_config=ArenoConfig(optimizer={"lr": 1e-3})) as trainer:
        trainer.init()
        yield trainer


def answers(trainer, temperature, n=4, **more):
    sampling = SamplingParams(max_new_tokens=8, temperature=temperature, ignore_eos=True, **more)
    with trainer.rollout_session(sampling_params=sampling, proxy=False):
        return trainer.rollout_token_batch([PROMPT], n, sampling)[0].sequences


def recipe(sequence, advantage=1.0, **more):
    """Build a row as the SDK documentation does."""
    length = len(sequence.resp_tokens)
    return TrainSequence(
        prompt_mask=[True] * len(PROMPT) + [False] * length,
        tokens=PROMPT + sequence.resp_tokens,
        logprobs=[0.0] * len(PROMPT) + sequence.resp_logprobs,
        advantages=[0.0] * len(PROMPT) + [advantage] * length,
        **more,
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_row_built_as_documented_trains_at_its_own_temperature(trainer, temperature):
    rows = [recipe(sequence, (-1.0) ** n) for n, sequence in enumerate(answers(trainer, temperature))]
    assert {row.temperature for row in rows} == {temperature}
    stats = trainer.train(rows, grpo_loss_fn)
    assert stats["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert stats["clip_fraction"] == 0.0


def test_recorded_logprobs_are_of_the_temperature_scaled_policy(trainer, tiny_checkpoint):
    """Against transformers; those of greedy answers are at temperature 1."""
    plain = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    for greedy, temperature in ((False, 0.5), (True, 1.0)):
        [sequence] = answers(trainer, 0.5, 1, greedy=greedy)
        ids = torch.tensor([PROMPT + sequence.resp_tokens])
        with torch.inference_mode():
            logprobs = (plain(input_ids=ids).logits / temperature).log_softmax(-1)
        expected = logprobs[0, :-1].gather(-1, ids[0, 1:, None])[len(PROMPT) - 1 :, 0]
        assert sequence.temperature == temperature
        assert sequence.resp_logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_logprobs_keep_their_temperature_through_list_operations():
    sampled = RolloutSequence([1, 2, 3], [-1.0, -2.0, -3.0], temperature=0.5).resp_logprobs
    grown = [0.0]
    grown += sampled
    for values in (
        [0.0] * 2 + sampled,
        sampled + [0.0],  # noqa: RUF005  (an unpacked list is a plain one)
        sampled[1:],
        sampled.copy(),
        [0.0] + sampled[:2],  # noqa: RUF005
        sampled + sampled,
        grown,
        pickle.loads(pickle.dumps(sampled)),
    ):
        assert isinstance(values, Logprobs)
        assert values.temperature == 0.5
    assert [0.0] * 2 + sampled == [0.0, 0.0, -1.0, -2.0, -3.0]
    assert sampled[1] == -2.0
    mixed = sampled + Logprobs([-4.0], 1.0)
    assert type(mixed) is list
    assert mixed == [-1.0, -2.0, -3.0, -4.0]


def test_a_row_says_whether_it_knows_its_temperature():
    mask, tokens = [True, False], [5, 6]
    assert TrainSequence(mask, tokens).temperature == 1.0
    plain = TrainSequence(mask, tokens, [0.0, -1.0])
    assert (plain.temperature, plain.knows_temperature) == (1.0, False)
    explicit = TrainSequence(mask, tokens, [0.0, -1.0], temperature=0.7)
    assert (explicit.temperature, explicit.knows_temperature, explicit.logprobs) == (0.7, True, [0.0, -1.0])
    assert replace(explicit, reward=1.0).temperature == 0.7
    own = TrainSequence(mask, tokens, Logprobs([0.0, -1.0], 0.5), temperature=0.7)
    assert own.temperature == 0.7  # an explicit value takes precedence
    with pytest.raises(ValueError, match="temperature must be finite and above 0, got 0"):
        TrainSequence(mask, tokens, temperature=0.0)


def test_a_row_that_lost_its_temperature_is_refused(trainer):
    """Unpacking makes plain lists; then only the program knows the temperature."""
    [sequence] = answers(trainer, 0.5, 1)
    row = recipe(sequence)
    lost = TrainSequence(row.prompt_mask, row.tokens, [*row.logprobs], row.advantages)
    with pytest.raises(
        UsageError,
        match=r"row 1 has logprobs, but does not state the temperature .* has sampled at temperature 0\.5; pass "
        "`temperature=sequence.temperature` to TrainSequence",
    ):
        trainer.train([row, lost], grpo_loss_fn)
    restored = replace(lost, temperature=sequence.temperature)
    assert trainer.train([restored], grpo_loss_fn)["ratio_mean"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("fails", [False, True])
def test_rows_need_no_temperature_after_an_evaluation_at_another_one(trainer, fails):
    [sequence] = answers(trainer, 1.0, 1)
    sampling = SamplingParams(max_new_tokens=4, temperature=0.5)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        trainer.evaluate([{"prompt": "What is 1 plus 2?"}], lambda record: 1 / (1 - fails), sampling_params=sampling)
    row = recipe(sequence)
    lost = TrainSequence(row.prompt_mask, row.tokens, [*row.logprobs], row.advantages)
    assert trainer.train([lost], grpo_loss_fn)["ratio_mean"] == pytest.approx(1.0, abs=1e-4)


def test_a_turn_that_an_agent_sampled_through_the_trainer_keeps_its_temperature(trainer):
    sampling = SamplingParams(max_new_tokens=8, temperature=0.5)
    with trainer.rollout_session(sampling_params=sampling) as ctx:
        [item] = batch_of(["What is 1 plus 2?"]).iter_samples()
        messages = [{"role": "user", "content": item.prompt}]
        [answer] = trainer.rollout_batch([item.prompt], 1, sampling)[0].sequences
        turn = AgentTrajectoryTurn(
            item, messages, response_tokens=answer.resp_tokens, response_logprobs=answer.resp_logprobs
        )
        [sample] = ctx.samples(turn)
    assert [row.temperature for row in sample.rows] == [0.5]
    assert sample.sequence.temperature == 0.5


def test_turns_without_a_response_object_continue_the_last_turn(trainer):
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with trainer.rollout_session(sampling_params=sampling) as ctx:
        [item] = batch_of(["What is 1 plus 2?"]).iter_samples()
        messages, turns, tokenizer = [{"role": "user", "content": item.prompt}], [], trainer.get_tokenizer()
        for _ in range(3):
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            [answer] = trainer.rollout_token_batch([prompt], 1, sampling)[0].sequences
            # The answer is the text that the template renders, so that a later prompt starts with the tokens of this turn.
            text = [*tokenizer.encode("ab", add_special_tokens=False), tokenizer.eos_token_id]
            turn = AgentTrajectoryTurn(
                item, list(messages), response_tokens=text, response_logprobs=answer.resp_logprobs[:1] * len(text)
            )
            turns.append(turn)
            messages += [{"role": "assistant", "content": "ab"}, {"role": "user", "content": "go on"}]
        [sample] = ctx.samples(turns)
    assert [turn.parent and sample.turns.index(turn.parent) for turn in sample.turns] == [None, 0, 1]
    assert len(sample.rows) == 1
