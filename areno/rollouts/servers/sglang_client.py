"""The HTTP calls to an SGLang server, written for SGLang 0.5.23. The calls are untested with a real server.

Log-probs refer to the temperature-scaled distribution before top-k and top-p. New weights are loaded from checkpoint folders.
"""

from pathlib import Path
from typing import Any

import httpx

from areno.errors import EngineError, UsageError
from areno.rollouts.servers.calls import (
    SampleRequest,
    ServerAnswer,
    get_json,
    post_json,
    sampling_of,
    versions_of,
)

# Weight version of a server that was started without --weight-version; areno treats it as version 0.
_UNSET = "default"


class SglangCalls:
    """The HTTP calls to an SGLang server."""

    product = "SGLang"

    async def describe(self, http: httpx.AsyncClient) -> int:
        """Return the context length. Raises UsageError if the weight version is not a number, because areno compares weight
        versions as numbers.
        """
        info = await get_json(http, "/server_info")
        version = str(info.get("weight_version", _UNSET))
        if version != _UNSET and not version.isdecimal():
            raise UsageError(
                f"the SGLang server at {http.base_url} has the weight version {version!r}, which is not a number; start "
                "the server with --weight-version 0"
            )
        return int(info.get("context_length") or info.get("max_total_num_tokens"))

    async def generate(self, http: httpx.AsyncClient, sample: SampleRequest) -> ServerAnswer:
        """See :class:`ServerCalls`."""
        body: dict[str, Any] = {
            "rid": sample.rid,
            "input_ids": sample.prompt,
            "sampling_params": {
                **sampling_of(sample.sampling),
                "max_new_tokens": sample.sampling.max_new_tokens,
                "min_new_tokens": sample.sampling.min_new_tokens,
                "sampling_seed": sample.seed % 2**31,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": sample.sampling.top_logprobs,
            "stream": False,
        }
        if sample.adapter:
            body["lora_path"] = sample.adapter
        answer = await post_json(http, "/generate", body)
        meta, tokens = answer["meta_info"], list(answer["output_ids"])
        reason = meta["finish_reason"]
        if reason["type"] == "abort" and reason.get("status_code"):
            raise EngineError(f"the request to {http.base_url}/generate failed: {reason.get('message')}")
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
        spans = [{**span, "version": 0 if span["version"] == _UNSET else span["version"]} for span in spans]
        top = [[(token, value) for value, token, _ in place] for place in meta.get("output_top_logprobs") or ()]
        return ServerAnswer(tokens, logprobs, versions_of(spans), str(reason["type"]), top)

    async def abort(self, http: httpx.AsyncClient, rids: list[str]) -> None:
        """See :class:`ServerCalls`."""
        for rid in rids:
            await post_json(http, "/abort_request", {"rid": rid})

    async def load_weights(self, http: httpx.AsyncClient, folder: Path, version: int) -> None:
        """Load a checkpoint. Running requests are requeued, and their caches are recomputed with the new weights."""
        await post_json(http, "/pause_generation", {"mode": "retract"})
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "abort_all_requests": False,
            "flush_cache": True,
            "keep_pause": True,
        }
        done = await post_json(http, "/update_weights_from_disk", body)
        if not done.get("success"):
            raise EngineError(f"the request to {http.base_url}/update_weights_from_disk failed: {done.get('message')}")
        await post_json(http, "/continue_generation", {})

    async def load_adapter(self, http: httpx.AsyncClient, name: str, folder: Path) -> None:
        """See :class:`ServerCalls`."""
        await post_json(http, "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, http: httpx.AsyncClient, name: str) -> None:
        """See :class:`ServerCalls`."""
        await post_json(http, "/unload_lora_adapter", {"lora_name": name})

    async def logprobs(self, http: httpx.AsyncClient, prompt: list[int]) -> list[float]:
        """See :class:`ServerCalls`."""
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        meta = (await post_json(http, "/generate", body))["meta_info"]
        return [float(entry[0]) for entry in meta["input_token_logprobs"][1:]]
