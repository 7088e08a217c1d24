"""Lifecycle of the server process: loading, serving, disconnected clients, shutdown."""

from __future__ import annotations

import signal
import socket
import threading
import time

import httpx
import pytest

from areno.serving.errors import ApiError
from areno.serving.messages_api import MessagesResponse
from areno.serving.response_base import event
from tests.serving.running import begin, running, wait_ready
from tests.support.cli import areno

LONG = {"prompt": "x", "max_tokens": 800, "ignore_eos": True}
SIZES = ("--served-model-name", "tiny", "--kv-cache-tokens", 40000)


def in_background(url, body):
    """Send a request from a thread; returns the thread and the list that gets the answer."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60)))
    thread.start()
    return thread, answers


def wait_until(condition, timeout=20):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out waiting for the condition"
        time.sleep(0.02)


def test_the_port_answers_while_the_model_is_loading(sharp_checkpoint):
    process, url = begin(sharp_checkpoint, *SIZES, fresh=True)  # importing takes as long as loading a large model
    try:
        for path in ("health", "ready"):
            answer = httpx.get(f"{url}/{path}", timeout=30)
            assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
        live = httpx.get(f"{url}/live", timeout=30)
        assert (live.status_code, live.json()) == (200, {"status": "ok"})
        refused = httpx.post(f"{url}/v1/completions", json=LONG, timeout=30)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "loading"
        assert refused.headers["retry-after"]
        wait_ready(url)
        assert httpx.get(f"{url}/ready").json() == {"status": "ready"}
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "areno serve: ready" in output


def test_a_signal_during_loading_ends_the_process_at_once(sharp_checkpoint):
    process, _ = begin(sharp_checkpoint)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert "Traceback" not in output


def test_a_server_does_not_need_a_reader_of_its_output(sharp_checkpoint):
    process, url = begin(sharp_checkpoint, *SIZES)
    process.stdout.close()  # as `areno serve | head -1` does
    try:
        wait_ready(url)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_a_model_that_cannot_be_loaded_ends_the_process_with_the_reason(tmp_path, sharp_checkpoint):
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((sharp_checkpoint / name).read_bytes())
    done = areno("serve", "--model-path", broken, "--port", 0)
    assert done.returncode in (1, 2)
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
    done = areno("serve", "--model-path", sharp_checkpoint, "--port", 0, "--tool-call-parser", "smoke")
    assert done.returncode == 2
    assert "--tool-call-parser smoke is unknown" in done.stderr
    assert "loading the model" not in done.stdout, "the tokenizer alone shows the error"
    done = areno("serve", "--model-path", sharp_checkpoint, "--port", 0, "--reasoning-parser", "smoke")
    assert done.returncode == 2
    assert "--reasoning-parser smoke is unknown" in done.stderr
    assert "loading the model" not in done.stdout


def test_a_port_in_use_is_reported(sharp_checkpoint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = areno("serve", "--model-path", sharp_checkpoint, "--port", port)
    assert done.returncode == 2
    assert f"--host 127.0.0.1 --port {port}: Address already in use; choose another port" in done.stderr


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_slots(server, stream):
    gone = server.metric("areno_disconnects_total")
    generated = server.metric("areno_generated_tokens_total")
    body = {**LONG, "n": 4, "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.base_url}/completions", json=body, timeout=0.3) if not stream else read_a_little(
            server, body
        )
    wait_until(lambda: server.metric("areno_disconnects_total") == gone + 1, timeout=5)
    server.wait_idle(timeout=5)
    assert server.metric("areno_generated_tokens_total") - generated < 4 * 750


def read_a_little(server, body):
    with httpx.stream("POST", f"{server.base_url}/completions", json=body, timeout=10) as answer:
        for _ in zip(range(5), answer.iter_lines(), strict=False):
            pass
    raise httpx.ReadTimeout("left by choice")


def test_a_client_that_never_reads_does_not_block_the_queue(server):
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"prompt": "x", "max_tokens": 800, "ignore_eos": true, "stream": true, "logprobs": 20, "n": 8}'
    with socket.create_connection((host, int(port))) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = (
            "POST /v1/completions HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        lazy.sendall("\r\n".join([*head, "", ""]).encode() + body)
        wait_until(lambda: server.metric("areno_samples_running") == 8)
        server.wait_idle(timeout=60)
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "n": 32}).status_code == 200


def test_a_signal_lets_running_requests_finish(sharp_checkpoint):
    with running(sharp_checkpoint, *SIZES) as server:
        thread, answers = in_background(server.url, LONG)
        wait_until(lambda: server.metric("areno_samples_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        assert httpx.get(f"{server.url}/ready").json() == {"status": "draining"}
        assert [httpx.get(f"{server.url}/{path}").status_code for path in ("health", "live")] == [503, 200]
        refused = server.post("/v1/completions", LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        thread.join(60)
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 800
        assert server.process.wait(20) == 0


def test_requests_that_exceed_the_drain_timeout_are_cancelled(sharp_checkpoint):
    with running(sharp_checkpoint, *SIZES, "--drain-timeout-s", 0.3) as server:
        body = {**LONG, "n": 6}
        thread, answers = in_background(server.url, body)
        with httpx.stream(
            "POST", f"{server.base_url}/completions", json={**body, "stream": True}, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            wait_until(lambda: server.metric("areno_samples_running") == 12)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        thread.join(20)
        assert '"code":"draining"' in rest[-1]
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "draining"
        assert server.process.wait(20) == 0


def test_a_second_signal_stops_the_server_at_once(sharp_checkpoint):
    with running(sharp_checkpoint, *SIZES) as server:
        thread, answers = in_background(server.url, {**LONG, "n": 12})
        wait_until(lambda: server.metric("areno_samples_running") == 12)
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
        assert time.monotonic() - began < 5
        thread.join(20)
        assert answers[0].status_code == 503


def test_an_error_in_an_anthropic_stream_is_raised_by_the_client():
    """The client skips events without a name, so an error without one would look like a short answer."""
    anthropic, httpx2 = pytest.importorskip("anthropic"), pytest.importorskip("httpx2")
    failure = MessagesResponse.failure(None, ApiError(503, "shutting down", code="draining"))
    content, kind = event(failure), {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=kind, content=content))
    client = anthropic.Anthropic(api_key="none", max_retries=0, http_client=httpx2.Client(transport=transport))
    stream = client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}], stream=True)
    with pytest.raises(anthropic.APIStatusError, match="shutting down"):
        list(stream)
