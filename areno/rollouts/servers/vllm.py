"""The calls of a vLLM server (0.32 and later), started with ``VLLM_SERVER_DEV_MODE=1`` and ``--enable-scale-out``.

Log-probs are those of ``--logprobs-mode processed_logprobs``: of the temperature-scaled distribution, over what top-k and top-p
leave. Weights travel as checkpoint folders.
"""

from pathlib import Path
from typing import Any

import httpx

from areno.errors import EngineError
from areno.rollouts.servers.calls import SERVED_NAME, Answer, Sample, Served, ask
from areno.types import SamplingParams

# The server puts this before the name of a request.
_PREFIX = "generate-tokens-"


class VllmCalls:
    """See the module's text; ``repacks`` says that the server has areno's worker extension."""

    product = "vLLM"

    def __init__(self, *, repacks: bool = True) -> None:
        self._repacks = repacks

    async def describe(self, http: httpx.AsyncClient) -> Served:
        """Limits of the model; its weights become version 0."""
        models = (await http.get("/v1/models")).raise_for_status().json()["data"]
        await ask(http, "/update_weight_version", {"new_version": "0"})
        return Served(context_length=int(models[0]["max_model_len"]))

    async def generate(self, http: httpx.AsyncClient, sample: Sample) -> Answer:
        """See :class:`ServerCalls`."""
        body = {
            "model": sample.adapter or SERVED_NAME,
            "request_id": sample.rid,
            "token_ids": sample.prompt,
            "sampling_params": sampling_of(sample.sampling, sample.seed),
            "stream": False,
        }
        choice = (await ask(http, "/inference/v1/generate", body))["choices"][0]
        content = (choice.get("logprobs") or {}).get("content") or []
        tokens = list(choice["token_ids"])
        if len(content) != len(tokens):
            raise EngineError(f"{http.base_url}: {len(tokens)} tokens came with {len(content)} log-probs")
        return Answer(
            tokens,
            [entry["logprob"] for entry in content],
            versions_of(choice.get("weight_versions") or [], len(tokens)),
            str(choice["finish_reason"]),
            _top(content) if sample.sampling.top_logprobs else [],
        )

    async def abort(self, http: httpx.AsyncClient, rid: str) -> None:
        """See :class:`ServerCalls`."""
        await ask(http, "/inference/v1/abort_requests", {"request_ids": [_PREFIX + rid]})

    async def load_weights(self, http: httpx.AsyncClient, folder: Path, version: int) -> None:
        """Paused meanwhile; running requests go on with the next token, their caches computed anew with the new weights."""
        await ask(http, "/pause", mode="keep")
        await self._rpc(http, "reload_weights", weights_path=str(folder))
        if self._repacks:
            await self._rpc(http, "areno_repack")
        await ask(http, "/update_weight_version", {"new_version": str(version)})
        dropped = await ask(http, "/reset_prefix_cache", reset_running_requests=True)
        if not (dropped or {}).get("success", True):
            raise EngineError(f"{http.base_url}: the cache of the old weights could not be dropped")
        await ask(http, "/resume")

    async def _rpc(self, http: httpx.AsyncClient, method: str, **arguments: Any) -> None:
        await ask(http, "/collective_rpc", {"method": method, "kwargs": arguments})

    async def load_adapter(self, http: httpx.AsyncClient, name: str, folder: Path, outdated: str) -> None:
        """See :class:`ServerCalls`."""
        await ask(http, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        if outdated:
            await ask(http, "/v1/unload_lora_adapter", {"lora_name": outdated})

    async def logprobs(self, http: httpx.AsyncClient, prompt: list[int], adapter: str) -> list[float]:
        """See :class:`ServerCalls`."""
        body = {"model": adapter or SERVED_NAME, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
        choice = (await ask(http, "/v1/completions", body))["choices"][0]
        return [
            found[str(token)]["logprob"] for token, found in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        ]


def sampling_of(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """``sampling_params`` of a request."""
    chosen: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": seed % 2**63,
        "stop_token_ids": sampling.stop_token_ids or [],
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": sampling.top_logprobs,
    }
    if sampling.stop:
        chosen["stop"] = sampling.stop
    if sampling.logit_bias:
        chosen["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return chosen


def versions_of(spans: list[dict[str, Any]], tokens: int) -> list[int]:
    """The version of each token, from spans with ``version``, ``start`` and ``end``. Raises EngineError: some have none."""
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    if len(versions) != tokens:
        raise EngineError(f"{tokens} tokens came with the weight versions of {len(versions)}")
    return versions


def _top(content: list[dict[str, Any]]) -> list[list[tuple[int, float]]]:
    return [[(top["token_id"], top["logprob"]) for top in entry.get("top_logprobs") or ()] for entry in content]
