"""What the two further protocols share: a chat answer told as a row of blocks of reasoning, text and calls.

Requests become chat requests, so that every protocol has the same templates, parsers, limits and records; answers are
read from the chat answer's chunks. A call comes whole, so its block opens and closes at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from areno.serving.chat import ChatAnswer
from areno.serving.errors import bad_field
from areno.serving.schemas import ChatRequest
from areno.types import GeneratedToken

Event = dict[str, Any]
BlockKind = Literal["reasoning", "text"]
_TEXTS: tuple[tuple[BlockKind, str], ...] = (("reasoning", "reasoning_content"), ("text", "content"))


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """A chat request of fields that another protocol's request was translated to. Raises ApiError: 400, a field cannot work."""
    try:
        return ChatRequest(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        names = [str(part) for part in first["loc"]]
        raise bad_field(names[0], first["msg"], where=".".join(names)) from error


def objects(value: Any, where: str, param: str) -> list[Mapping[str, Any]]:
    """A list of objects, as which a field that is not a text must be read. Raises ApiError: 400, it is something else."""
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise bad_field(param, f"{str(value)[:80]!r} is no list of blocks; send text or objects", where=where)
    return value


class BlockAnswer(ABC):
    """An answer in another protocol."""

    ending = b""

    def __init__(self, answer: ChatAnswer) -> None:
        self._answer = answer
        self._kind: BlockKind | None = None  # of the block that is open
        self._text = ""  # of that block
        self._blocks = 0  # opened so far

    def check(self) -> None:
        """Raises ApiError: the answer is not complete."""
        self._answer.check()

    def opening(self) -> list[Event]:
        """Events before the first token."""
        return list(self._begin())

    def push(self, sample: int, tokens: Sequence[GeneratedToken]) -> list[Event]:
        """Take the next tokens; the events that they make."""
        return self._read(self._answer.push(sample, tokens))

    def without_tokens(self) -> list[Event]:
        """The events of an answer for which the context had no room."""
        return [*self._begin(), *self._read(self._answer.without_tokens())]

    def closing(self) -> list[Event]:
        """Nothing is left to say after the last token."""
        return []

    def complete(self) -> dict[str, Any]:
        """The whole answer."""
        chat = self._answer.complete()
        message = chat["choices"][0]["message"]
        items: list[dict[str, Any]] = []
        for kind, name in _TEXTS:
            if message.get(name):
                items.append(self._item(len(items), kind, message[name]))
        for call in message.get("tool_calls") or []:
            items.append(self._call_item(len(items), call))
        return self._whole(chat, items) | recorded(chat)

    def _read(self, chunks: Iterable[Mapping[str, Any]]) -> list[Event]:
        events: list[Event] = []
        for chunk in chunks:
            for choice in chunk["choices"]:
                events += self._delta(choice["delta"])
                if choice["finish_reason"] is not None:
                    events += self._close_block()
                    events += self._end(self._answer.complete())
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

    # What a protocol supplies: events, the items of an answer, and the whole answer around them.

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
    def _whole(self, chat: Mapping[str, Any], items: list[dict[str, Any]]) -> dict[str, Any]: ...


def recorded(chat: Mapping[str, Any]) -> dict[str, Any]:
    """What a recorder says about an answer."""
    return {"areno": chat["areno"]} if "areno" in chat else {}
