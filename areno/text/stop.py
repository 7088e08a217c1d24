"""Detect stop strings, which end generation when they occur in the decoded text, regardless of token boundaries.

Each search covers only the new text, and the few preceding characters in which a stop string may have begun. The cost
per token is therefore constant.
"""

from typing import Any

from areno.text.detok import IncrementalDetokenizer


class StopChecker:
    """Checks one response for stop strings. Raises ValueError if a stop string is empty."""

    def __init__(self, tokenizer: Any, stop: list[str], skip_special_tokens: bool = True) -> None:
        if not all(stop):
            raise ValueError("stop strings must not be empty")
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._stop = list(stop)
        self._overlap = max((len(text) for text in stop), default=1) - 1
        self._tail = ""  # the last characters, in which a stop string may have started
        self._length = 0
        self._cut: int | None = None
        self.stopped = False  # whether a stop string has occurred

    def push(self, token_id: int) -> bool:
        """Add one token, and return whether the text contains a stop string. Tokens after a stop string are ignored."""
        if self.stopped:
            return True
        new = self._detokenizer.push(token_id)
        if not new:
            return False
        searched = self._tail + new
        self._length += len(new)
        hits = [hit for text in self._stop if (hit := searched.find(text)) >= 0]
        if hits:
            self._cut, self.stopped = self._length - len(searched) + min(hits), True
        else:
            self._tail = searched[max(len(searched) - self._overlap, 0) :]
        return self.stopped

    @property
    def text(self) -> str:
        """The decoded response, up to but not including the first stop string."""
        text = self._detokenizer.text
        return text if self._cut is None else text[: self._cut]
