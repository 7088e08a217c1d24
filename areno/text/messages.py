"""Convert messages of OpenAI clients to the form that chat templates expect.

Clients may split content into parts, encode arguments as JSON text, and use the role ``developer``. Chat templates
differ in the features that they support. Tools or calls that a template does not support are converted to text. Content
that is not text is an error, so that no content is silently dropped.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from areno.errors import UsageError
from areno.text.tool_calls.parser import function_of

_TEXT_PARTS = ("text", "input_text", "output_text")


def template_messages(
    messages: Sequence[Mapping[str, Any]], template: str, arguments_as_text: bool = False
) -> list[dict[str, Any]]:
    """Convert messages for a chat template.

    ``template`` is the source of the chat template. If it does not contain the word ``developer``, messages with this role
    get the role ``system``. If it does not contain ``tool_calls``, tool calls are written into the text of their message.
    Most templates expect the arguments of a call as an object. Set ``arguments_as_text`` for a template that expects JSON text.

    Raises UsageError if a message or call is not in OpenAI's format, or if content is not text.
    """
    converted = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    for message in converted:
        if message["role"] == "developer" and "developer" not in template:
            message["role"] = "system"
        calls = message.get("tool_calls", [])
        if calls and "tool_calls" not in template:
            functions = [call["function"] for call in message.pop("tool_calls")]
            lines = [_as_text({name: function[name] for name in ("name", "arguments")}) for function in functions]
            message["content"] = "\n".join([message["content"], *lines]).lstrip()
        elif arguments_as_text:
            for call in calls:
                call["function"]["arguments"] = _as_text(call["function"]["arguments"])
    return converted


def has_python_arguments(rendered: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a rendered prompt shows the arguments of a tool call as a Python dict.

    This happens if the template expects the arguments as JSON text, but was given a dict. The template then inserts the
    Python form of the dict, such as ``{'city': 'Rome'}``.
    """
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    arguments = [call["function"]["arguments"] for call in calls]
    return any(isinstance(one, dict) and str(one) != _as_text(one) and str(one) in rendered for one in arguments)


def template_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert tools to OpenAI's format. Tools may also be flat: ``{"name", "parameters"}``.

    Raises UsageError if a tool is not a function.
    """
    return [
        {"type": "function", "function": dict(function_of(tool, f"tools[{index}]"))} for index, tool in enumerate(tools)
    ]


def with_tools_as_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Describe the tools in the system message, for a template that does not support tools."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = (
        "You can call these tools, each described by one line of JSON:\n"
        + "\n".join(lines)
        + '\nTo call one, answer with {"name": <its name>, "arguments": <an object>} and nothing else.'
    )
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{text}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError(f'{where}: {message!r} is not a message; use {{"role": ..., "content": ...}}')
    converted = dict(message)
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        converted["content"] = "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif content is None:
        converted["content"] = ""
    elif not isinstance(content, str):
        raise UsageError(
            f'{where}.content: {content!r:.80} is neither text nor a list of {{"type": "text", "text": ...}}'
        )
    calls = converted.pop("tool_calls", None)
    if calls:
        converted["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return converted


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise UsageError(f'{where}: parts of type {kind!r} are not supported; use {{"type": "text", "text": ...}}')
    return part["text"]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(
            f'{where}: {call!r} is not a tool call; use {{"id": ..., "type": "function", "function": '
            '{"name": ..., "arguments": ...}}'
        )
    converted = {"type": "function", "function": {**function, "arguments": _arguments(function.get("arguments"))}}
    return {**converted, "id": call["id"]} if call.get("id") else converted


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return value or {}
    try:
        parsed = json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
