"""A reward function that uses an LLM as a judge. The judge is a model on an OpenAI-compatible server.

A reward file (``--reward-fn-path``, ``reward.fn``) may contain::

    from areno.rewards.judge import Judge

    reward_fn = Judge("http://HOST:8000/v1", "Grade this answer from 0 to 10.\\n{prompt}\\n{completion}\\nGrade:")
"""

import re
from typing import Any

from areno.errors import RewardError
from areno.openai_client import OpenAIClient, ServerError

_FIELD = re.compile(r"\{(\w+)\}")
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:\.\d+)?")  # the hyphen of "7-8" is not a sign
_MAXIMUM = re.compile(
    r"(?<=\d)[\s*_(]*(?:/|out of)\s*\d+(?:\.\d+)?"  # as in "8/10", "**8**/10" and "8 (out of 10)"
    r"|\b(?:scale|range)(?:\s+(?:of|from))?\s*:?\s*\d+\s*(?:-|–|to)\s*\d+",  # as in "8 (on a scale of 0-10)"
    re.IGNORECASE,
)
_TIMEOUT_S = 60.0


class Judge:
    """Asks a model for a grade, which is the last number of its response.

    A maximum or a scale in the response is ignored: the grade is 8 in "8/10" and in "8 on a scale of 0-10".

    Args:
        url: base URL of the server, including the version, such as ``http://HOST:8000/v1``.
        question: the judge's prompt. ``{prompt}``, ``{completion}`` and ``{NAME}`` for any column ``NAME`` are replaced by the
            values of the row. Other braces remain.
        most: the maximum grade. Grades are divided by this maximum and clipped to [0, 1].
        model: model name on the server; None: the first model that the server lists.
        options: additional request fields, such as ``max_tokens``.

    Reads the API key from ``OPENAI_API_KEY``.
    """

    def __init__(
        self, url: str, question: str, *, most: float = 10.0, model: str | None = None, **options: Any
    ) -> None:
        self.question, self.most = question, most
        self._client, self._options = OpenAIClient(url, _TIMEOUT_S, model), {"temperature": 0, **options}

    def __call__(self, prompt: Any, completions: str = "", *_: Any, **data: Any) -> float:
        """Grade one completion.

        ``areno train`` passes a :class:`RewardRecord` as ``prompt``, and no other argument. ``areno run`` passes the texts
        ``prompt`` and ``completions``, and the columns of the data row as ``data``.

        Raises RewardError if the request fails, or if the response has no number.
        """
        if hasattr(prompt, "completion"):  # a RewardRecord
            data = {**(prompt.source_record or {}), "answer": prompt.answer}
            prompt, completions = prompt.prompt, prompt.completion
        values = {**data, "completion": completions, "prompt": prompt}
        response = self._ask(_FIELD.sub(lambda match: str(values.get(match[1], match[0])), self.question))
        numbers = _NUMBER.findall(_MAXIMUM.sub("", response))
        if not numbers:
            raise RewardError(
                f"the judge at {self._client.url} returned no number: {response[:300]!r}; the question must ask for a number"
            )
        return min(max(float(numbers[-1]) / self.most, 0.0), 1.0)

    def _ask(self, text: str) -> str:
        body = {"messages": [{"role": "user", "content": text}], **self._options}
        try:
            return str(self._client.post("chat/completions", body)["choices"][0]["message"]["content"] or "")
        except (ServerError, LookupError, TypeError) as error:
            raise RewardError(f"the request to the judge at {self._client.url} failed: {error}") from error
