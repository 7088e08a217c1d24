"""Rollouts on vLLM and SGLang servers: which product a backend names, and settings that only apply to servers."""

from __future__ import annotations

import pytest

from areno.config.experiment.roles import server_of
from tests.config.experiment.samples import accepted, refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rollout.backend": "vllm:d1", "rollout.speculate": 4},
            "rollout.speculate 4 has no effect with rollout.backend vllm:d1",
        ),
        (
            {"rollout.backend": "sglang:d1", "rollout.return_routed_experts": True},
            "rollout.return_routed_experts true is not supported with rollout.backend sglang:d1, because areno does not",
        ),
        ({"rollout.api_url": "http://a:1"}, "rollout.api_url is for inference servers, but rollout.backend is areno"),
        ({"rollout.provider_api_key": "x"}, "rollout.provider_api_key is for inference servers"),
        (
            {"rollout.backend": "vllm:d2", "rollout.api_url": "http://a:1"},
            "rollout.api_url: the number of addresses is 1, but rollout.backend vllm:d2 needs 2, one per replica",
        ),
        (
            {"rollout.backend": "sglang:d1", "rollout.api_url": "a:1"},
            "'a:1' is not the address of a server; write http://HOST:PORT",
        ),
        (
            {
                "rollout.backend": "vllm:d1",
                "rollout.scheduling_strategy": {"type": "colocation", "target": "actor", "fork": False},
            },
            "rollout.scheduling_strategy.fork=false is not supported with rollout.backend vllm:d1: fork=false runs generation",
        ),
        (
            {
                "rollout.backend": "vllm:d1",
                "actor.scheduling_strategy": {"type": "colocation", "target": "rollout", "fork": False},
            },
            "actor.scheduling_strategy.fork=false is not supported with rollout.backend vllm:d1: fork=false runs generation",
        ),
    ],
)
def test_invalid_server_settings_are_refused_with_a_reason(changes, words):
    assert words in refused(changes)


@pytest.mark.parametrize(
    ("backend", "product"),
    [("vllm:d2t2", "vllm"), ("vllm[rollout]:d1", "vllm"), ("sglang(rollout):d1", "sglang"), ("areno:d1", "")],
)
def test_the_backend_names_the_product_in_any_notation(backend, product):
    assert server_of(accepted({"rollout.backend": backend})) == product
