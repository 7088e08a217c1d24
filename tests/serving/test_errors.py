"""Every error has OpenAI's shape and the right status, and says what to do; none is a traceback."""

from __future__ import annotations

import itertools
import threading

import httpx
import openai
import pytest

from tests.serving.running import WEATHER, running

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"prompt": "hi", "max_tokens": 2}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    return body["error"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "messages", "Field required"),
        ({**CHAT, "messages": []}, "messages", "at least 1"),
        ({**CHAT, "messages": [{"role": "robot", "content": "x"}]}, "messages", "role"),
        ({**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        ({**CHAT, "messages": [{"role": "user", "content": "\ud800"}]}, "messages", "unpaired surrogate"),
        ({**CHAT, "temperature": -1}, "temperature", "greater than or equal to 0"),
        ({**CHAT, "temperature": "hot"}, "temperature", "number"),
        ({**CHAT, "top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({**CHAT, "n": 0}, "n", "greater than or equal to 1"),
        ({**CHAT, "n": 100}, "n", "limit of 32"),
        ({**CHAT, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({**CHAT, "stop": ""}, "stop", "at least 1 character"),
        ({**CHAT, "stop": ["x"] * 17}, "stop", "at most 16 items"),
        ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs", "requires logprobs"),
        ({**CHAT, "logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
        ({**CHAT, "logit_bias": {"99999": 1}}, "logit_bias", "99999 is not a token id"),
        ({**CHAT, "stop_token_ids": [99999]}, "stop_token_ids", "99999 is not a token id"),
        ({**CHAT, "response_format": {"type": "json_schema"}}, "response_format", "must be used together"),
        ({**CHAT, "response_format": BAD_SCHEMA}, "response_format", "json_schema"),
        ({**CHAT, "tool_choice": "required"}, "tool_choice", "requires tools"),
        ({**CHAT, "tools": [{"type": "function"}]}, "tools", "Field required"),
        (
            {**CHAT, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
            "tools",
            "there is no tool 'nope'",
        ),
        ({**CHAT, "tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format", "tool call"),
    ],
)  # fmt: skip
def test_bad_chat_fields_are_named(server, body, param, message):
    answer = httpx.post(f"{server.base_url}/chat/completions", content=dumps(body), headers=JSON, timeout=30)
    error = error_of(answer, 400)
    assert error["param"] == param
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


JSON = {"Content-Type": "application/json"}


def dumps(body):
    import json

    return json.dumps(body).encode()  # escapes an unpaired surrogate, as a careless client does


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": []}, "prompt", "the list is empty"),
        ({"prompt": ""}, "prompt", "has no tokens"),
        ({"prompt": [[]]}, "prompt", "has no tokens"),
        ({"prompt": [99999]}, "prompt", "99999 is not a token id of this model"),
        ({"prompt": {"a": 1}}, "prompt", ""),
        ({"prompt": ["x"] * 200}, "prompt", "200 prompts with n=1 exceed 128"),
        ({**TEXT, "suffix": "end"}, "suffix", "not supported"),
        ({**TEXT, "best_of": 3}, "best_of", "differs from n=1"),
        ({**TEXT, "echo": True, "logprobs": 1}, "echo", "prompt log-probs"),
        ({**TEXT, "logprobs": 30}, "logprobs", "less than or equal to 20"),
    ],
)
def test_bad_completion_fields_are_named(server, body, param, message):
    error = error_of(server.post("/v1/completions", body), 400)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("responses", {"text": {"format": {"type": "text", "x": "\ud800"}}}, "text", "unpaired surrogate"),
        ("responses", {"tool_choice": {"\ud800": 1}}, "tool_choice", "unpaired surrogate"),
        ("responses", {"tool_choice": "required"}, "tool_choice", "requires tools"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice", "requires tools"),
        (
            "messages",
            {"system": [{"type": "text", "text": None}]},
            "messages",
            "the field `text` of a text block is None",
        ),
    ],
)
def test_bad_fields_of_other_protocols_are_named(server, path, body, param, message):
    needed = {"responses": {"input": "hi"}, "messages": {"messages": CHAT["messages"], "max_tokens": 2}}[path]
    answer = httpx.post(f"{server.base_url}/{path}", content=dumps(needed | body), headers=JSON, timeout=30)
    error = error_of(answer, 400)
    assert (error["param"], message in error["message"]) == (param, True), error


def test_deeply_nested_arguments_of_a_call_are_text(server):
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 5000}}
    messages = [*CHAT["messages"], {"role": "assistant", "content": "x", "tool_calls": [call]}, *CHAT["messages"]]
    error = error_of(server.post("/v1/chat/completions", {**CHAT, "messages": messages}), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', b"[" * 5000],
)
def test_a_body_that_is_not_a_request_is_rejected(server, content):
    error_of(httpx.post(f"{server.base_url}/chat/completions", content=content, headers=JSON), 400)


def test_unknown_fields_are_ignored(server):
    assert server.post("/v1/chat/completions", {**CHAT, "wishes": {"a": [1]}, "user": "me"}).status_code == 200


def test_null_counts_as_unset(server):
    nothing = dict.fromkeys(("n", "stop", "stream", "temperature", "logit_bias", "tools", "response_format", "seed"))
    assert server.post("/v1/chat/completions", {**CHAT, **nothing}).status_code == 200


def test_a_prompt_that_fills_the_context_is_refused(server):
    for body in ({"prompt": [5] * 4096}, {"prompt": [5] * 5000}):
        error = error_of(server.post("/v1/completions", body), 400)
        assert error["code"] == "context_length_exceeded"
        assert "the model's context is 4096 tokens" in error["message"]


def test_an_unknown_model_and_an_unknown_path_are_not_found(server):
    error = error_of(server.post("/v1/chat/completions", {**CHAT, "model": "gpt-4"}), 404)
    assert error["code"] == "model_not_found"
    assert "'tiny'" in error["message"]
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("gpt-4")
    assert server.client().models.retrieve("tiny").id == "tiny"
    error_of(server.post("/v1/nothing", {}), 404)
    error_of(httpx.get(f"{server.base_url}/chat/completions"), 405)


def test_a_large_body_is_rejected_with_and_without_content_length(server):
    error = error_of(httpx.post(f"{server.base_url}/completions", content=b"x" * (17 * 2**20), headers=JSON), 413)
    assert error["code"] == "body_too_large"
    chunks = (b"x" * 2**20 for _ in range(18))
    error_of(httpx.post(f"{server.base_url}/completions", content=chunks, headers=JSON), 413)


def test_a_full_queue_rejects_requests_and_says_when_to_retry(server):
    body = {"prompt": "x", "max_tokens": 300, "n": 16, "ignore_eos": True}
    answers = []

    def send():
        answers.append(server.post("/v1/completions", body))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200, 200, 429, 429]
    for answer in answers:
        if answer.status_code == 429:
            assert error_of(answer, 429)["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) > 0
    assert server.post("/v1/completions", TEXT).status_code == 200


def test_the_engine_still_works_after_bad_requests(server):
    server.wait_idle()
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert server.post("/v1/chat/completions", CHAT).status_code == 200


@pytest.fixture(scope="module")
def locked(sharp_checkpoint):
    with running(sharp_checkpoint, "--api-key", "s3cret", "--cors-origin", "https://example.org") as server_with_key:
        yield server_with_key


def test_the_key_is_required_everywhere_except_for_health_checks(locked):
    paths = ["/v1/models", "/metrics", "/openapi.json", "/v1/nothing"]
    headers = [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic s3cret"},
        {"Authorization": "Bearer s3cret2"},
    ]
    for path, header in itertools.product(paths, headers):
        error = error_of(httpx.get(locked.url + path, headers=header), 401)
        assert error["code"] == "invalid_api_key"
    error_of(locked.post("/v1/completions", TEXT), 401)
    for path in ("/health", "/ready", "/live"):
        assert httpx.get(locked.url + path).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        locked.client().models.list()
    client = locked.client(api_key="s3cret")
    assert client.completions.create(model=client.models.list().data[0].id, **TEXT).usage.completion_tokens > 0


def test_only_the_named_origin_may_call_from_a_browser(locked):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}

    def allowed(origin):
        answer = httpx.options(f"{locked.base_url}/chat/completions", headers={**ask, "Origin": origin})
        return answer.headers.get("access-control-allow-origin")

    assert allowed("https://example.org") == "https://example.org"
    assert allowed("https://evil.org") is None
