"""OpenAI's Responses API and Anthropic's Messages API, each with its own client: the same answers and recorded tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.agentic.stage import Script, batch_of, open_trainer, sampling, save_model
from tests.agentic.templates import FORMATS, tokenizer_of

anthropic = pytest.importorskip("anthropic")

PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
THOUGHT, TEXT = "I look it up.", "One moment."
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "look_up", "arguments": {{"word": "{word}"}}}}\n</tool_call>' for word in ("moss", "fern")
)
FIRST = f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n{CALLS}<|im_end|>"
SECOND = "Moss is a plant, fern too.<|im_end|>"
QUESTION = "What are moss and fern?"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Script]]:
    tokenizer = tokenizer_of(FORMATS["thinking"])
    folder = save_model(tmp_path_factory.mktemp("protocols") / "model", tokenizer, [tokenizer.eos_token_id])
    with open_trainer(folder) as trainer:
        yield trainer, Script(trainer.backend)


@pytest.fixture
def scene(stage):
    """Yield an open session with two scripted answers, and the sample's task; then check the recorded trajectory."""
    trainer, script = stage
    tokenizer = trainer.get_tokenizer()
    script.lines.clear()
    script.log.clear()
    script.lines.extend(tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in (FIRST, SECOND))
    [item] = batch_of([QUESTION]).iter_samples()
    with trainer.rollout_session(sampling_params=sampling()) as ctx:
        yield ctx, item
        [sample] = ctx.samples(ctx.trajectory(item))
    assert sample.forks == []
    [row] = sample.rows
    assert row.tokens == script.log[-1].prompt + script.log[-1].tokens
    assert [exchange.tokens for exchange in script.log] == [turn.tokens for turn in sample.turns]
    assert tokenizer.decode(row.tokens) == wanted_row()
    assert sample.record.final_answer == "Moss is a plant, fern too."


def wanted_row() -> str:
    """The whole conversation as the template renders it."""
    tool = {"type": "function", "function": {"name": "look_up", "description": "Look up.", "parameters": PARAMETERS}}
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": TEXT,
            "reasoning_content": THOUGHT,
            "tool_calls": [{"function": {"name": "look_up", "arguments": {"word": word}}} for word in ("moss", "fern")],
        },
        {"role": "tool", "content": "moss: a plant"},
        {"role": "tool", "content": "fern: a plant"},
    ]
    tokenizer = tokenizer_of(FORMATS["thinking"])
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    return text + SECOND


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_api_is_answered_and_recorded(scene, stream):
    ctx, item = scene
    tools = [{"type": "function", "name": "look_up", "description": "Look up.", "parameters": PARAMETERS}]
    with openai.OpenAI(base_url=ctx.get_base_url(), api_key=ctx.get_api_key(item), max_retries=0) as client:

        def ask(conversation: Any) -> Any:
            fields = {"model": "policy", "input": conversation, "instructions": "Be short.", "tools": tools}
            if not stream:
                return client.responses.create(**fields)
            with client.responses.stream(**fields) as events:
                received = list(events)
                check_stream(received)
                return events.get_final_response()

        conversation = [{"role": "user", "content": QUESTION}]
        first = ask(conversation)
        assert [part.type for part in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert first.output[0].content[0].text == THOUGHT
        assert first.output_text == TEXT
        assert [json.loads(call.arguments) for call in first.output[2:]] == [{"word": "moss"}, {"word": "fern"}]
        assert first.status == "completed"
        assert first.usage.output_tokens > 20
        conversation += [part.model_dump(exclude_none=True) for part in first.output]
        for call, word in zip(first.output[2:], ("moss", "fern"), strict=True):
            conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": f"{word}: a plant"})
        second = ask(conversation)
        assert second.output_text == "Moss is a plant, fern too."


def check_stream(events: list[Any]) -> None:
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(numbers)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text in (TEXT, "Moss is a plant, fern too.")
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_api_is_answered_and_recorded(scene, stream):
    ctx, item = scene
    tools = [{"name": "look_up", "description": "Look up.", "input_schema": PARAMETERS}]
    url = ctx.get_base_url().removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key=ctx.get_api_key(item), max_retries=0) as client:

        def ask(messages: list[Any]) -> Any:
            fields = {"model": "policy", "messages": messages, "system": "Be short.", "tools": tools, "max_tokens": 200}
            if not stream:
                return client.messages.create(**fields)
            with client.messages.stream(**fields) as events:
                assert [event.type for event in events][-1] == "message_stop"
                return events.get_final_message()

        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        first = ask(messages)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert first.content[0].thinking == THOUGHT
        assert first.content[1].text == TEXT
        assert [block.input for block in first.content[2:]] == [{"word": "moss"}, {"word": "fern"}]
        assert first.stop_reason == "tool_use"
        assert first.usage.input_tokens > 20
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": f"{block.input['word']}: a plant"}
            for block in first.content[2:]
        ]
        messages += [{"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}]
        second = ask([*messages, {"role": "user", "content": results}])
        assert [block.text for block in second.content] == ["Moss is a plant, fern too."]
        assert second.stop_reason == "end_turn"


def test_limits_and_tool_choices_are_translated(stage):
    trainer, _ = stage
    tools = [{"name": "look_up", "description": "Look up.", "input_schema": PARAMETERS}]
    with trainer.rollout_session(sampling_params=sampling()) as ctx:
        url, key = ctx.get_base_url(), ctx.api_key
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            cut = client.responses.create(model="policy", input="Hello", max_output_tokens=3)
            assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert cut.usage.output_tokens == 3
            with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
                client.responses.create(model="policy", input="Hello", previous_response_id="resp_1")
            with pytest.raises(openai.BadRequestError, match="tools of type 'web_search' are not supported"):
                client.responses.create(model="policy", input="Hello", tools=[{"type": "web_search"}])
            with pytest.raises(openai.NotFoundError):
                client.responses.create(model="other", input="Hello")
        with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as client:
            hello = [{"role": "user", "content": "Hello"}]
            cut = client.messages.create(model="policy", messages=hello, max_tokens=3)
            assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
            named = {"type": "tool", "name": "look_up"}
            called = client.messages.create(
                model="policy", messages=hello, tools=tools, tool_choice=named, max_tokens=600
            )
            assert {block.name for block in called.content if block.type == "tool_use"} == {"look_up"}
            with pytest.raises(anthropic.BadRequestError, match="blocks of type 'image' are not supported"):
                client.messages.create(
                    model="policy",
                    messages=[{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}],
                    max_tokens=3,
                )
        with (
            anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError),
        ):
            client.messages.create(model="policy", messages=hello, max_tokens=3)
