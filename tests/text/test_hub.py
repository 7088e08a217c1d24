"""A model that is not a folder, not cached and not on the hub is refused at once; a real HTTP server stands in for the hub."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

PROGRAM = """
import sys
from areno.errors import UsageError
from areno.text.hub import check_reachable
try:
    check_reachable(sys.argv[1])
    print("fine")
except UsageError as error:
    print(error)
"""


class _Hub(http.server.BaseHTTPRequestHandler):
    """Has the models ``some/model`` and, gated, ``some/gated``, and responds as the hub does."""

    def do_HEAD(self) -> None:
        known, gated = (self.path.startswith(f"/some/{name}/") for name in ("model", "gated"))
        self.send_response(200 if known else 401 if gated else 404)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "2")
        if not known:
            self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def outcome(name: str, home: object, **variables: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), **variables}
    command = [sys.executable, "-c", PROGRAM, name]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_model_on_the_hub_is_accepted_and_a_missing_one_is_named(hub, tmp_path):
    assert outcome("some/model", tmp_path, HF_ENDPOINT=hub) == "fine\n"
    output = outcome("some/modle", tmp_path, HF_ENDPOINT=hub)
    assert output.startswith(
        "some/modle is neither a folder nor a model in the Hugging Face cache, and the hub has no such model"
    )


def test_an_unreachable_hub_is_distinguished_from_a_wrong_name(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        output = outcome("some/model", tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert "the hub is unreachable" in output


def test_a_gated_model_error_says_where_to_request_access(hub, tmp_path):
    output = outcome("some/gated", tmp_path, HF_ENDPOINT=hub)
    assert f"request access at {hub}/some/gated, and run `hf auth login`" in output
    assert "no such model" not in output


def test_a_cached_model_needs_no_hub(tmp_path):
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "hub" / "models--some--model" / "refs").mkdir()
    (tmp_path / "hub" / "models--some--model" / "refs" / "main").write_text("0" * 40)
    assert outcome("some/model", tmp_path, HF_HUB_OFFLINE="1") == "fine\n"
    assert "HF_HUB_OFFLINE" in outcome("some/other", tmp_path, HF_HUB_OFFLINE="1")


def test_an_invalid_id_is_reported_and_a_folder_is_accepted(tmp_path):
    assert "nor a valid hub id" in outcome("a/b/c/d", tmp_path)
    assert outcome(str(tmp_path), tmp_path) == "fine\n"
