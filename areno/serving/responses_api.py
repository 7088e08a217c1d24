"""Implements ``POST /v1/responses``, OpenAI's Responses API, on top of the chat endpoint. Responses are not stored."""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field

from areno.serving.chat_api import ChatResponse
from areno.serving.errors import bad_field
from areno.serving.protocol_adapter import BlockKind, Event, ProtocolAdapter, chat_request, objects, record_of
from areno.serving.request_builder import check_text
from areno.serving.schemas import ChatRequest, RequestBody


class ResponsesRequest(RequestBody):
    """Body of ``POST /v1/responses``. Undeclared fields are ignored."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None

    def chat(self) -> ChatRequest:
        """Convert to a chat request. Raises ApiError 400 if a field is invalid or unsupported."""
        if self.previous_response_id is not None:
            raise bad_field("previous_response_id", "responses are not stored; send the whole conversation as input")
        for name in ("text", "tools", "tool_choice"):  # the response repeats them
            check_text(json.dumps(getattr(self, name), ensure_ascii=False), name)
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        same = ("model", "parallel_tool_calls", "temperature", "top_p", "stream")
        return chat_request(
            {name: getattr(self, name) for name in same}
            | {
                "messages": self._messages(),
                "tools": [_tool(tool) for tool in self.tools or []] or None,
                "tool_choice": choice,
                "max_completion_tokens": self.max_output_tokens,
                "response_format": _format((self.text or {}).get("format")),
            }
        )

    def _messages(self) -> list[dict[str, Any]]:
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for index, item in enumerate(items):
            _append(messages, item, f"input[{index}]")
        return messages


def _append(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Append an input item. The items of one assistant turn become one message."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, str | list) else json.dumps(output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind == "message" and item.get("role") != "assistant":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind in ("message", "function_call", "reasoning"):
        # A turn is reasoning, then text, then calls; an item that is out of this order starts the next turn.
        if not (messages and messages[-1]["role"] == "assistant") or _rank(messages[-1]) > _RANKS[kind]:
            messages.append({"role": "assistant", "content": None})
        _extend(messages[-1], kind, item)
    else:
        raise bad_field("input", f"items of type {kind!r} are not supported; remove the item", where=where)


_RANKS = {"reasoning": 0, "message": 1, "function_call": 2}


def _rank(message: Mapping[str, Any]) -> int:
    if message.get("tool_calls"):
        return 2
    return 2 if message.get("content") is not None else 1 if message.get("reasoning_content") else 0


def _extend(message: dict[str, Any], kind: str, item: Mapping[str, Any]) -> None:
    if kind == "message":
        message["content"] = item.get("content")
    elif kind == "reasoning":
        parts = objects(item.get("content") or item.get("summary") or [], "input", "input")
        message["reasoning_content"] = "".join(str(part.get("text", "")) for part in parts)
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        message.setdefault("tool_calls", []).append(
            {"id": item.get("call_id"), "type": "function", "function": function}
        )


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_field("tools", f"tools of type {tool.get('type')!r} are not supported; send function tools")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _format(form: Any) -> dict[str, Any] | None:
    if form is not None and not isinstance(form, Mapping):
        raise bad_field("text", f"`format` is {form!r:.80}; send an object with the key `type`")
    if form is None or form.get("type") == "text":
        return None
    if form.get("type") != "json_schema":
        return {"type": form.get("type")}
    schema = {"name": form.get("name") or "answer", "schema": form.get("schema"), "strict": form.get("strict")}
    return {"type": "json_schema", "json_schema": schema}


class ResponsesResponse(ProtocolAdapter):
    """Builds the Responses API response to one request."""

    def __init__(self, chat_response: ChatResponse, body: ResponsesRequest) -> None:
        super().__init__(chat_response)
        self._body, self._number = body, -1
        self._output: list[dict[str, Any]] = []

    def _begin(self) -> Iterable[Event]:
        response = self._response("in_progress", [], None)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def _open(self, index: int, kind: BlockKind) -> Iterable[Event]:
        item = {**self._item(index, kind, ""), "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=index, item=item)
        if kind == "text":
            yield self._event("response.content_part.added", **self._ids(index), part=_part(""))

    def _piece(self, index: int, kind: BlockKind, text: str) -> Event:
        name = "response.output_text.delta" if kind == "text" else "response.reasoning_text.delta"
        extra: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
        return self._event(name, **self._ids(index), delta=text, **extra)

    def _close(self, index: int, kind: BlockKind, text: str) -> Iterable[Event]:
        if kind == "text":
            yield self._event("response.output_text.done", **self._ids(index), text=text, logprobs=[])
            yield self._event("response.content_part.done", **self._ids(index), part=_part(text))
        else:
            yield self._event("response.reasoning_text.done", **self._ids(index), text=text)
        yield self._done(index, self._item(index, kind, text))

    def _call(self, index: int, call: Mapping[str, Any]) -> Iterable[Event]:
        item = self._call_item(index, call)
        started = {**item, "arguments": "", "status": "in_progress"}
        ids = {"item_id": item["id"], "output_index": index}
        yield self._event("response.output_item.added", output_index=index, item=started)
        yield self._event("response.function_call_arguments.delta", **ids, delta=item["arguments"])
        call_fields = {"name": item["name"], "arguments": item["arguments"]}
        yield self._event("response.function_call_arguments.done", **ids, **call_fields)
        yield self._done(index, item)

    def _end(self, chat: Mapping[str, Any]) -> Iterable[Event]:
        response = self._complete(chat, self._output)
        yield self._event(f"response.{response['status']}", response=response | record_of(chat))

    def _item(self, index: int, kind: BlockKind, text: str) -> dict[str, Any]:
        item_id = {"id": self._item_id(index)}
        if kind == "text":
            return item_id | {"type": "message", "status": "completed", "role": "assistant", "content": [_part(text)]}
        return item_id | {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    def _call_item(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        head = {"id": self._item_id(index), "type": "function_call", "status": "completed", "call_id": call["id"]}
        return head | {name: call["function"][name] for name in ("name", "arguments")}

    def _complete(self, chat: Mapping[str, Any], items: list[dict[str, Any]]) -> dict[str, Any]:
        status = "incomplete" if chat["choices"][0]["finish_reason"] == "length" else "completed"
        return self._response(status, items, chat["usage"])

    def _done(self, index: int, item: dict[str, Any]) -> Event:
        self._output.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _item_id(self, index: int) -> str:
        return f"item_{index}_{self._chat_response.id}"

    def _ids(self, index: int) -> dict[str, Any]:
        return {"item_id": self._item_id(index), "output_index": index, "content_index": 0}

    def _response(self, status: str, output: list[dict[str, Any]], usage: Mapping[str, int] | None) -> dict[str, Any]:
        body = self._body
        return {
            "id": f"resp_{self._chat_response.id}",
            "object": "response",
            "created_at": self._chat_response.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **{name: getattr(body, name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")},
            "metadata": {},
            "model": self._chat_response.model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "usage": usage
            and {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
