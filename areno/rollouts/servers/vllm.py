"""The calls of a vLLM server (0.32 and later), started with ``VLLM_SERVER_DEV_MODE=1`` and ``--enable-scale-out``.

Log-probs are those of ``--logprobs-mode processed_logprobs``: of the temperature-scaled distribution, over what top-k and top-p
leave. Weights travel as checkpoint folders, or by a broadcast.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from areno.errors import EngineError
from areno.rollouts.fleet.tensors import TensorSpec
from areno.rollouts.servers.calls import SERVED_NAME, Answer, Sample, Served, ask, look, sampling_of, versions_of

# The server puts this before the name of a request.
_PREFIX = "generate-tokens-"


class VllmCalls:
    """See the module's text; ``extended`` says that the server has areno's worker extension and transfer engine."""

    product = "vLLM"

    def __init__(self, *, extended: bool = True) -> None:
        self.transfers = extended

    async def describe(self, http: httpx.AsyncClient) -> Served:
        """Limits of the model; its weights become version 0."""
        models = (await look(http, "/v1/models"))["data"]
        await ask(http, "/update_weight_version", {"new_version": "0"})
        return Served(context_length=int(models[0]["max_model_len"]))

    async def generate(self, http: httpx.AsyncClient, sample: Sample) -> Answer:
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
        choice = (await ask(http, "/inference/v1/generate", body))["choices"][0]
        content = (choice.get("logprobs") or {}).get("content") or []
        return Answer(
            list(choice["token_ids"]),
            [entry["logprob"] for entry in content],
            versions_of(choice.get("weight_versions") or []),
            str(choice["finish_reason"]),
            _top(content) if sample.sampling.top_logprobs else [],
        )

    async def abort(self, http: httpx.AsyncClient, rids: list[str]) -> None:
        """See :class:`ServerCalls`."""
        await ask(http, "/inference/v1/abort_requests", {"request_ids": [_PREFIX + rid for rid in rids]})

    async def load_weights(self, http: httpx.AsyncClient, folder: Path, version: int) -> None:
        """Paused meanwhile; running requests go on with the next token, their caches computed anew with the new weights."""
        await ask(http, "/pause", mode="keep")
        await self._rpc(http, "reload_weights", weights_path=str(folder))
        await ask(http, "/update_weight_version", {"new_version": str(version)})
        await self._go_on(http)

    async def world_size(self, http: httpx.AsyncClient) -> int:
        """See :class:`TransferCalls`."""
        return int((await look(http, "/get_world_size"))["world_size"])

    async def join_group(
        self, http: httpx.AsyncClient, store: tuple[str, int], first: int, size: int, patience_s: float
    ) -> None:
        """See :class:`TransferCalls`."""
        group = {"host": store[0], "port": store[1], "first": first, "size": size, "patience_s": patience_s}
        await ask(http, "/init_weight_transfer_engine", {"init_info": group})

    async def receive(
        self, http: httpx.AsyncClient, specs: Sequence[TensorSpec], bucket_bytes: int, version: int
    ) -> None:
        """See :class:`TransferCalls`. Between start and finish the model cannot compute, so a failure ends in a reload."""
        await ask(http, "/pause", mode="keep")
        await ask(http, "/start_weight_update")
        weights = {
            "names": [spec.name for spec in specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "bucket_bytes": bucket_bytes,
        }
        await ask(http, "/update_weights", {"update_info": weights})
        await ask(http, "/finish_weight_update", {"weight_version": str(version)})
        await self._go_on(http)

    async def _go_on(self, http: httpx.AsyncClient) -> None:
        if self.transfers:
            await self._rpc(http, "areno_repack")
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

    async def logprobs(self, http: httpx.AsyncClient, prompt: list[int]) -> list[float]:
        """See :class:`ServerCalls`."""
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
        choice = (await ask(http, "/v1/completions", body))["choices"][0]
        return [
            found[str(token)]["logprob"] for token, found in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        ]


def _top(content: list[dict[str, Any]]) -> list[list[tuple[int, float]]]:
    return [[(top["token_id"], top["logprob"]) for top in entry.get("top_logprobs") or ()] for entry in content]
