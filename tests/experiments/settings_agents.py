"""Agents for tests of settings; importing this module imports nothing heavy."""

from __future__ import annotations

import asyncio
import os
from typing import Any


class Talker:
    """Talks for three turns; the reward is 1 unless ``how`` says otherwise."""

    def __init__(self, how: str = "number", turns: int = 3) -> None:
        self.how, self.turns = how, turns

    async def run(self, data: dict[str, Any], base_url: str, api_key: str, http_client: Any = None) -> Any:
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"}
        messages: list[Any] = [{"role": "user", "content": data["prompt"]}]
        async with httpx.AsyncClient(base_url=base_url.removesuffix("/v1"), headers=headers, timeout=60) as http:
            if self.how == "model":
                return float((await http.get("/v1/models")).json()["data"][0]["id"] == "mine")
            for turn in range(self.turns):
                body = {"model": "mine" if self.how == "named" else "default", "messages": messages}
                answer = await http.post("/v1/chat/completions", json=body)
                answer.raise_for_status()
                message = answer.json()["choices"][0]["message"]
                messages += [
                    {"role": "assistant", "content": message["content"]},
                    {"role": "user", "content": f"Again, {turn}."},
                ]
            if self.how == "late":
                self.late = asyncio.get_running_loop().create_task(_set_reward_late(base_url, headers))
                return None
            if self.how == "sleeps":
                await asyncio.sleep(1000)
        return 1.0


async def _set_reward_late(base_url: str, headers: dict[str, str]) -> None:
    import httpx

    await asyncio.sleep(0.4)
    async with httpx.AsyncClient() as http:
        await http.post(f"{base_url.removesuffix('/v1')}/rl/set_reward", json={"reward": 1.0}, headers=headers)


class Streamer:
    """One streamed answer."""

    async def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"}
        body = {"model": "default", "messages": [{"role": "user", "content": data["prompt"]}], "stream": True}
        async with (
            httpx.AsyncClient(headers=headers, timeout=60) as http,
            http.stream("POST", f"{base_url}/chat/completions", json=body) as answer,
        ):
            answer.raise_for_status()
            return float(len([line async for line in answer.aiter_lines()]))


class Process:
    """The reward is the id of its process."""

    async def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"}
        body = {"model": "default", "messages": [{"role": "user", "content": data["prompt"]}]}
        async with httpx.AsyncClient(headers=headers, timeout=60) as http:
            (await http.post(f"{base_url}/chat/completions", json=body)).raise_for_status()
        return float(os.getpid())
