"""The examples of docs/serving.md run as written, except for the URL of the server; its tables are complete."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from areno.config.options import options_of
from areno.config.serve_options import ServeOptions
from areno.serving.app import create_app
from areno.serving.schemas import ChatRequest, CompletionRequest
from areno.serving.service import Service, ServingConfig
from tests.contracts.test_docs import REPO, code_blocks
from tests.support.cli import python

PAGE = REPO / "docs" / "serving.md"
TEXT = PAGE.read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture
def with_server_url(server):
    """A function that inserts the URL of a running server into code of the page."""
    return lambda code: code.replace(ADDRESS, server.url)


def test_the_curl_example_gets_an_answer(with_server_url):
    (command,) = [block for block in code_blocks(PAGE, "bash") if block.startswith("curl")]
    done = subprocess.run(["bash", "-c", with_server_url(command)], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0, done.stderr


def test_the_openai_example_prints_answers(with_server_url, tmp_path):
    program = tmp_path / "ask.py"
    program.write_text(with_server_url(code_blocks(PAGE, "python")[0]), encoding="utf-8")
    done = python(program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\[[\d, ]+\] \d+$", done.stdout, re.MULTILINE)


def test_the_program_with_a_server_inside_runs(tmp_path, tiny_checkpoint):
    program = tmp_path / "inside.py"
    program.write_text(code_blocks(PAGE, "python")[1].replace("MODEL", str(tiny_checkpoint)), encoding="utf-8")
    done = python(program, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^http://127.0.0.1:\d+/v1$", done.stdout, re.MULTILINE)


def test_every_option_field_and_endpoint_is_explained():
    assert [entry.flag for entry in options_of(ServeOptions) if f"`{entry.flag}`" not in TEXT] == []
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields} - {"suffix", "best_of", "stream_options"}
    assert [name for name in sorted(fields) if f"`{name}`" not in TEXT] == []
    paths = create_app(Service(ServingConfig(model_name="x"))).openapi()["paths"]
    assert [path for path in paths if f"{path}`" not in TEXT] == []
