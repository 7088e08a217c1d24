"""Text that grows at its end, with searches that read each character once however often they are repeated.

Parsers of model output look for the same few markers again and again, from ever new places and while text still arrives.
Searching anew each time takes quadratic time; here the places of a marker are kept.
"""

from bisect import bisect_left


class GrowingText:
    """A text and the places of the markers that were searched for in it."""

    __slots__ = ("_places", "_searched", "text")

    def __init__(self) -> None:
        self.text = ""
        self._places: dict[str, list[int]] = {}
        self._searched: dict[str, int] = {}  # where the search for a marker goes on

    def append(self, piece: str) -> None:
        """Add a piece at the end."""
        # CPython extends a string in place while a local variable holds the only reference to it.
        text, self.text = self.text, ""
        text += piece
        self.text = text

    def find(self, marker: str, start: int) -> int:
        """The first place of ``marker`` at or after ``start``, -1 where there is none yet."""
        places = self._places.setdefault(marker, [])
        known = bisect_left(places, start)
        if known < len(places):
            return places[known]
        at = self._searched.get(marker, 0)
        while (place := self.text.find(marker, at)) >= 0:
            places.append(place)
            at = self._searched[marker] = place + 1
            if place >= start:
                return place
        self._searched[marker] = max(at, len(self.text) - len(marker) + 1)
        return -1
