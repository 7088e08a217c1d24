"""``areno chat`` in a terminal and in a pipe, with a running server and with its own model."""

from __future__ import annotations

import json
import os
import pty
import select
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from areno.cli.chat import ChatSession, _first_messages
from areno.config.serve_options import parse_chat
from areno.errors import ArenoError
from areno.serving.client import ChatClient
from tests.serving.running import ANSWERS
from tests.support.cli import environment


def piped(text, *options):
    command = [sys.executable, "-m", "areno", "chat", *map(str, options)]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=120, env=environment(), check=False
    )


def test_each_line_of_a_pipe_gets_an_answer(taught):
    done = piped("count\n\n/reset\ncount\n/quit\ncount\n", "--base-url", taught.base_url, "--temperature", 0)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{ANSWERS['count']}\n" * 2


def test_piped_text_in_another_encoding_is_refused(taught):
    command = [sys.executable, "-m", "areno", "chat", "--base-url", taught.base_url]
    utf8 = {**environment(), "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(
        command, input="grüße\n".encode("latin-1"), capture_output=True, timeout=120, env=utf8, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith(b"error: the input is not text in utf-8: ")


@pytest.mark.long
def test_a_model_is_loaded_without_a_server(taught_checkpoint):
    options = ("--model-path", taught_checkpoint, "--temperature", 0, "--kv-cache-tokens", 8000)
    done = piped("count\n", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{ANSWERS['count']}\n"
    assert "Traceback" not in done.stderr


def test_the_limit_and_the_system_message_reach_the_model(taught):
    short = piped("count\n", "--base-url", taught.base_url, "--temperature", 0, "--max-tokens", 1).stdout
    assert ANSWERS["count"].startswith(short.strip())
    assert 0 < len(short.strip()) < len(ANSWERS["count"])
    assert prefilled(taught, "--system", "be kind " * 30) > prefilled(taught) + 60


def prefilled(taught, *options):
    """Prompt tokens of one question."""
    before = taught.metric("areno_prefilled_tokens_total")
    assert piped("count\n", "--base-url", taught.base_url, "--max-tokens", 1, *options).returncode == 0
    return taught.metric("areno_prefilled_tokens_total") - before


def test_an_unreachable_server_and_a_refused_request_are_reported(taught):
    done = piped("hi\n", "--base-url", "http://127.0.0.1:9/v1")
    assert done.returncode == 2
    assert "error: --base-url http://127.0.0.1:9/v1 is unreachable" in done.stderr
    assert "areno serve" in done.stderr
    done = piped("hi\n", "--base-url", taught.base_url, "--model", "other")
    assert done.returncode == 1
    assert "status 404: model: 'other' is not served" in done.stderr


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (b"[1]", r"did not answer with a JSON object: b'\[1\]'; check --base-url"),
        (b"<html>", "did not answer with a JSON object: b'<html>'; check --base-url"),
        (b'data: {"error": "too many requests"}\n\n', "v1 reported an error: too many requests"),
        (b'data: {"error": {"message": "too many requests"}}\n\n', "v1 reported an error: too many requests"),
    ],
)
def test_an_unusual_answer_is_reported(page, message):
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def do_POST(self):
            self.do_GET()

    with HTTPServer(("127.0.0.1", 0), Page) as unusual:
        threading.Thread(target=unusual.handle_request, daemon=True).start()
        client = ChatClient(f"http://127.0.0.1:{unusual.server_address[1]}/v1")
        with pytest.raises(ArenoError, match=message):
            list(client.stream({"messages": []})) if page.startswith(b"data") else client.first_model()


def test_a_connection_that_ends_during_an_answer_is_reported():
    event = b'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

    def answer_in_part():
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(head + f"{len(event):x}\r\n".encode() + event + b"\r\n40\r\ndata: ")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer_in_part)
        thread.start()
        deltas = ChatClient(f"http://127.0.0.1:{listener.getsockname()[1]}/v1").stream({"messages": []})
        assert next(deltas) == {"content": "Hel"}
        with pytest.raises(ArenoError, match=r"the connection to .* ended during the answer"):
            list(deltas)
        thread.join(10)


def test_a_conversation_begins_with_the_messages_of_a_file(taught, tmp_path):
    file = tmp_path / "messages.json"
    first = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]
    file.write_text(json.dumps(first))
    sent = []

    class Client:
        """Records what is sent to it."""

        def stream(self, body):
            sent.append([message["content"] for message in body["messages"]])
            yield {"content": "z"}

    options = parse_chat(["--base-url", "http://nowhere", "--messages", str(file)])
    conversation = ChatSession(Client(), "m", options, _first_messages(str(file)))
    for line in ("a", "b"):
        list(conversation.ask(line))
    conversation.command("/reset")
    list(conversation.ask("c"))
    assert sent == [["s", "x", "y", "a"], ["s", "x", "y", "a", "z", "b"], ["s", "x", "y", "c"]]
    done = piped(
        "count\n", "--base-url", taught.base_url, "--messages", file, "--system", "be brief", "--temperature", 0
    )
    assert done.returncode == 0, done.stderr
    file.write_text('[{"role": "user"}]')
    done = piped("count\n", "--base-url", taught.base_url, "--messages", file)
    assert done.returncode == 2
    assert f"--messages {file} is not a list of messages" in done.stderr


def test_a_conversation_in_a_terminal(taught):
    terminal, inner = pty.openpty()
    command = [sys.executable, "-m", "areno", "chat", "--base-url", taught.base_url, "--temperature", "0"]
    env = {**environment(), "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=env, close_fds=True)
    os.close(inner)
    try:
        expect(terminal, "/quit exits")
        os.write(terminal, b"count\n")
        expect(terminal, "nine ten")
        os.write(terminal, b"/system be kind\n")
        expect(terminal, "system message: be kind")
        os.write(terminal, b"/nonsense\n")
        expect(terminal, "/nonsense is not a command")
        os.write(terminal, b"/quit\n")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def expect(terminal, text, timeout=40):
    """Read the terminal until a text appears."""
    seen, deadline = "", time.monotonic() + timeout
    while text not in seen:
        if time.monotonic() > deadline:
            pytest.fail(f"{text!r} did not appear; the output was {seen!r}")
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 4096).decode(errors="replace")
