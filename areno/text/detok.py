"""Token ids to text while they are being generated.

A token is not a piece of text: it may hold half a UTF-8 character, and a SentencePiece word carries its leading space
only where it is not the first. So each token is decoded together with the few before it, and text is handed out once no
later token can change it. The window of decoded tokens stays short, which keeps the cost per token constant.
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
    """Turns one token after the other into text that never has to be taken back.

    The pieces returned by :meth:`push`, and :meth:`flush` at the end, add up to :attr:`text`, which is what
    ``tokenizer.decode`` says about all tokens together. (The one exception: a byte-fallback tokenizer decodes a valid
    character anew as invalid if stray bytes follow it directly; here it stays what it was.)
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._decoder = _decoder(tokenizer)
        self._tokenizer = tokenizer  # the decoder holds it weakly
        self._hidden = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        self._parts: list[str] = []
        self._window: list[int] = []  # tokens of the last finished piece as context, then the unfinished ones
        self._context = 0  # how many of the window's tokens are context
        self._shown = 0  # how many characters of the decoded window were handed out

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that became final with it, often one piece of a word, sometimes nothing."""
        if token_id in self._hidden:
            return ""
        self._window.append(token_id)
        decoded = self._decode(self._window)
        # An unfinished character shows as replacement characters at the end: one, or one per byte.
        final = len(decoded.rstrip(_REPLACEMENT))
        if final < len(decoded):
            if len(self._window) - self._context > _MAX_PENDING_TOKENS:
                return self._settle(decoded)
            return self._emit(decoded, final)
        if final == self._shown > 0:
            self._window.pop()  # renders as nothing, and would push the real context out of the window
            return ""
        new = self._emit(decoded, final)
        if new:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._shown = len(self._decode(self._window))
        return new

    def flush(self) -> str:
        """The rest at the end of generation: what an unfinished character renders as; usually nothing."""
        decoded = self._decode(self._window)
        return self._emit(decoded, len(decoded))

    @property
    def text(self) -> str:
        """All text so far, an unfinished character at the end included as the tokenizer renders it."""
        return "".join(self._parts) + self._decode(self._window)[self._shown :]

    def _emit(self, decoded: str, end: int) -> str:
        new = decoded[self._shown : end]
        if new:
            self._parts.append(new)
            self._shown = end
        return new

    def _settle(self, decoded: str) -> str:
        """Shorten a long run of invalid bytes, so that a model that babbles them does not cost quadratic time."""
        for cut in range(len(self._window) - _MAX_CHARACTER_BYTES, len(self._window)):
            head = self._decode(self._window[:cut])
            if head + self._decode(self._window[cut:]) == decoded:
                new = self._emit(decoded, len(head))
                self._window = self._window[cut:]
                self._context = self._shown = 0
                return new
        return self._emit(decoded, len(decoded.rstrip(_REPLACEMENT)))

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder(tuple(token_ids))


_DECODERS: WeakKeyDictionary[Any, Callable[[tuple[int, ...]], str]] = WeakKeyDictionary()


def _decoder(tokenizer: Any) -> Callable[[tuple[int, ...]], str]:
    """What decodes a few tokens, and remembers: a model says the same pairs of tokens again and again."""
    if tokenizer not in _DECODERS:
        _DECODERS[tokenizer] = functools.lru_cache(maxsize=1 << 16)(_plain_decoder(tokenizer))
    return _DECODERS[tokenizer]


def _plain_decoder(tokenizer: Any) -> Callable[[tuple[int, ...]], str]:
    """``tokenizer.decode`` of all tokens as they are; without its wrapping, three times as fast, where nothing is lost."""
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
