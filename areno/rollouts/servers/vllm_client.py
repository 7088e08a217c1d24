"""The HTTP calls to a vLLM server (0.32 and later), started with ``VLLM_SERVER_DEV_MODE=1`` and ``--enable-scale-out``.

With ``--logprobs-mode processed_logprobs``, log-probs refer to the temperature-scaled distribution after top-k and top-p. New
weights are loaded from checkpoint folders, or received by a broadcast.
"""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx

from areno.errors import EngineError
from areno.rollouts.fleet.tensors import TensorSpec
from areno.rollouts.servers.calls import (
    SERVED_NAME,
    SampleRequest,
    ServerAnswer,
    get_json,
    post_json,
    sampling_of,
    versions_of,
)

# Prefix that the server adds to request ids.
_PREFIX = "generate-tokens-"


class VllmCalls:
    """The HTTP calls to a vLLM server.

    Args:
        transfers: whether weights may be broadcast to the server. Broadcasts require areno's worker extension in the server.
        joined: whether the server was already running when areno connected to it. Such a server may lack the extension.
    """

    product = "vLLM"

    def __init__(self, *, transfers: bool = True, joined: bool = False) -> None:
        self.transfers, self.joined = transfers, joined

    async def describe(self, http: httpx.AsyncClient) -> int:
        """Return the context length, and set the server's weight version to 0, the version of the initial weights."""
        models = (await get_json(http, "/v1/models"))["data"]
        await post_json(http, "/update_weight_version", {"new_version": "0"})
        return int(models[0]["max_model_len"])

    async def generate(self, http: httpx.AsyncClient, sample: SampleRequest) -> ServerAnswer:
        """See :class:`ServerCalls`."""
        body = {
            "model": sample.adapter or SERVED_NAME,
            "request_id": sample.rid,
            "token_ids": sample.prompt,
            "sampling_params": {
                **sampling_of(sample.sampling),
                "max_tokens": sample.sampling.max_new_tokens,
                "min_tokens": sample.sampling.min_new_tokens,
                "seed": sample.seed % 2**63,
                "logprobs": sample.sampling.top_logprobs,
            },
            "stream": False,
        }
        choice = (await post_json(http, "/inference/v1/generate", body))["choices"][0]
        content = (choice.get("logprobs") or {}).get("content") or []
        return ServerAnswer(
            list(choice["token_ids"]),
            [entry["logprob"] for entry in content],
            versions_of(choice.get("weight_versions") or []),
            str(choice["finish_reason"]),
            _top(content) if sample.sampling.top_logprobs else [],
        )

    async def abort(self, http: httpx.AsyncClient, rids: list[str]) -> None:
        """See :class:`ServerCalls`."""
        await post_json(http, "/inference/v1/abort_requests", {"request_ids": [_PREFIX + rid for rid in rids]})

    async def load_weights(self, http: httpx.AsyncClient, folder: Path, version: int) -> None:
        """Pause generation, load a checkpoint, and resume. Running requests continue with recomputed caches."""
        await post_json(http, "/pause", mode="keep")
        await self._rpc(http, "reload_weights", weights_path=str(folder))
        await post_json(http, "/update_weight_version", {"new_version": str(version)})
        await self._resume(http)

    async def world_size(self, http: httpx.AsyncClient) -> int:
        """Return the number of workers of the server."""
        return int((await get_json(http, "/get_world_size"))["world_size"])

    async def join_group(
        self, http: httpx.AsyncClient, store: tuple[str, int], first: int, size: int, patience_s: float
    ) -> None:
        """Let the server's workers join a process group of ``size`` members. The workers' ranks begin at ``first``.

        The members find each other through the TCP store that listens at ``store`` (host and port).
        """
        group = {"host": store[0], "port": store[1], "first": first, "size": size, "patience_s": patience_s}
        await post_json(http, "/init_weight_transfer_engine", {"init_info": group})

    async def receive(
        self, http: httpx.AsyncClient, specs: Sequence[TensorSpec], bucket_bytes: int, version: int
    ) -> None:
        """Let the server load the weights that the trainer broadcasts to the process group of :meth:`join_group`.

        Generation is paused as in :meth:`load_weights`. After a failure, the server must reload its weights before it can
        generate.
        """
        await post_json(http, "/pause", mode="keep")
        await post_json(http, "/start_weight_update")
        weights = {
            "names": [spec.name for spec in specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "bucket_bytes": bucket_bytes,
        }
        await post_json(http, "/update_weights", {"update_info": weights})
        await post_json(http, "/finish_weight_update", {"weight_version": str(version)})
        await self._resume(http)

    async def _resume(self, http: httpx.AsyncClient) -> None:
        if self.transfers:
            # A joined server without the extension does not know the method, and needs it only on a CPU (docs/servers.md).
            with suppress(EngineError) if self.joined else nullcontext():
                await self._rpc(http, "areno_repack")
        dropped = await post_json(http, "/reset_prefix_cache", reset_running_requests=True)
        if not (dropped or {}).get("success", True):
            raise EngineError(f"the vLLM server at {http.base_url} could not reset the prefix cache of the old weights")
        await post_json(http, "/resume")

    async def _rpc(self, http: httpx.AsyncClient, method: str, **arguments: Any) -> None:
        await post_json(http, "/collective_rpc", {"method": method, "kwargs": arguments})

    async def load_adapter(self, http: httpx.AsyncClient, name: str, folder: Path) -> None:
        """See :class:`ServerCalls`."""
        await post_json(http, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, http: httpx.AsyncClient, name: str) -> None:
        """See :class:`ServerCalls`."""
        await post_json(http, "/v1/unload_lora_adapter", {"lora_name": name})

    async def logprobs(self, http: httpx.AsyncClient, prompt: list[int]) -> list[float]:
        """See :class:`ServerCalls`."""
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
        choice = (await post_json(http, "/v1/completions", body))["choices"][0]
        return [
            top[str(token)]["logprob"] for token, top in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        ]


def _top(content: list[dict[str, Any]]) -> list[list[tuple[int, float]]]:
    return [[(top["token_id"], top["logprob"]) for top in entry.get("top_logprobs") or ()] for entry in content]
