"""Base of the Messages and Responses APIs, whose responses are sequences of reasoning, text and tool-call blocks.

Requests are converted to chat requests, so that all APIs share templates, parsers, limits and recording. Streamed responses are
built from chat chunks. A tool call arrives complete, so its block opens and closes at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from areno.serving.chat_api import ChatResponse
from areno.serving.errors import ApiError, bad_field
from areno.serving.schemas import ChatRequest
from areno.types import GeneratedToken

Event = dict[str, Any]
BlockKind = Literal["reasoning", "text"]
_TEXTS: tuple[tuple[BlockKind, str], ...] = (("reasoning", "reasoning_content"), ("text", "content"))


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """Build a chat request from the fields that are not None. Raises ApiError 400 if a field is invalid."""
    try:
        return ChatRequest(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        names = [str(part) for part in first["loc"]]
        raise bad_field(names[0], first["msg"], where=".".join(names)) from error


def objects(value: Any, where: str, param: str) -> list[Mapping[str, Any]]:
    """Return the value of a field that must be a list of objects. Raises ApiError 400 for other values."""
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise bad_field(param, f"{str(value)[:80]!r} is not valid content; send a list of objects", where=where)
    return value


class ProtocolAdapter(ABC):
    """Converts a chat response to a response of another API."""

    ending = b""

    def __init__(self, chat_response: ChatResponse) -> None:
        self._chat_response = chat_response
        self._kind: BlockKind | None = None  # kind of the open block
        self._text = ""  # text of the open block
        self._blocks = 0  # number of blocks opened

    def check(self) -> None:
        """Raise ApiError if the response is incomplete."""
        self._chat_response.check()

    def failure(self, error: ApiError) -> Event:
        """Return the event that reports an error to a streaming client. The event has a type, because clients ignore events
        without a type."""
        return {"type": "error", **error.body}

    def opening(self) -> list[Event]:
        """Return the events that begin a streamed response, before any token."""
        return list(self._begin())

    def push(self, sample: int, tokens: Sequence[GeneratedToken]) -> list[Event]:
        """Add tokens of a sample, and return the events to stream."""
        return self._read(self._chat_response.push(sample, tokens))

    def without_tokens(self) -> list[Event]:
        """Return all events of an empty response, which is sent if the context is full."""
        return [*self._begin(), *self._read(self._chat_response.without_tokens())]

    def closing(self) -> list[Event]:
        """Return an empty list, because :meth:`push` and :meth:`without_tokens` already return the final events."""
        return []

    def complete(self) -> dict[str, Any]:
        """Return the complete, non-streamed response."""
        chat = self._chat_response.complete()
        message = chat["choices"][0]["message"]
        items: list[dict[str, Any]] = []
        for kind, name in _TEXTS:
            if message.get(name):
                items.append(self._item(len(items), kind, message[name]))
        for call in message.get("tool_calls") or []:
            items.append(self._call_item(len(items), call))
        return self._complete(chat, items) | record_of(chat)

    def _read(self, chunks: Iterable[Mapping[str, Any]]) -> list[Event]:
        events: list[Event] = []
        for chunk in chunks:
            for choice in chunk["choices"]:
                events += self._delta(choice["delta"])
                if choice["finish_reason"] is not None:
                    events += self._close_block()
                    events += self._end(self._chat_response.complete())
        return events

    def _delta(self, delta: Mapping[str, Any]) -> Iterable[Event]:
        for kind, name in _TEXTS:
            if text := delta.get(name):
                if self._kind != kind:
                    yield from self._close_block()
                    self._kind = kind
                    yield from self._open(self._blocks, kind)
                    self._blocks += 1
                self._text += text
                yield self._piece(self._blocks - 1, kind, text)
        for call in delta.get("tool_calls") or []:
            yield from self._close_block()
            yield from self._call(self._blocks, call)
            self._blocks += 1

    def _close_block(self) -> Iterable[Event]:
        if self._kind is not None:
            yield from self._close(self._blocks - 1, self._kind, self._text)
        self._kind, self._text = None, ""

    # Implemented by each protocol: its events, the items of a response and the complete response.

    @abstractmethod
    def _begin(self) -> Iterable[Event]: ...

    @abstractmethod
    def _open(self, index: int, kind: BlockKind) -> Iterable[Event]: ...

    @abstractmethod
    def _piece(self, index: int, kind: BlockKind, text: str) -> Event: ...

    @abstractmethod
    def _close(self, index: int, kind: BlockKind, text: str) -> Iterable[Event]: ...

    @abstractmethod
    def _call(self, index: int, call: Mapping[str, Any]) -> Iterable[Event]: ...

    @abstractmethod
    def _end(self, chat: Mapping[str, Any]) -> Iterable[Event]: ...

    @abstractmethod
    def _item(self, index: int, kind: BlockKind, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _call_item(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]: ...

    @abstractmethod
    def _complete(self, chat: Mapping[str, Any], items: list[dict[str, Any]]) -> dict[str, Any]: ...


def record_of(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field ``areno`` of a chat response as ``{"areno": value}``; {} if the response has no such field."""
    return {"areno": chat["areno"]} if "areno" in chat else {}
