"""An agent as users write it: the OpenAI client, two turns, a reward computed from the last answer."""

from __future__ import annotations

import os
from typing import Any

import openai


class Echo:
    """Asks for a letter twice; the reward is the letter's share of the last answer."""

    async def run(self, data: dict[str, Any], http_client: Any = None, **extra: Any) -> float:
        where = {"base_url": extra["base_url"], "api_key": extra["api_key"]} if "base_url" in extra else {}
        messages: list[Any] = [{"role": "user", "content": data["prompt"]}]
        client = openai.AsyncOpenAI(**where, http_client=http_client, max_retries=0)
        async with client:
            for _ in range(2):
                answer = await client.chat.completions.create(model="default", messages=messages)
                text = answer.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": data["prompt"]}]
        if "ARENO_TEST_PIDS" in os.environ:
            with open(os.environ["ARENO_TEST_PIDS"], "a", encoding="utf-8") as file:
                file.write(f"{os.getpid()}\n")
        return text.count(data["letter"]) / max(len(text), 1)
