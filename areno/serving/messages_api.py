"""Implements ``POST /v1/messages``, Anthropic's Messages API, on top of the chat endpoint."""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field

from areno.serving.errors import bad_field
from areno.serving.protocol_adapter import BlockKind, Event, ProtocolAdapter, chat_request, objects, record_of
from areno.serving.schemas import ChatRequest, RequestBody

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesRequest(RequestBody):
    """Body of ``POST /v1/messages``. Undeclared fields are ignored."""

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
        """Convert to a chat request. Raises ApiError 400 if a field is invalid or unsupported."""
        choice = self.tool_choice or {}
        same = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
        return chat_request(
            {name: getattr(self, name) for name in same}
            | {
                "messages": self._messages(),
                "tools": [_tool(tool) for tool in self.tools or []] or None,
                "tool_choice": _choice(choice),
                "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
                "stop": self.stop_sequences or None,
            }
        )

    def _messages(self) -> list[dict[str, Any]]:
        system = _text(self.system, "system") if self.system else ""
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for index, message in enumerate(self.messages):
            messages += _chat_messages(message, f"messages[{index}]")
        return messages


def _chat_messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Convert one message to a list of chat messages. Each tool result becomes a chat message of its own. The remaining
    content becomes the last chat message."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) or content is None:
        return [{"role": role, "content": content}]
    converted: list[dict[str, Any]] = []
    texts: list[Mapping[str, Any]] = []
    main: dict[str, Any] = {"role": role, "content": None}
    for block in objects(content, where, "messages"):
        kind = block.get("type")
        if kind == "tool_result":
            result = _text(block.get("content") or "", where)
            converted.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            call = {"id": block.get("id"), "type": "function", "function": function}
            main.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            main["reasoning_content"] = main.get("reasoning_content", "") + str(block.get("thinking", ""))
        else:
            texts.append(block)
    if texts:
        main["content"] = _text(texts, where)
    if texts or len(main) > 2:
        converted.append(main)
    return converted


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    content = objects(content, where, "messages")
    for block in content:
        if block.get("type") != "text":
            raise bad_field(
                "messages", f"blocks of type {block.get('type')!r} are not supported; send text blocks", where=where
            )
        if not isinstance(block.get("text"), str):
            raise bad_field(
                "messages", f"the field `text` of a text block is {block.get('text')!r:.80}; send a string", where=where
            )
    return "".join(block["text"] for block in content)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise bad_field("tools", f"tools of type {tool['type']!r} are not supported; send custom tools")
    fields = {"name": "name", "description": "description", "parameters": "input_schema"}
    function = {openai: tool[anthropic] for openai, anthropic in fields.items() if tool.get(anthropic) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> Any:
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return _TOOL_CHOICES.get(str(choice.get("type", "auto")), choice.get("type"))


class MessagesResponse(ProtocolAdapter):
    """Builds the Messages API response to one request."""

    def _begin(self) -> Iterable[Event]:
        not_yet = {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": self._message([], not_yet, self._chat_response.prompt_tokens, 0)}

    def _open(self, index: int, kind: BlockKind) -> Iterable[Event]:
        yield {"type": "content_block_start", "index": index, "content_block": self._item(index, kind, "")}

    def _piece(self, index: int, kind: BlockKind, text: str) -> Event:
        piece = {"type": "text_delta", "text": text} if kind == "text" else {"type": "thinking_delta", "thinking": text}
        return {"type": "content_block_delta", "index": index, "delta": piece}

    def _close(self, index: int, kind: BlockKind, text: str) -> Iterable[Event]:
        yield {"type": "content_block_stop", "index": index}

    def _call(self, index: int, call: Mapping[str, Any]) -> Iterable[Event]:
        arguments = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
        block = {**self._call_item(index, call), "input": {}}
        yield {"type": "content_block_start", "index": index, "content_block": block}
        yield {"type": "content_block_delta", "index": index, "delta": arguments}
        yield {"type": "content_block_stop", "index": index}

    def _end(self, chat: Mapping[str, Any]) -> Iterable[Event]:
        yield {
            "type": "message_delta",
            "delta": self._stop(chat),
            "usage": {"output_tokens": chat["usage"]["completion_tokens"]},
            **record_of(chat),
        }
        yield {"type": "message_stop"}

    def _item(self, index: int, kind: BlockKind, text: str) -> dict[str, Any]:
        if kind == "text":
            return {"type": "text", "text": text}
        return {"type": "thinking", "thinking": text, "signature": ""}

    def _call_item(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}

    def _complete(self, chat: Mapping[str, Any], items: list[dict[str, Any]]) -> dict[str, Any]:
        usage = chat["usage"]
        return self._message(items, self._stop(chat), usage["prompt_tokens"], usage["completion_tokens"])

    def _stop(self, chat: Mapping[str, Any]) -> dict[str, str | None]:
        reason, text = _STOP_REASONS[chat["choices"][0]["finish_reason"]], self._chat_response.stop_string
        if reason == "end_turn" and text is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": text}
        return {"stop_reason": reason, "stop_sequence": None}

    def _message(
        self, content: list[dict[str, Any]], stop: Mapping[str, str | None], input_tokens: int, output_tokens: int
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._chat_response.id}",
            "type": "message",
            "role": "assistant",
            "model": self._chat_response.model,
            "content": content,
            **stop,
            "usage": {"input_tokens": input_tokens, "output_tokens": output_tokens},
        }
