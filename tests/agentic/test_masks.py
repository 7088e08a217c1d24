"""Which tokens a loss mask policy trains on, compared with the known spans of scripted answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from areno import grpo_loss_fn
from areno.api.agentic import AgentTrajectoryTurn, LossMaskPolicy
from areno.errors import UsageError
from areno.rollouts.conversation.history import prefix_keys
from areno.rollouts.conversation.trajectory_rows import build_rows
from tests.agentic.stage import Script, batch_of, open_trainer, sampling, save_model
from tests.agentic.templates import FORMATS, tokenizer_of

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
NAMES = [field.name for field in fields(LossMaskPolicy) if field.name != "forced_tokens"]
ALL_OFF = LossMaskPolicy(**dict.fromkeys(NAMES, False))
# Text that each field alone trains on; end tokens belong to the span that they end.
SPANS = {
    "assistant_text": ["<think>\nhmm\n</think>\n\nI look."],
    "assistant_tool_calls": [f" {CALL}\n{CALL}<|im_end|>"],
    "tool_results": ["moss is a plant", "fern is one too"],
    "final_assistant_text": ["Both are plants.<|im_end|>"],
    "system_prompt": ["Be short."],
    "user_prompt": ["What are moss and fern?"],
}


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Any]]:
    """The trainer, its session, and two turns of one sample with every kind of span."""
    form = FORMATS["thinking"]
    tokenizer = tokenizer_of(form)
    folder = save_model(tmp_path_factory.mktemp("masks") / "model", tokenizer, [tokenizer.eos_token_id])
    with open_trainer(folder) as trainer:
        script = Script(trainer.backend)
        [item] = batch_of(["What are moss and fern?"]).iter_samples()
        messages: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": item.prompt}]
        returned = []
        with trainer.rollout_session(sampling_params=sampling()) as ctx:
            client = openai.OpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key, max_retries=0)
            for answer in (f"<think>\nhmm\n</think>\n\nI look. {CALL}\n{CALL}<|im_end|>", "Both are plants.<|im_end|>"):
                script.lines.append(tokenizer(answer, add_special_tokens=False)["input_ids"])
                response = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
                returned.append(AgentTrajectoryTurn(item=item, messages=list(messages), response=response, tools=TOOLS))
                message = response.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call, text in zip(message.tool_calls or [], ("moss is a plant", "fern is one too"), strict=False):
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            client.close()
        yield trainer, ctx, returned


@pytest.fixture(scope="module")
def played(returned: Any) -> tuple[Any, Any]:
    """The trainer, and the sample of these turns."""
    trainer, ctx, turns = returned
    [sample] = ctx.samples(turns)
    assert sample.forks == []
    return trainer, sample


def trained_texts(trainer: Any, sample: Any, policy: LossMaskPolicy) -> list[str]:
    """Texts of consecutive tokens that are trained on, in all rows."""
    tokenizer = trainer.get_tokenizer()
    texts = []
    for row in build_rows(sample.turns, policy, tokenizer):
        for counts, run in itertools.groupby(zip(row.trained, row.tokens, strict=True), key=lambda pair: pair[0]):
            if counts:
                texts.append(tokenizer.decode([token for _, token in run]))
    return texts


@pytest.mark.parametrize("name", NAMES)
def test_each_field_alone_trains_on_its_spans(played, name):
    assert trained_texts(*played, replace(ALL_OFF, **{name: True})) == SPANS[name]


def test_each_field_can_be_left_out(played):
    for name in NAMES:
        policy = LossMaskPolicy(**{other: other != name for other in NAMES})
        texts = trained_texts(*played, policy)
        for other, spans in SPANS.items():
            for span in spans:
                assert any(span in text for text in texts) == (other != name), (name, span)


def test_by_default_all_sampled_tokens_are_trained_on(played):
    _, sample = played
    [row] = sample.rows
    assert row.trained == row.sampled
    assert [t for t, sampled in zip(row.tokens, row.sampled, strict=True) if sampled] == sample.record.tokens
    assert sample.record.loss_mask == [True] * len(sample.record.tokens)


def test_every_token_has_a_role(played):
    trainer, sample = played
    tokenizer = trainer.get_tokenizer()
    [row] = sample.rows
    texts: dict[str, str] = {}
    for role, token in zip(row.roles(), row.tokens, strict=True):
        texts[role] = texts.get(role, "") + tokenizer.decode([token])
    assert texts["system"] == "Be short."
    assert texts["user"] == "What are moss and fern?"
    assert texts["tool"] == "moss is a plantfern is one too"
    assert texts["text"] == "<think>\nhmm\n</think>\n\nI look.Both are plants.<|im_end|>"
    assert texts["call"] == f" {CALL}\n{CALL}<|im_end|>"
    assert "assistant" not in texts


def test_the_reward_record_is_complete(played):
    _, sample = played
    record = sample.record
    assert [message["role"] for message in record.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert record.completion == "I look.\nBoth are plants."
    assert record.final_answer == "Both are plants."
    assert record.answer == ["4"]
    assert record.tool_calls == [{"name": "look_up", "arguments": "{}"}] * 2
    assert [(result["name"], result["content"]) for result in record.tool_results] == [
        ("look_up", "moss is a plant"),
        ("look_up", "fern is one too"),
    ]
    kinds = ["request", "assistant_text", "assistant_tool_call", "assistant_tool_call", "tool_result", "tool_result"]
    assert [event.type for event in record.trace] == [*kinds, "request", "assistant_text", "finish"]
    assert record.rendered_completion.startswith("<think>\nhmm")
    assert record.rendered_completion.endswith("Both are plants.<|im_end|>")
    assert len(record.tokens) == len(record.logprobs)
    assert record.metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("names", [["tool_results"], ["system_prompt", "user_prompt", "assistant_text"]])
def test_context_that_is_trained_on_has_the_policys_own_logprobs(returned, names, monkeypatch):
    """Otherwise it would train against 0.0, as if the policy had been certain of it."""
    trainer, ctx, turns = returned
    policy = replace(ALL_OFF, **dict.fromkeys(names, True))
    monkeypatch.setattr(ctx, "loss_mask_policy", policy)
    trainer.set_learning_rate(0.0)  # other tests use it too
    [sample] = ctx.samples(turns)
    module = AutoModelForCausalLM.from_pretrained(trainer.model_path, dtype=torch.float32)
    for row in sample.rows:
        ids = torch.tensor([row.tokens])
        with torch.inference_mode():
            expected = (module(input_ids=ids).logits / row.temperature).log_softmax(-1)[0, :-1]
        expected = expected.gather(-1, ids[0, 1:, None])[:, 0].tolist()
        context = [i for i, counts in enumerate(row.trained) if counts and not row.sampled[i]]
        assert context
        assert [row.logprobs[i] for i in context] == pytest.approx([expected[i - 1] for i in context], abs=1e-4)
        trained = row.train_sequence(reward=1.0, group=0, eos_token_id=0)
        trained.advantages = [1.0] * len(row.tokens)
        assert trainer.train([trained], grpo_loss_fn)["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    [unscored] = build_rows(sample.turns, policy, trainer.get_tokenizer())
    with pytest.raises(UsageError, match=r"did not sample .* no log-probs yet; use samples that `ctx\.samples"):
        unscored.train_sequence(reward=1.0, group=0, eos_token_id=0)


def test_messages_of_an_earlier_row_are_not_trained_on_again_in_a_fork(played):
    """The fork renders the whole conversation again, with one more question."""
    trainer, sample = played
    first, second = sample.turns
    messages = [*second.messages, second.answer, {"role": "user", "content": "And moss?"}]
    text = f"{second.prompt_text}Both are plants.<|im_end|>\n<|im_start|>user\nAnd moss?<|im_end|>\n<|im_start|>assistant\n"
    tokens = trainer.get_tokenizer()(text, add_special_tokens=False)["input_ids"]
    fork = replace(
        second,
        **{"parent": None, "context_tokens": tokens, "context_text": text, "anchor": "", "prompt_text": text},
        **{"messages": messages, "keys": prefix_keys(messages)},
    )
    policy = replace(ALL_OFF, tool_results=True, user_prompt=True)
    once = [*SPANS["user_prompt"], *SPANS["tool_results"]]
    assert trained_texts(trainer, SimpleNamespace(turns=[first, second, fork]), policy) == [*once, "And moss?"]
    assert trained_texts(trainer, SimpleNamespace(turns=[fork]), policy) == [*once, "And moss?"]


def test_tokens_forced_by_a_grammar_are_trained_on_only_on_request(played):
    """Every other token of the first turn is marked as forced."""
    trainer, sample = played
    tokenizer = trainer.get_tokenizer()
    first = replace(sample.turns[0], forced=[place % 2 == 0 for place in range(len(sample.turns[0].tokens))])
    for policy, counted in ((LossMaskPolicy(), slice(1, None, 2)), (LossMaskPolicy(forced_tokens=True), slice(None))):
        [row] = build_rows([first], policy, tokenizer)
        trained = [token for token, counts in zip(row.tokens, row.trained, strict=True) if counts]
        assert trained == first.tokens[counted]
