"""``POST /v1/messages``: Anthropic's Messages API over the chat endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field

from areno.serving.blocks import BlockAnswer, BlockKind, Event, chat_request, objects
from areno.serving.errors import ApiError
from areno.serving.schemas import ChatRequest, RequestBody

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesRequest(RequestBody):
    """Body of the endpoint; fields that are not declared are ignored."""

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None

    def chat(self) -> ChatRequest:
        """The same as a chat request. Raises ApiError: 400, something has no meaning here."""
        choice = self.tool_choice or {}
        return chat_request(
            {
                "model": self.model,
                "messages": self._messages(),
                "tools": [_tool(tool) for tool in self.tools or []] or None,
                "tool_choice": _choice(choice) if self.tools else None,
                "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
                "max_tokens": self.max_tokens,
                "stop": self.stop_sequences or None,
                "stream": self.stream,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
            }
        )

    def _messages(self) -> list[dict[str, Any]]:
        system = _text(self.system, "system") if self.system else ""
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for place, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages[{place}]")
        return messages


def _chat_messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One message; results of tools come out as messages of their own, before the text that stands with them."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) or content is None:
        return [{"role": role, "content": content}]
    made: list[dict[str, Any]] = []
    texts: list[Mapping[str, Any]] = []
    answer: dict[str, Any] = {"role": role, "content": None}
    for block in objects(content, where, "messages"):
        kind = block.get("type")
        if kind == "tool_result":
            result = _text(block.get("content") or "", where)
            made.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind == "tool_use":
            function = {
                "name": block.get("name"),
                "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False),
            }
            call = {"id": block.get("id"), "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            answer["reasoning_content"] = answer.get("reasoning_content", "") + str(block.get("thinking", ""))
        else:
            texts.append(block)
    if texts:
        answer["content"] = _text(texts, where)
    if texts or len(answer) > 2:
        made.append(answer)
    return made


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    content = objects(content, where, "messages")
    wrong = [block.get("type") for block in content if block.get("type") != "text"]
    if wrong:
        raise ApiError(400, f"{where}: blocks of type {wrong[0]!r} cannot be read here; send text", param="messages")
    return "".join(str(block.get("text", "")) for block in content)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise ApiError(
            400, f"tools: a tool of type {tool['type']!r} is not there; give tools of your own", param="tools"
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(choice: Mapping[str, Any]) -> Any:
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return _CHOICES.get(str(choice.get("type", "auto")), choice.get("type"))


class MessagesAnswer(BlockAnswer):
    """The answer to one request."""

    def start(self) -> Iterable[Event]:
        """The stream begins."""
        yield {"type": "message_start", "message": self._message([], None, self._answer.prompt_tokens, 0)}

    def open(self, index: int, kind: BlockKind) -> Iterable[Event]:
        """A block begins."""
        yield {"type": "content_block_start", "index": index, "content_block": _block(kind, "")}

    def delta(self, index: int, kind: BlockKind, text: str) -> Event:
        """A further piece of a block."""
        piece = {"type": "text_delta", "text": text} if kind == "text" else {"type": "thinking_delta", "thinking": text}
        return {"type": "content_block_delta", "index": index, "delta": piece}

    def close(self, index: int, kind: BlockKind, text: str) -> Iterable[Event]:
        """A block ends."""
        yield {"type": "content_block_stop", "index": index}

    def call(self, index: int, call: Mapping[str, Any]) -> Iterable[Event]:
        """A whole call."""
        arguments = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
        yield {"type": "content_block_start", "index": index, "content_block": {**_use(call), "input": {}}}
        yield {"type": "content_block_delta", "index": index, "delta": arguments}
        yield {"type": "content_block_stop", "index": index}

    def end(self, chat: Mapping[str, Any]) -> Iterable[Event]:
        """The stream ends."""
        reason, usage = _STOPS[chat["choices"][0]["finish_reason"]], chat["usage"]
        recorded = {"areno": chat["areno"]} if "areno" in chat else {}
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": {"output_tokens": usage["completion_tokens"]},
            **recorded,
        }
        yield {"type": "message_stop"}

    def whole(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        choice, usage = chat["choices"][0], chat["usage"]
        message = choice["message"]
        blocks = [_block("reasoning", message["reasoning_content"])] if message.get("reasoning_content") else []
        blocks += [_block("text", message["content"])] if message["content"] else []
        blocks += [_use(call) for call in message.get("tool_calls") or []]
        counts = (usage["prompt_tokens"], usage["completion_tokens"])
        made = self._message(blocks, _STOPS[choice["finish_reason"]], *counts)
        return made | ({"areno": chat["areno"]} if "areno" in chat else {})

    def _message(self, content: list[dict[str, Any]], stop: str | None, given: int, said: int) -> dict[str, Any]:
        return {
            "id": f"msg_{self._answer.id}",
            "type": "message",
            "role": "assistant",
            "model": self._answer.model,
            "content": content,
            "stop_reason": stop,
            "stop_sequence": None,
            "usage": {"input_tokens": given, "output_tokens": said},
        }


def _block(kind: BlockKind, text: str) -> dict[str, Any]:
    if kind == "text":
        return {"type": "text", "text": text}
    return {"type": "thinking", "thinking": text, "signature": ""}


def _use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": json.loads(function["arguments"]),
    }
