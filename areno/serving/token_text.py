"""Converts sampled tokens to visible text, and single tokens to text and bytes for log-prob entries."""

import re
from collections.abc import Sequence
from typing import Any

from areno.text.detok import IncrementalDetokenizer
from areno.text.tool_calls.parser import longest_marker_start
from areno.types import GeneratedToken

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class StopStringFilter:
    """Removes the first stop string and all later text. Text that may be the beginning of a stop string is held back."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None  # the first stop string, once it has occurred

    def push(self, piece: str) -> str:
        """Append ``piece`` to the held-back text, and return the part that cannot belong to a stop string."""
        if not self._stop:
            return piece
        if self.matched is not None:
            return ""
        self._held += piece
        hits = {text: hit for text in self._stop if (hit := self._held.find(text)) >= 0}
        if hits:
            self.matched = min(hits, key=hits.__getitem__)
            return self._take(hits[self.matched])
        return self._take(len(self._held) - longest_marker_start(self._held, self._stop))

    def flush(self) -> str:
        """Return the held-back text at the end of generation."""
        return "" if self.matched is not None else self._take(len(self._held))

    def _take(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text


class SampleText:
    """The visible text of one sample, without the stop string or the final stop token."""

    def __init__(
        self, tokenizer: Any, stop: Sequence[str], stop_ids: frozenset[int], skip_special_tokens: bool
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._cut = StopStringFilter(stop)
        self._stop_ids = stop_ids
        self._length = 0  # characters so far, including a stop string and held-back text

    @property
    def stop_string(self) -> str | None:
        """The first stop string that has occurred. None if no stop string has occurred."""
        return self._cut.matched

    def push(self, tokens: Sequence[GeneratedToken]) -> tuple[str, list[int]]:
        """Add tokens. Return the new text, and the character offset of each added token in the text of the sample.

        Text that later tokens may change is held back: an incomplete character, or a possible beginning of a stop string. The
        last token of the sample flushes all text.
        """
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
    """The text and UTF-8 bytes of single tokens. A token may be a part of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token: int) -> tuple[str, list[int]]:
        """Return the text and the UTF-8 bytes of a token."""
        if token not in self._cache:
            self._cache[token] = self._look_up(token)
        return self._cache[token]

    def name(self, token: int) -> str:
        """Return the text of a token. If a token is only a part of a character, the result shows bytes:
        ``bytes:\\xe2\\x82``."""
        text, data = self(token)
        return text if text.encode() == bytes(data) else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        raw = self._tokenizer.convert_ids_to_tokens(token)
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if raw is None:  # padding rows of the model's vocabulary, unknown to the tokenizer
            return text, list(text.encode())
        if _REPLACEMENT in text and (data := _raw_bytes(raw)) is not None:
            return text, data
        if raw.startswith("\u2581") and not text.startswith(" "):
            text = " " + text  # SentencePiece drops the leading space of the first word
        return text, list(text.encode())


def _raw_bytes(raw: str) -> list[int] | None:
    """Convert a token of a byte-fallback or byte-level vocabulary to bytes. None for other tokens."""
    if match := _BYTE_TOKEN.fullmatch(raw):
        return [int(match[1], 16)]
    table = _byte_alphabet()
    return [table[char] for char in raw] if all(char in table for char in raw) else None


def _byte_alphabet() -> dict[str, int]:
    """Map the characters of byte-level vocabularies to bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}
