"""``/v1/chat/completions`` with the real openai client: templates, reasoning, tools, structured output."""

from __future__ import annotations

import asyncio
import json

import jsonschema
import openai
import pytest
import torch

from tests.serving.running import ANSWERS, CALL, WEATHER

GREETING = [{"role": "user", "content": "What is 3 plus 4?"}]


def chat(server, messages=GREETING, **body):
    return server.client().chat.completions.create(
        **{"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24, **body}
    )


def ask(taught, question, **body):
    """The answer of the taught model, compared with the same answer as a stream."""
    body = {"model": "taught", "max_tokens": 200, **body}
    messages = [{"role": "user", "content": question}]
    whole = chat(taught, messages, **body).choices[0]
    streamed = merged(chat(taught, messages, stream=True, **body))
    message = whole.message.model_dump(exclude_none=True)
    for call in [*message.get("tool_calls", []), *streamed[0].get("tool_calls", [])]:
        assert len(call.pop("id")) == len("call_") + 24
    assert streamed == (message, whole.finish_reason)
    return whole


def merged(chunks):
    """Message and finish reason of a stream, put together as a client does."""
    message, finish = {}, None
    for chunk in chunks:
        choice = chunk.choices[0]
        delta = choice.delta.model_dump(exclude_none=True)
        for key in ("role", "content", "reasoning_content"):
            if key in delta:
                message[key] = message.get(key, "") + delta[key]
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            assert call.pop("index") == len(calls)
            calls.append(call)
        finish = choice.finish_reason or finish
    if message.get("tool_calls") and not message["content"]:
        del message["content"]  # a message with calls only has none
    return message, finish


def test_the_greedy_answer_matches_transformers(server, reference):
    prompt = reference.tokenizer.apply_chat_template(GREETING, add_generation_prompt=True, return_dict=False)
    expected = reference.greedy(prompt, 24)
    answer = chat(server, extra_body={"return_token_ids": True})
    assert answer.choices[0].prompt_token_ids == prompt
    assert answer.choices[0].token_ids == expected
    assert answer.choices[0].message.content == reference.tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(expected)
    assert answer.model == "tiny"
    assert merged(chat(server, stream=True))[0]["content"] == answer.choices[0].message.content


def test_logprobs_match_transformers_and_cover_every_token(server, reference):
    def check(entries, ids, prompt):
        expected = reference.logprobs(prompt, ids)
        assert [entry.logprob for entry in entries] == pytest.approx(
            expected[torch.arange(len(ids)), ids].tolist(), abs=1e-4
        )
        for place, entry in enumerate(entries):
            best = expected[place].topk(4).values.tolist()
            assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best, abs=1e-4)
            assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-4)  # greedy
            assert bytes(entry.bytes) == entry.token.encode() or "\ufffd" in entry.token
        assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == reference.tokenizer.decode(
            ids
        )

    body = {"logprobs": True, "top_logprobs": 4, "extra_body": {"return_token_ids": True}}
    choice = chat(server, **body).choices[0]
    check(choice.logprobs.content, choice.token_ids, choice.prompt_token_ids)
    chunks = list(chat(server, stream=True, **body))
    entries = [entry for chunk in chunks for entry in (chunk.choices[0].logprobs or EMPTY).content]
    ids = [token for chunk in chunks for token in chunk.choices[0].token_ids]
    assert ids == choice.token_ids
    check(entries, ids, choice.prompt_token_ids)


class EMPTY:
    content = ()


def test_a_seed_gives_the_same_samples_as_in_the_sdk(server, sharp_checkpoint):
    from areno import SamplingParams, Trainer

    answer = chat(server, n=2, temperature=0.8, seed=5, extra_body={"return_token_ids": True})
    with Trainer(1, str(sharp_checkpoint)) as trainer:
        trainer.init()
        params = SamplingParams(temperature=0.8, max_new_tokens=24, seed=5)
        with trainer.rollout_session(sampling_params=params, proxy=False):
            result = trainer.rollout_batch([GREETING[0]["content"]], 2, params)[0]
    assert [choice.token_ids for choice in answer.choices] == [s.resp_tokens for s in result.sequences]
    assert len({choice.message.content for choice in answer.choices}) == 2


def test_the_asynchronous_client_streams_many_at_once(server):
    async def one(client, seed):
        stream = await client.chat.completions.create(
            model="tiny", messages=GREETING, max_tokens=12, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(12)))

    together = asyncio.run(all_of_them())
    alone = [chat(server, temperature=1.0, max_tokens=12, seed=seed).choices[0].message.content for seed in (0, 11)]
    assert [together[0], together[11]] == alone


def test_every_form_of_message_is_accepted(server):
    parts = [{"type": "text", "text": "What is 3 "}, {"type": "text", "text": "plus 4?"}]
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call("get_weather", '{"city": "Rome"}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        {"role": "user", "content": "And?", "name": "Ann"},
    ]
    assert chat(server, messages).usage.completion_tokens > 0


def call(name, arguments):
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_max_completion_tokens_overrides_max_tokens(server):
    answer = chat(server, max_tokens=20, max_completion_tokens=3, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 3


def test_reasoning_and_tool_calls_are_separated_from_the_content(taught):
    choice = ask(taught, "weather?", tools=[WEATHER])
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "I look it up."
    assert choice.message.content == "Let me see."
    (tool_call,) = choice.message.tool_calls
    assert tool_call.function.name == "get_weather"
    assert json.loads(tool_call.function.arguments) == {"city": "Paris", "days": 2}


def test_without_tools_a_call_is_text(taught):
    for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = ask(taught, "weather?", **body)
        assert choice.finish_reason == "stop"
        assert choice.message.content == f"Let me see. {CALL}"
        assert choice.message.tool_calls is None


def test_parallel_calls_are_separate_and_can_be_disabled(taught):
    choice = ask(taught, "two calls?", tools=[WEATHER])
    assert choice.message.content is None
    assert [json.loads(c.function.arguments)["city"] for c in choice.message.tool_calls] == ["Paris", "Rome"]
    assert len({c.id for c in choice.message.tool_calls}) == 2
    choice = ask(taught, "two calls?", tools=[WEATHER], parallel_tool_calls=False)
    assert [json.loads(c.function.arguments)["city"] for c in choice.message.tool_calls] == ["Paris"]


def test_a_call_of_an_unknown_tool_stays_text_and_is_counted(taught):
    before = taught.metric("areno_malformed_tool_calls_total")
    choice = ask(taught, "broken call?", tools=[WEATHER])
    assert choice.finish_reason == "stop"
    assert choice.message.content == ANSWERS["broken call?"]
    assert taught.metric("areno_malformed_tool_calls_total") == before + 2


def test_a_stop_string_cuts_the_content(taught):
    choice = ask(taught, "count", stop=["ve six", "xyz"])
    assert choice.message.content == "one two three four fi"
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_of_anthropics_api_is_named(taught, stream):
    anthropic = pytest.importorskip("anthropic")
    cases = [
        (200, ["xyz", "ve six"], "one two three four fi", "stop_sequence", "ve six"),
        (200, ["xyz"], ANSWERS["count"], "end_turn", None),
        (1, ["xyz"], "one", "max_tokens", None),
    ]
    with anthropic.Anthropic(base_url=taught.url, api_key="none", max_retries=0) as client:
        for limit, stop, text, reason, matched in cases:
            fields = {"model": "taught", "messages": [{"role": "user", "content": "count"}], "max_tokens": limit}
            fields |= {"stop_sequences": stop, "extra_body": {"temperature": 0}}
            if stream:
                with client.messages.stream(**fields) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(**fields)
            assert text.startswith(message.content[0].text) if limit == 1 else message.content[0].text == text
            assert (message.stop_reason, message.stop_sequence) == (reason, matched)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_any_model_makes_a_required_call(server, choice):
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
    body = {"tools": [WEATHER, other], "tool_choice": choice, "temperature": 1.0, "parallel_tool_calls": False}
    named = set()
    for seed in range(4):
        answer = chat(server, max_tokens=1500, seed=seed, **body).choices[0]
        assert answer.finish_reason == "tool_calls", answer
        (made,) = answer.message.tool_calls
        named.add(made.function.name)
        if made.function.name == "get_weather":
            jsonschema.validate(json.loads(made.function.arguments), WEATHER["function"]["parameters"])
    assert "get_weather" in named if choice == "required" else named == {"get_weather"}


def test_a_reasoning_model_makes_a_required_call_after_its_reasoning(taught):
    choice = ask(taught, "weather?", tools=[WEATHER], tool_choice="required", max_tokens=1500)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "I look it up."
    assert choice.message.content is None
    for call in choice.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])


SCHEMA = {
    "type": "object",
    "properties": {"sum": {"enum": [3, 7, 12]}, "sure": {"type": "boolean"}, "why": {"enum": ["adding", "guess"]}},
    "required": ["sum", "sure", "why"],
    "additionalProperties": False,
}


def test_a_json_schema_is_enforced_on_a_model_that_knows_no_json(server):
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}
    for seed in range(4):
        choice = chat(server, temperature=1.0, seed=seed, max_tokens=400, response_format=form).choices[0]
        assert choice.finish_reason == "stop", choice
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        streamed = chat(server, temperature=1.0, seed=seed, max_tokens=400, response_format=form, stream=True)
        assert merged(streamed)[0]["content"] == choice.message.content


def test_a_json_object_is_valid_unless_it_is_truncated(server):
    body = {"response_format": {"type": "json_object"}, "temperature": 1.0, "max_tokens": 300}
    for seed in range(3):
        choice = chat(server, seed=seed, **body).choices[0]
        assert choice.message.content.lstrip().startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


def test_a_reasoning_model_may_reason_before_its_json(taught):
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    messages = [{"role": "user", "content": "weather?"}]
    choice = chat(taught, messages, model="taught", max_tokens=1500, response_format=form).choices[0]
    assert choice.message.reasoning_content == "I look it up."
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_a_continued_conversation_reuses_cached_tokens_and_gives_the_same_answer(server, reference):
    before = server.metric("areno_reused_tokens_total")
    messages = [{"role": "user", "content": "Tell me about sums. " * 6}]
    first = chat(server, messages).choices[0].message.content
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}]
    prompt = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    answer = chat(server, messages, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == reference.greedy(prompt, 24)
    assert server.metric("areno_reused_tokens_total") - before >= 32
