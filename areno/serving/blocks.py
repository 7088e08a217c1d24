"""What the two further protocols share: a chat answer told as a row of blocks of reasoning, text and calls.

Requests become chat requests, so that every protocol has the same templates, parsers, limits and records; answers are
read from the chat answer's chunks. A call comes whole, so its block opens and closes at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from areno.serving.chat import ChatAnswer
from areno.serving.errors import ApiError
from areno.serving.schemas import ChatRequest
from areno.types import GeneratedToken

Event = dict[str, Any]
BlockKind = Literal["reasoning", "text"]


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """A chat request of fields that another protocol's request was translated to. Raises ApiError: 400, a field cannot work."""
    try:
        return ChatRequest(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        names = [str(part) for part in first["loc"]]
        raise ApiError(400, f"{'.'.join(names)}: {first['msg']}", param=names[0] if names else None) from error


def objects(value: Any, where: str, param: str) -> list[Mapping[str, Any]]:
    """A list of objects, as which a field that is not a text must be read. Raises ApiError: 400, it is something else."""
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise ApiError(400, f"{where}: {str(value)[:80]!r} is no list of blocks; send text or objects", param=param)
    return value


class BlockAnswer(ABC):
    """An :class:`areno.serving.wire.Answer` in another protocol."""

    ending = b""

    def __init__(self, answer: ChatAnswer) -> None:
        self._answer = answer
        self._kind: BlockKind | None = None  # of the block that is open
        self._text = ""  # of that block
        self._blocks = 0  # opened so far

    def problem(self) -> ApiError | None:
        """What keeps the answer from being complete."""
        return self._answer.problem()

    def opening(self) -> list[Event]:
        """Events before the first token."""
        self._answer.opening()
        return list(self.start())

    def push(self, sample: int, tokens: Sequence[GeneratedToken]) -> list[Event]:
        """Take the next tokens; the events that they make."""
        return self._read(self._answer.push(sample, tokens))

    def without_tokens(self) -> list[Event]:
        """The events of an answer for which the context had no room."""
        return [*self.start(), *self._read(self._answer.without_tokens())]

    def closing(self) -> list[Event]:
        """Nothing is left to say after the last token."""
        return []

    def complete(self) -> dict[str, Any]:
        """The whole answer."""
        return self.whole(self._answer.complete())

    def _read(self, chunks: Iterable[Mapping[str, Any]]) -> list[Event]:
        events: list[Event] = []
        for chunk in chunks:
            for choice in chunk["choices"]:
                events += self._delta(choice["delta"])
                if choice["finish_reason"] is not None:
                    events += self._close()
                    events += self.end(self._answer.complete())
        return events

    def _delta(self, delta: Mapping[str, Any]) -> Iterable[Event]:
        texts: tuple[tuple[BlockKind, str], ...] = (("reasoning", "reasoning_content"), ("text", "content"))
        for kind, name in texts:
            if text := delta.get(name):
                yield from self._say(kind, text)
        for call in delta.get("tool_calls") or []:
            yield from self._close()
            yield from self.call(self._blocks, call)
            self._blocks += 1

    def _say(self, kind: BlockKind, text: str) -> Iterable[Event]:
        if self._kind != kind:
            yield from self._close()
            self._kind = kind
            yield from self.open(self._blocks, kind)
            self._blocks += 1
        self._text += text
        yield self.delta(self._blocks - 1, kind, text)

    def _close(self) -> Iterable[Event]:
        if self._kind is not None:
            yield from self.close(self._blocks - 1, self._kind, self._text)
        self._kind, self._text = None, ""

    # -- what a protocol supplies ----------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> Iterable[Event]:
        """The stream begins."""

    @abstractmethod
    def open(self, index: int, kind: BlockKind) -> Iterable[Event]:
        """A block begins."""

    @abstractmethod
    def delta(self, index: int, kind: BlockKind, text: str) -> Event:
        """A further piece of a block."""

    @abstractmethod
    def close(self, index: int, kind: BlockKind, text: str) -> Iterable[Event]:
        """A block ends."""

    @abstractmethod
    def call(self, index: int, call: Mapping[str, Any]) -> Iterable[Event]:
        """A whole call, from its beginning to its end."""

    @abstractmethod
    def end(self, chat: Mapping[str, Any]) -> Iterable[Event]:
        """The stream ends; ``chat`` is the whole chat answer."""

    @abstractmethod
    def whole(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer, from the whole chat answer."""
