"""Limits for a client: connections, heads, bodies, text, items and log-probs are bounded before any work is done for them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.rollouts.conversation.agent_server import AgentServer
from areno.serving import connections, service
from areno.serving.errors import ApiError
from areno.serving.schemas import MAX_DEPTH, MAX_VALUES, measure
from areno.serving.server import ServerThread
from areno.serving.service import Service, ServingConfig
from areno.types import SamplingParams

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    made = Engine(str(tiny_checkpoint), EngineConfig(trains="nothing", max_running=4, kv_cache_tokens=20000))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(engine):
    with ServerThread(make_service(engine)) as made:
        yield made


def make_service(engine, **options):
    return Service(ServingConfig(model_name="policy", **options), engine)


def address(server):
    return "127.0.0.1", int(server.url.rpartition(":")[2])


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def read_to_end(sock):
    """All that a server sends until it closes the connection."""
    sock.settimeout(20)
    text = b""
    while piece := sock.recv(4096):
        text += piece
    return text.decode()


def nested(depth):
    value: dict = {}
    for _ in range(depth):
        value = {"a": value}
    return value


# -- connections ---------------------------------------------------------------------------------------------------


def test_more_connections_than_the_limit_are_refused_and_a_closed_one_makes_room(engine):
    with ServerThread(make_service(engine, max_connections=3)) as server:
        held = [socket.create_connection(address(server)) for _ in range(3)]
        for sock in held:  # an answer shows that the server has accepted the connection
            sock.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        with socket.create_connection(address(server)) as one_more:
            answer = read_to_end(one_more)
        assert answer.startswith("HTTP/1.1 503")
        assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        for sock in held:
            sock.close()
        deadline = time.monotonic() + 20
        while True:
            try:
                assert httpx.get(f"{server.url}/live").status_code == 200
                break
            except (httpx.HTTPError, AssertionError):
                assert time.monotonic() < deadline


@pytest.mark.parametrize("pieces", [1, 3000], ids=["one header", "many headers"])
def test_headers_are_limited(server, pieces):
    """Sends far more than the socket's buffers hold, which would only succeed if the server kept reading."""
    header = b"x" * (2**26 // pieces)
    with socket.create_connection(address(server)) as sock:
        sock.settimeout(20)
        sock.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n")
        with pytest.raises(OSError):
            for number in range(pieces):
                sock.sendall(b"h%d: " % number + header + b"\r\n")
    assert httpx.get(f"{server.url}/live").status_code == 200


def test_a_head_that_is_too_large_gets_an_error(server):
    with socket.create_connection(address(server)) as sock:
        sock.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * 70_000 + b"\r\n\r\n")
        answer = read_to_end(sock)
    assert answer.startswith("HTTP/1.1 431")
    assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    assert httpx.get(f"{server.url}/live", headers={"x": "x" * 30_000}).status_code == 200


@pytest.mark.parametrize(
    ("sent", "missing"),
    [
        (b"", "headers"),
        (b"\n", "headers"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx:", "headers"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{", "body"),
        (b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{", "body"),
        (b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\nGET /", "headers"),
    ],
    ids=["nothing", "a line break", "half a head", "half a body", "half an unread body", "half a second head"],
)
def test_a_request_that_is_never_completed_times_out(server, monkeypatch, sent, missing):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connections, "BODY_TIMEOUT_S", 0.2)
    with socket.create_connection(address(server)) as sock:
        sock.sendall(sent)
        answer = read_to_end(sock)  # returns once the connection is closed
    if b"/nothing" not in sent:
        assert f"the {missing} of the request did not arrive in time" in answer
        assert "HTTP/1.1 408" in answer


def test_an_answer_is_not_cut_off_by_the_timeout_of_the_next_head(server, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.05)
    body = json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    with socket.create_connection(address(server)) as sock:
        sock.sendall(head.encode() + body + b"GET /")
        assert '"completion_tokens":400' in read_to_end(sock)


# -- hosts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:1234", "LOCALHOST", "[::1]:80", "a.localhost", "127.1.2.3:80"]
)
def test_a_server_without_a_key_accepts_loopback_names(server, host):
    assert httpx.get(f"{server.base_url}/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "0.0.0.0", "10.0.0.1"])
def test_other_names_are_rejected_with_the_remedy(server, host):
    error = error_of(httpx.get(f"{server.base_url}/models", headers={"Host": host}), 403)
    assert error["code"] == "host_not_allowed"
    assert f"--allowed-host {host.partition(':')[0]}" in error["message"]
    assert httpx.get(f"{server.url}/live", headers={"Host": host}).status_code == 200


def test_more_names_can_be_allowed_and_a_key_allows_any_name(engine):
    with ServerThread(make_service(engine, allowed_hosts=("proxy.example",))) as server:
        assert httpx.get(f"{server.base_url}/models", headers={"Host": "Proxy.example:80"}).status_code == 200
        assert httpx.get(f"{server.base_url}/models", headers={"Host": "evil.example"}).status_code == 403
    with ServerThread(make_service(engine, allowed_hosts=("*",))) as server:
        assert httpx.get(f"{server.base_url}/models", headers={"Host": "evil.example"}).status_code == 200
    with ServerThread(make_service(engine, api_key="k")) as server:
        headers = {"Host": "any.example", "Authorization": "Bearer k"}
        assert httpx.get(f"{server.base_url}/models", headers=headers).status_code == 200


# -- sizes ---------------------------------------------------------------------------------------------------------


def test_text_that_cannot_fit_is_refused_before_it_is_encoded(server, engine, monkeypatch):
    monkeypatch.setattr(type(engine.tokenizer), "__call__", None)  # encoding would be a server error
    limit = 65_536
    for path, body in (
        ("completions", {"prompt": "x" * (limit + 1)}),
        ("completions", {"prompt": ["x" * 1000] * 100}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * limit}]}),
        ("chat/completions", CHAT | {"tools": [TOOL | {"function": {"name": "f", "description": "x" * limit}}]}),
        ("messages", {"messages": [{"role": "user", "content": "x" * limit}], "max_tokens": 2}),
        ("responses", {"input": "x" * (limit + 1)}),
    ):
        error = error_of(httpx.post(f"{server.base_url}/{path}", json=body), 400)
        assert error["code"] == "context_length_exceeded"
        assert f"the limit is {limit}" in error["message"]


def test_the_character_limit_can_be_set(engine):
    with ServerThread(make_service(engine, max_prompt_chars=20)) as server:
        assert httpx.post(f"{server.base_url}/completions", json={"prompt": "hi", "max_tokens": 1}).status_code == 200
        error_of(httpx.post(f"{server.base_url}/completions", json={"prompt": "x" * 20}), 400)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {"prompt": ["x"] * 129}, "129 prompts with n=1 exceed 128"),
        ("completions", {"prompt": ["x"] * (MAX_VALUES + 1)}, f"more than {MAX_VALUES} strings"),
        ("chat/completions", CHAT | {"tools": [TOOL] * 513}, "at most 512 items"),
        ("chat/completions", CHAT | {"messages": CHAT["messages"] * 10_001}, "at most 10000 items"),
        ("responses", {"input": "x", "tools": [{"type": "function", "name": "f"}] * 513}, "at most 512 items"),
        ("chat/completions", CHAT | {"stop": "x" * 5000}, "at most 4096 characters"),
    ],
)
def test_too_many_items_are_refused(server, path, body, message):
    assert message in error_of(httpx.post(f"{server.base_url}/{path}", json=body), 400)["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", CHAT | {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(900)}}]}),
        ("chat/completions", CHAT | {"chat_template_kwargs": nested(900)}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x", "extra": nested(900)}]}),
        ("responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": nested(900)}]}),
        ("messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"input": nested(900)}]}]}),
        ("completions", {"prompt": "x", "unknown": nested(900)}),
    ],
)  # fmt: skip
def test_deeply_nested_bodies_are_refused(server, path, body):
    error = error_of(httpx.post(f"{server.base_url}/{path}", json=body), 400)
    assert f"nested more than {MAX_DEPTH} levels" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            ("messages", {"max_tokens": 1, "messages": [{"role": "user", "content": bad}]})
            for bad in (1, {"a": 1}, ["x"])
        ),
        (
            "messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]},
        ),
        ("responses", {"input": [{"type": "reasoning", "summary": [1]}]}),
        ("responses", {"input": "x", "text": {"format": 3}}),
    ],
)
def test_invalid_content_blocks_are_rejected(server, path, body):
    assert error_of(httpx.post(f"{server.base_url}/{path}", json=body), 400)["param"] in ("messages", "input", "text")


def test_a_value_is_measured_by_its_text():
    assert measure({"ab": ["cde", 1, {"f": "g"}], "h": None}) == 2 + 3 + 1 + 1 + 1
    assert measure(nested(MAX_DEPTH - 1)) == MAX_DEPTH - 1
    with pytest.raises(ApiError, match="levels deep"):
        measure(nested(MAX_DEPTH))


@pytest.mark.parametrize("name", ["self", "messages", "tokenize", "chat_template"])
def test_reserved_template_variables_are_rejected(server, name):
    error = error_of(
        httpx.post(f"{server.base_url}/chat/completions", json=CHAT | {"chat_template_kwargs": {name: 1}}), 400
    )
    assert f"{name} is reserved" in error["message"]


def test_alternatives_share_one_budget_across_samples_and_tokens(server):
    body = {"prompt": "x", "max_tokens": 2000, "n": 16, "logprobs": 20}
    error = error_of(httpx.post(f"{server.base_url}/completions", json=body), 400)
    assert error["code"] == "too_many_logprobs"
    for part in ("20 alternatives for each", "16 samples", "are 640000", "limit is 524288"):
        assert part in error["message"]
    chat = CHAT | {"max_tokens": 2000, "n": 16, "logprobs": True, "top_logprobs": 20}
    error_of(httpx.post(f"{server.base_url}/chat/completions", json=chat), 400)
    assert httpx.post(f"{server.base_url}/completions", json=body | {"max_tokens": 3, "n": 2}).status_code == 200


# -- time ----------------------------------------------------------------------------------------------------------


def test_a_request_that_is_slow_to_prepare_blocks_no_other_and_times_out(engine, monkeypatch):
    monkeypatch.setattr(service, "PREPARE_TIMEOUT_S", 0.3)
    made, release = make_service(engine, max_queue=0), threading.Event()

    async def both():
        slow = asyncio.create_task(made.prepare(release.wait, samples=3))
        await asyncio.sleep(0)
        assert await made.prepare(lambda: "quick", samples=1) == "quick"
        with pytest.raises(ApiError) as full:
            await made.prepare(lambda: None, samples=2)
        assert full.value.status == 429
        with pytest.raises(ApiError) as late:
            await slow
        assert (late.value.status, late.value.code) == (504, "timeout")
        assert await made.prepare(lambda: "again", samples=4) == "again"

    try:
        asyncio.run(both())
    finally:
        release.set()
        made.close()


def test_requests_of_agents_may_wait_long_for_the_thread_that_prepares_them(engine, monkeypatch):
    monkeypatch.setattr(service, "PREPARE_TIMEOUT_S", 0.3)
    agents = AgentServer(engine, SamplingParams(), None, model_name="policy")
    made = Service(ServingConfig(model_name="policy"), engine, agents)

    async def in_turn():
        return await asyncio.gather(*(made.prepare(lambda: time.sleep(0.1) or "done", samples=1) for _ in range(6)))

    try:
        assert asyncio.run(in_turn()) == ["done"] * 6
    finally:
        made.close()
        agents.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_preparation_and_generation_share_the_timeout(engine, stream):
    made, release = make_service(engine, request_timeout_s=4), threading.Event()

    async def fill_the_threads():
        await asyncio.gather(*(made.prepare(release.wait, samples=1) for _ in range(4)))

    with ServerThread(made) as server, ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(asyncio.run, fill_the_threads())
        while made._preparing_samples < 4:
            time.sleep(0.01)
        threading.Timer(3.0, release.set).start()
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
        began = time.monotonic()
        answer = httpx.post(f"{server.base_url}/completions", json=body, timeout=60)
        took = time.monotonic() - began
        blocked.result()
    assert answer.status_code == (200 if stream else 504)
    assert "timed out after 4 s" in answer.text
    assert 4 <= took < 6.5


def test_a_client_that_reads_slowly_gets_the_error_of_the_timeout(engine):
    """The response exceeds the buffers, so the server waits for the client when the time is up."""
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 4}
    content = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\nConnection: close"
    with ServerThread(make_service(engine, request_timeout_s=3)) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(address(server))
        sock.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n{content}".encode())
        time.sleep(3.5)
        assert "timed out after 3 s" in read_to_end(sock)[-400:]


def test_many_threads_prepare_the_same_tokens_as_one(server, engine):
    texts = [f"{number} and then some more text " * (number % 7 + 1) for number in range(60)]
    expected = [engine.tokenizer(text)["input_ids"] for text in texts]
    token_ids: dict[int, list[int]] = {}

    def ask(number):
        body = {"prompt": texts[number], "max_tokens": 1, "return_token_ids": True}
        answer = httpx.post(f"{server.base_url}/completions", json=body, timeout=60).json()
        token_ids[number] = answer["choices"][0]["prompt_token_ids"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [token_ids[number][-len(ids) :] for number, ids in enumerate(expected)] == expected


def test_concurrent_prompts_without_a_seed_get_different_ones(monkeypatch):
    """Several threads prepare requests; two that got one seed would get the same answers."""

    class Metrics:
        @property
        def started_ns(self):
            time.sleep(0.001)  # lets another thread run
            return 1

    made = make_service(None)
    monkeypatch.setattr(made, "metrics", Metrics())
    with ThreadPoolExecutor(4) as pool:
        seeds = [seed for (seed,) in pool.map(lambda _: made.seeds(None, 1), range(40))]
    assert len(set(seeds)) == 40
