"""A model behind an address as a reward function: any server of the OpenAI protocol grades completions.

    from areno.rewards.judge import Judge

    reward_fn = Judge("http://HOST:8000/v1", "Grade this answer from 0 to 10.\\n{prompt}\\n{completion}\\nGrade:")

in a file that ``--reward-fn-path`` or ``reward.fn`` names.
"""

import re
from typing import Any

from areno.errors import RewardError
from areno.openai_client import OpenAIClient, ServerError

_FIELD = re.compile(r"\{(\w+)\}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_TIMEOUT_S = 60.0


class Judge:
    """Asks for a grade, and takes the last number of what is said.

    Args:
        url: of the server, with its version.
        question: text of the request; ``{prompt}``, ``{completion}`` and the columns of a row are replaced, braces that are
            none of these stay.
        most: the best grade, which is the reward 1; 0 is the reward 0, and what lies beyond is cut.
        model: name at the server; None takes the first that it lists.
        options: further fields of the request, such as ``max_tokens``.

    The key is taken from ``OPENAI_API_KEY``.
    """

    def __init__(
        self, url: str, question: str, *, most: float = 10.0, model: str | None = None, **options: Any
    ) -> None:
        self.question, self.most = question, most
        self._client, self._options = OpenAIClient(url, _TIMEOUT_S, model), {"temperature": 0, **options}

    def __call__(self, prompt: Any, completions: str = "", *_: Any, **data: Any) -> float:
        """The reward of one completion: of a record (``areno train``), or of texts (an experiment).

        Raises RewardError: the server does not answer, or gives no number.
        """
        if hasattr(prompt, "completion"):  # a record, whose other columns are its metadata
            data = {**(prompt.source_record or {}), "answer": prompt.answer}
            prompt, completions = prompt.prompt, prompt.completion
        values = {**data, "completion": completions, "prompt": prompt}
        said = self._ask(_FIELD.sub(lambda found: str(values.get(found[1], found[0])), self.question))
        numbers = _NUMBER.findall(said)
        if not numbers:
            raise RewardError(
                f"the judge at {self._client.url} gave no number: {said[:300]!r}; ask for one in its question"
            )
        return min(max(float(numbers[-1]) / self.most, 0.0), 1.0)

    def _ask(self, text: str) -> str:
        body = {"messages": [{"role": "user", "content": text}], **self._options}
        try:
            return str(self._client.post("chat/completions", body)["choices"][0]["message"]["content"] or "")
        except (ServerError, LookupError, TypeError) as error:
            raise RewardError(f"the judge at {self._client.url} does not answer: {error}") from error
