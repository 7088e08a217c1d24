"""Propose draft tokens by prompt lookup: the tokens that followed the previous occurrence of the last n-gram."""

from collections.abc import Sequence as Seq

# Length of the n-gram that must match.
MATCH = 3


class DraftIndex:
    """Finds the last occurrence of each n-gram of ``MATCH`` tokens in a growing token sequence."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._seen: dict[tuple[int, ...], int] = {}

    def propose(self, context: Seq[int], most: int) -> list[int]:
        """Propose up to ``most`` tokens that followed the previous occurrence of the context's last n-gram.

        The context must extend the context of the previous call.
        """
        for token in context[len(self._tokens) :]:
            # An n-gram is indexed when the token after it arrives, so that it cannot match itself.
            if len(self._tokens) >= MATCH:
                self._seen[tuple(self._tokens[-MATCH:])] = len(self._tokens)
            self._tokens.append(token)
        start = self._seen.get(tuple(self._tokens[-MATCH:]))
        return [] if start is None else self._tokens[start : start + most]
