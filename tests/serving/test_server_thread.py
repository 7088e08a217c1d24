"""The server inside a process: it uses the caller's engine, and its thread starts and stops on request."""

from __future__ import annotations

import threading

import httpx
import openai
import pytest

from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.errors import UsageError
from areno.serving.app import create_app
from areno.serving.server import ServerThread
from areno.serving.service import Service, ServingConfig
from tests.support.stubs import BrokenGrammar


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    made = Engine(str(tiny_checkpoint), EngineConfig(trains="nothing", max_running=4, kv_cache_tokens=20000))
    yield made
    made.close()


def service(engine, **options):
    return Service(ServingConfig(model_name="policy", **options), engine)


def ask(server, **body):
    client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "What is 1 plus 2?"}]
    return client.chat.completions.create(**{"model": "policy", "messages": messages, "max_tokens": 5, **body})


def test_it_serves_on_a_free_loopback_port_and_leaves_nothing_behind(engine):
    before = {thread.name for thread in threading.enumerate()}
    with ServerThread(service(engine)) as one, ServerThread(service(engine)) as other:
        assert one.url != other.url
        assert one.url.startswith("http://127.0.0.1:")
        texts = [ask(server, temperature=0).choices[0].message.content for server in (one, other)]
        assert texts[0] == texts[1]
    with pytest.raises(httpx.ConnectError):
        httpx.get(one.url)
    assert {thread.name for thread in threading.enumerate()} - before <= {"areno-rollout"}
    one.stop()  # stopping it twice does nothing


def test_stopping_it_cancels_running_requests_and_the_engine_keeps_working(engine):
    server = ServerThread(service(engine))
    answers = []
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
    url = f"{server.base_url}/completions"
    thread = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, timeout=30)))
    thread.start()
    while not engine.load().running:
        pass
    server.stop()
    thread.join(20)
    assert answers[0].status_code == 503
    engine.loop.wait_idle()
    with ServerThread(service(engine)) as again:
        assert ask(again).usage.completion_tokens > 0


def test_the_default_length_comes_from_the_configuration(engine):
    with ServerThread(service(engine, default_max_tokens=3)) as server:
        answer = ask(server, max_tokens=None, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 3


def test_an_engine_failure_is_reported_by_requests_and_health_checks(tiny_checkpoint, monkeypatch):
    def fail(_):
        raise RuntimeError("the device is lost")

    broken = Engine(str(tiny_checkpoint), EngineConfig(trains="nothing", max_running=2, kv_cache_tokens=2000))
    monkeypatch.setattr(broken.actor.model, "logits", fail)
    try:
        with ServerThread(service(broken)) as server:
            with pytest.raises(openai.InternalServerError, match="generation failed"):
                ask(server)
            assert httpx.get(f"{server.url}/health").status_code == 503
            later = httpx.post(f"{server.base_url}/completions", json={"prompt": "x"})
            assert (later.status_code, later.json()["error"]["code"]) == (503, "engine_failed")
    finally:
        broken.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_grammar_fails_only_its_own_request(engine, monkeypatch, stream):
    monkeypatch.setattr("areno.text.grammar.json_object_constraint", lambda *_, **__: BrokenGrammar)
    with ServerThread(service(engine)) as server:
        with pytest.raises(openai.APIError, match="out of fuel"):
            body = {"max_tokens": 20, "response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}}
            list(ask(server, stream=stream, **body))
        assert ask(server).usage.completion_tokens > 0


def test_a_port_in_use_is_an_error(engine):
    with ServerThread(service(engine)) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(UsageError, match=f"--port {port}"):
            ServerThread(service(engine), port=port)


def test_an_unknown_tool_call_format_is_rejected_at_once(engine):
    with pytest.raises(UsageError, match="--tool-call-parser smoke is unknown"):
        service(engine, tool_call_parser="smoke")


def test_the_openapi_schema_lists_the_errors(engine):
    page = create_app(service(engine)).openapi()
    for path in ("/v1/chat/completions", "/v1/completions"):
        responses = page["paths"][path]["post"]["responses"]
        assert {"400", "401", "404", "413", "429", "503"} <= responses.keys()
        assert "422" not in responses
