"""Convert tokens to text incrementally.

A token may be only a part of a UTF-8 character. Decoded alone, a token can also lose its leading space, because
SentencePiece drops the leading space of the first word. Each token is therefore decoded together with a few preceding
tokens. Text is emitted as soon as later tokens can no longer change the text. The window of decoded tokens remains
short, so the cost per token is constant.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

_REPLACEMENT = "\ufffd"
_MAX_CHARACTER_BYTES = 4
_MAX_PENDING_TOKENS = 16


class IncrementalDetokenizer:
    """Decodes tokens one by one. Later tokens never change text that was already returned.

    The pieces returned by :meth:`push` and :meth:`flush` add up to :attr:`text`, which equals ``tokenizer.decode`` of
    all tokens. There is one exception: if stray bytes directly follow a valid character, ``tokenizer.decode`` of a
    byte-fallback tokenizer loses this character. This class keeps the character.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._decoder = _decoder(tokenizer)
        self._tokenizer = tokenizer  # keeps the tokenizer alive: the decoder has only a weak reference
        self._hidden = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        self._parts: list[str] = []
        self._window: list[int] = []  # tokens of the last emitted piece as context, then the pending tokens
        self._context = 0  # number of context tokens in the window
        self._emitted = 0  # number of characters of the decoded window already emitted

    def push(self, token_id: int) -> str:
        """Add one token. Return the new text that later tokens cannot change; empty if there is no such text."""
        if token_id in self._hidden:
            return ""
        self._window.append(token_id)
        decoded = self._decode(self._window)
        # An incomplete character decodes to trailing replacement characters: one, or one per byte.
        final = len(decoded.rstrip(_REPLACEMENT))
        if final < len(decoded):
            if len(self._window) - self._context > _MAX_PENDING_TOKENS:
                return self._settle(decoded)
            return self._emit(decoded, final)
        if final == self._emitted > 0:
            self._window.pop()  # the token decodes to nothing, and must not replace the context
            return ""
        new = self._emit(decoded, final)
        if new:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._emitted = len(self._decode(self._window))
        return new

    def flush(self) -> str:
        """Return the remaining text at the end of generation. An incomplete character becomes replacement characters."""
        decoded = self._decode(self._window)
        return self._emit(decoded, len(decoded))

    @property
    def text(self) -> str:
        """All text so far. An incomplete character at the end becomes replacement characters."""
        return "".join(self._parts) + self._decode(self._window)[self._emitted :]

    def _emit(self, decoded: str, end: int) -> str:
        new = decoded[self._emitted : end]
        if new:
            self._parts.append(new)
            self._emitted = end
        return new

    def _settle(self, decoded: str) -> str:
        """Emit invalid bytes as replacement characters, except for the last bytes, which may begin a valid character.

        Without this method, a long sequence of invalid bytes would be decoded again after each token. The total time would
        be quadratic.
        """
        for cut in range(len(self._window) - _MAX_CHARACTER_BYTES, len(self._window)):
            head = self._decode(self._window[:cut])
            if head + self._decode(self._window[cut:]) == decoded:
                new = self._emit(decoded, len(head))
                self._window = self._window[cut:]
                self._context = self._emitted = 0
                return new
        return self._emit(decoded, len(decoded.rstrip(_REPLACEMENT)))

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder(tuple(token_ids))


_DECODERS: WeakKeyDictionary[Any, Callable[[tuple[int, ...]], str]] = WeakKeyDictionary()


def _decoder(tokenizer: Any) -> Callable[[tuple[int, ...]], str]:
    """Return a function that decodes a short window of tokens. Results are cached, because many windows repeat."""
    if tokenizer not in _DECODERS:
        _DECODERS[tokenizer] = functools.lru_cache(maxsize=1 << 16)(_plain_decoder(tokenizer))
    return _DECODERS[tokenizer]


def _plain_decoder(tokenizer: Any) -> Callable[[tuple[int, ...]], str]:
    """Return ``tokenizer.decode`` without cleanup of spaces.

    If the tokenizer's class does not override ``decode``, the returned function calls the Rust tokenizer directly, which is
    faster.
    """
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in ("decode", "_decode")
    ):
        backend: Any = tokenizer.backend_tokenizer
        return lambda token_ids: backend.decode(token_ids, skip_special_tokens=False)
    decode = weakref.WeakMethod(tokenizer.decode)

    def wrapped(token_ids: tuple[int, ...]) -> str:
        method: Any = decode()
        text: str = method(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return wrapped


_SPECIAL: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()


def _special_ids(tokenizer: Any) -> frozenset[int]:
    if tokenizer not in _SPECIAL:
        added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        _SPECIAL[tokenizer] = frozenset(added | set(tokenizer.all_special_ids))
    return _SPECIAL[tokenizer]
