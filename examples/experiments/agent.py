"""An agent for experiments: a class with ``async run(data, ...)`` that uses an OpenAI client.

This file does not import areno. ``base_url`` and ``api_key`` give access to the model. See ``agent.yaml``.
"""

from __future__ import annotations

from typing import Any

import openai


class LetterAgent:
    """Requests an answer, and a second one unless the first is perfect. Each answer gets a reward."""

    async def run(self, data: dict[str, Any], base_url: str, api_key: str, http_client: Any = None) -> dict[str, float]:
        """Run one episode.

        Args:
            data: row with ``prompt`` and ``letter``.
            base_url: address of the model's server.
            api_key: key of this episode.
            http_client: HTTP client that all episodes share.

        Returns:
            The reward of each answer, by its id.
        """
        rewards: dict[str, float] = {}
        messages: list[Any] = [{"role": "user", "content": data["prompt"]}]
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        for _ in range(2):
            answer = await client.chat.completions.create(model="default", messages=messages)
            said = answer.choices[0].message.content or ""
            rewards[answer.id] = said.count(data["letter"]) / max(len(said), 1)
            if rewards[answer.id] == 1:
                break
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": data["prompt"]}]
        return rewards
