"""Rollouts on inference servers of others: which product a backend means, and what belongs to servers alone."""

from __future__ import annotations

import pytest

from areno.config.experiment.roles import server_of
from tests.config.experiment.samples import accepted, refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout.backend": "vllm:d1", "rollout.speculate": 4}, "rollout.speculate 4 with rollout.backend vllm:d1"),
        (
            {"rollout.backend": "sglang:d1", "rollout.return_routed_experts": True},
            "rollout.return_routed_experts true with rollout.backend sglang:d1: areno does not read the routing of servers",
        ),
        ({"rollout.api_url": "http://a:1"}, "rollout.api_url is for inference servers; set rollout.backend=vllm:dN"),
        ({"rollout.provider_api_key": "x"}, "rollout.provider_api_key is for inference servers"),
        ({"rollout.backend": "vllm:d2", "rollout.api_url": "http://a:1"}, "rollout.api_url lists 1 servers"),
        ({"rollout.backend": "sglang:d1", "rollout.api_url": "a:1"}, "'a:1' is not an address; write http://HOST:PORT"),
        (
            {
                "rollout.backend": "vllm:d1",
                "rollout.scheduling_strategy": {"type": "colocation", "target": "actor", "fork": False},
            },
            "rollout.scheduling_strategy.fork false with rollout.backend vllm:d1: a server is a separate process",
        ),
    ],
)
def test_what_does_not_go_with_servers_says_so_and_what_to_write(changes, words):
    assert words in refused(changes)


@pytest.mark.parametrize(
    ("backend", "product"),
    [("vllm:d2t2", "vllm"), ("vllm[rollout]:d1", "vllm"), ("sglang(rollout):d1", "sglang"), ("areno:d1", "")],
)
def test_the_product_is_that_of_the_backend_however_it_is_written(backend, product):
    assert server_of(accepted({"rollout.backend": backend})) == product
