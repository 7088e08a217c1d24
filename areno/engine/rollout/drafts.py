"""Guessing how a text goes on: as it did after the same tokens the last time (prompt lookup)."""

from collections.abc import Sequence as Seq

# Tokens that must agree before what followed them is proposed.
MATCH = 3


class DraftIndex:
    """Where each run of ``MATCH`` tokens was last seen in a growing text."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._seen: dict[tuple[int, ...], int] = {}

    def propose(self, context: Seq[int], most: int) -> list[int]:
        """What followed the last tokens of a context the last time, at most ``most`` tokens.

        Each call gets the text of the call before and what came since.
        """
        for token in context[len(self._tokens) :]:
            # The run that ends here is entered when the next token comes: it must not find itself.
            if len(self._tokens) >= MATCH:
                self._seen[tuple(self._tokens[-MATCH:])] = len(self._tokens)
            self._tokens.append(token)
        start = self._seen.get(tuple(self._tokens[-MATCH:]))
        return [] if start is None else self._tokens[start : start + most]
