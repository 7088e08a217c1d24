"""Unexpected requests, generated from the server's own OpenAPI schema: none may end in a server error."""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.serving.running import running

MOST_TOKENS = 4
ALLOWED = {200, 400, 404, 405, 413, 429}
short = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
bounded = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])


@pytest.fixture(scope="module")
def target(sharp_checkpoint):
    options = ("--served-model-name", "tiny", "--default-max-tokens", MOST_TOKENS, "--kv-cache-tokens", 40000)
    with running(sharp_checkpoint, *options) as server:
        yield server
        server.wait_idle()
        assert httpx.get(f"{server.url}/health").status_code == 200


def check(case, target):
    """Send a case and check its answer; token limits are reduced, because long answers would test nothing more."""
    if isinstance(case.body, dict):
        for key in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(case.body.get(key), int) and case.body[key] > MOST_TOKENS:
                case.body[key] = MOST_TOKENS
    answer = case.call(timeout=60)
    assert answer.status_code in ALLOWED, (answer.status_code, case.body, answer.content)
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]


OPERATIONS = [
    *("GET /health", "GET /ready", "GET /live", "GET /metrics", "GET /v1/models", "GET /v1/models/{name}"),
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/messages", "POST /v1/responses"),
]
operations = pytest.mark.parametrize("operation", OPERATIONS)


def run(operation, target, limits):
    """Send generated cases of one operation, valid and invalid ones."""
    schema = schemathesis.openapi.from_url(f"{target.url}/openapi.json")
    assert sorted(result.ok().label for result in schema.get_all_operations()) == sorted(OPERATIONS)
    method, path = operation.split()
    # Any path of a GET is valid, so there are no invalid cases to generate.
    modes = list(schemathesis.GenerationMode) if method == "POST" else [schemathesis.GenerationMode.POSITIVE]
    for mode in modes:
        test = given(case=schema[path][method].as_strategy(generation_mode=mode))(lambda case: check(case, target))
        limits(test)()


@operations
def test_no_request_ends_in_a_server_error(operation, target):
    run(operation, target, short)


@pytest.mark.long
@operations
def test_none_of_very_many_requests_ends_in_a_server_error(operation, target):
    run(operation, target, bounded)
