"""An agent as an experiment takes it: a class with ``async run(data, ...)`` that talks to an OpenAI client.

Nothing of areno is imported here; ``base_url`` and ``api_key`` say where the model is. See ``agent.yaml``.
"""

from __future__ import annotations

from typing import Any

import openai


class LetterAgent:
    """Asks, corrects the model, and asks again; both answers are judged."""

    async def run(self, data: dict[str, Any], base_url: str, api_key: str, http_client: Any = None) -> dict[str, float]:
        """One episode.

        Args:
            data: a row: ``prompt`` and ``letter``.
            base_url: of the model.
            api_key: of this episode.
            http_client: connections that all episodes share.

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
