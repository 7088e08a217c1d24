"""Sampled tokens to the text that a client may see, and to the pieces that log-probs are listed by."""

import re
from collections.abc import Sequence
from typing import Any

from areno.text.detok import IncrementalDetokenizer
from areno.text.tool_calls.base import longest_marker_start
from areno.types import GeneratedToken

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class StopCut:
    """Passes text on up to the first stop string, and holds back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self._done = False

    def push(self, piece: str) -> str:
        """Add text; returns what no stop string can take back any more."""
        if not self._stop:
            return piece
        if self._done:
            return ""
        self._held += piece
        hits = [hit for text in self._stop if (hit := self._held.find(text)) >= 0]
        if hits:
            self._done = True
            return self._take(min(hits))
        return self._take(len(self._held) - longest_marker_start(self._held, self._stop))

    def flush(self) -> str:
        """What was held back, at the end of generation."""
        return "" if self._done else self._take(len(self._held))

    def _take(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text


class SampleText:
    """The visible text of one sample; neither stop strings nor the stop token that ended it show."""

    def __init__(
        self, tokenizer: Any, stop: Sequence[str], stop_ids: frozenset[int], skip_special_tokens: bool
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._cut = StopCut(stop)
        self._stop_ids = stop_ids
        self._length = 0  # characters so far, a stop string and what is held back included

    def push(self, tokens: Sequence[GeneratedToken]) -> tuple[str, list[int]]:
        """Text that became final with one or more tokens, and where the text of each begins; the last one brings all."""
        last, pieces, offsets = tokens[-1], [], []
        hidden = last.finish == "stop" and last.token in self._stop_ids
        for token in tokens:
            offsets.append(self._length)
            piece = "" if hidden and token is last else self._detokenizer.push(token.token)
            self._length += len(piece)
            pieces.append(piece)
        if last.finish is None:
            return self._cut.push("".join(pieces)), offsets
        return self._cut.push("".join([*pieces, self._detokenizer.flush()])) + self._cut.flush(), offsets


class TokenTexts:
    """What single tokens look like: their text, and their bytes, which may be part of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token: int) -> tuple[str, list[int]]:
        """Text and UTF-8 bytes of a token."""
        if token not in self._known:
            self._known[token] = self._look_up(token)
        return self._known[token]

    def name(self, token: int) -> str:
        """A text that tells the token from others: that of part of a character is its bytes, as in ``bytes:\\xe2\\x82``."""
        text, data = self(token)
        return text if text.encode() == bytes(data) else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        raw = self._tokenizer.convert_ids_to_tokens(token)
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if raw is None:  # an id beyond the tokenizer's: models may have more rows than it has words
            return text, list(text.encode())
        if _REPLACEMENT in text and (found := _raw_bytes(raw)) is not None:
            return text, found
        if raw.startswith("\u2581") and not text.startswith(" "):
            text = " " + text  # a SentencePiece word that was decoded as if it were the first
        return text, list(text.encode())


def _raw_bytes(raw: str) -> list[int] | None:
    """Bytes that a token stands for, as the two usual vocabularies write them; None where it is another one."""
    if match := _BYTE_TOKEN.fullmatch(raw):
        return [int(match[1], 16)]
    table = _byte_alphabet()
    return [table[char] for char in raw] if all(char in table for char in raw) else None


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in shown}
    hidden = (byte for byte in range(256) if byte not in shown)
    return table | {chr(256 + index): byte for index, byte in enumerate(hidden)}
