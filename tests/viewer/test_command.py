"""``areno view`` as a process: its address, its shutdown, and its errors."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from areno.cli.main import main
from areno.viewer.server import PORT, ViewerServer
from tests.support.cli import environment
from tests.viewer.stage import write_run


@contextmanager
def view(*arguments: object, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its URL, and what it printed until then."""
    command = [sys.executable, "-m", "areno", "view", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**environment(), **variables}) as process:
        try:
            assert process.stdout is not None
            printed = []
            for line in process.stdout:
                printed.append(line)
                if match := re.search(r"at (http://\S+)", line):
                    break
            assert match, printed
            yield process, match[1], printed
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_while_a_page_listens(tmp_path, number):
    write_run(tmp_path / "run", steps=1)
    with view(tmp_path, "--port", 0) as (process, url, _), httpx.Client(base_url=url, timeout=20) as session:
        assert [row["name"] for row in session.get("/api/runs").json()["runs"]] == ["run"]
        with session.stream("GET", "/api/events") as stream:
            assert next(stream.iter_lines()) == "retry: 1000"
            begin = time.monotonic()
            process.send_signal(number)
            assert process.wait(10) == 0
            assert time.monotonic() - begin < 5


def test_a_free_port_replaces_the_default_one_if_that_is_taken(tmp_path):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", PORT))
            taken.listen()
        except OSError:
            pass  # another program uses it, which is just as good
        with view(tmp_path) as (_, url, printed):
            assert not url.endswith(f":{PORT}")
            assert f"port {PORT} is in use" in printed[0]
            assert httpx.get(f"{url}/api/runs").status_code == 200


def test_the_key_can_come_from_the_environment(tmp_path):
    with view(tmp_path, "--port", 0, ARENO_API_KEY="k1") as (_, url, _):
        assert httpx.get(f"{url}/api/runs").status_code == 401
        assert httpx.get(f"{url}/api/runs", headers={"Authorization": "Bearer k1"}).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a folder"),
        ([".", "--host", "0.0.0.0"], "needs an API key"),
        ([".", "--port", "http"], "--port"),
        ([".", "--port", "70000"], "--port 70000 is not between 0 and 65535"),
        ([".", "--hots", "x"], "--hots"),
    ],
)
def test_invalid_arguments_are_rejected_at_once(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ARENO_API_KEY", raising=False)
    assert main(["view", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_requested_port_that_is_in_use_is_an_error(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["view", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another port" in capsys.readouterr().err


def test_the_help_names_all_options(capsys):
    assert main(["view", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("FOLDER", "--host", "--port", "--api-key", "--open"))


def test_listing_runs_loads_no_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from areno.viewer.server import ViewerServer\n"
        f"from areno.viewer.catalog import RunCatalog; RunCatalog(Path({str(tmp_path)!r})).rows()\n"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, cwd=Path(__file__).parents[2]
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_server_that_is_stopped_before_it_serves_returns_at_once(tmp_path):
    server = ViewerServer(tmp_path, port=0)
    server.stop()
    server.serve()
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)
