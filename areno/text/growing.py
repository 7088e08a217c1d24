"""Append-only text in which repeated searches for a marker scan each character only once.

Parsers of streamed model output search for the same markers many times, from increasing positions. Scanning the text
again for each search would take quadratic time. The positions of each marker are therefore cached.
"""

from bisect import bisect_left


class GrowingText:
    """Append-only text that caches the positions of the strings for which :meth:`find` has searched."""

    __slots__ = ("_positions", "_searched", "text")

    def __init__(self) -> None:
        self.text = ""
        self._positions: dict[str, list[int]] = {}
        self._searched: dict[str, int] = {}  # position at which the search for a marker resumes

    def append(self, piece: str) -> None:
        """Append ``piece`` to the text."""
        # CPython extends a string in place if a local variable holds its only reference.
        text, self.text = self.text, ""
        text += piece
        self.text = text

    def find(self, marker: str, start: int) -> int:
        """Return the position of the first ``marker`` at or after ``start``; -1 if the text has no such marker yet."""
        positions = self._positions.setdefault(marker, [])
        cached = bisect_left(positions, start)
        if cached < len(positions):
            return positions[cached]
        at = self._searched.get(marker, 0)
        while (position := self.text.find(marker, at)) >= 0:
            positions.append(position)
            at = self._searched[marker] = position + 1
            if position >= start:
                return position
        self._searched[marker] = max(at, len(self.text) - len(marker) + 1)
        return -1
