"""The calls to a vLLM server without areno's worker extension; a stub answers them, because vLLM may not be installed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from areno.errors import EngineError
from areno.rollouts.servers.vllm_client import VllmCalls


def load_weights(joined: bool) -> list[str]:
    """Load weights into a server that does not know the methods of areno's extension. Return the paths of the calls."""
    paths = []

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        unknown = request.url.path == "/collective_rpc" and json.loads(request.content)["method"].startswith("areno_")
        return httpx.Response(500, json={"message": "no such method"}) if unknown else httpx.Response(200, json={})

    async def load() -> None:
        async with httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(answer)) as http:
            await VllmCalls(joined=joined).load_weights(http, Path("/weights"), 1)

    asyncio.run(load())
    return paths


def test_a_joined_server_needs_no_worker_extension():
    assert load_weights(joined=True)[-2:] == ["/reset_prefix_cache", "/resume"]


def test_a_server_that_areno_started_must_have_the_worker_extension():
    with pytest.raises(EngineError, match="no such method"):
        load_weights(joined=False)
