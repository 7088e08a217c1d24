"""Messages as OpenAI clients send them, in the form that chat templates read.

Clients split content into parts, write arguments as JSON text and know the role ``developer``; templates differ in what
they take, and some have no place for tools or calls at all. What a template has no place for becomes text here: nothing
that a client sends is left out silently.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from areno.errors import UsageError
from areno.text.tool_calls.base import function_of

_TEXT_PARTS = ("text", "input_text", "output_text")


def template_messages(
    messages: Sequence[Mapping[str, Any]], template: str, arguments_as_text: bool = False
) -> list[dict[str, Any]]:
    """Bring messages into the form of a chat template.

    What the source ``template`` does not mention it cannot render. Most want the arguments of calls as objects, a few as JSON
    text. Raises UsageError: a message has content that is not text, or calls that are not in OpenAI's form.
    """
    made = [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    for message in made:
        if message["role"] == "developer" and "developer" not in template:
            message["role"] = "system"
        calls = message.get("tool_calls", [])
        if calls and "tool_calls" not in template:
            functions = [call["function"] for call in message.pop("tool_calls")]
            written = [_as_text({name: function[name] for name in ("name", "arguments")}) for function in functions]
            message["content"] = "\n".join([message["content"], *written]).lstrip()
        elif arguments_as_text:
            for call in calls:
                call["function"]["arguments"] = _as_text(call["function"]["arguments"])
    return made


def shows_objects(rendered: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a template wrote the arguments of a call as Python shows objects; it wants them as text."""
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    shown = [call["function"]["arguments"] for call in calls]
    return any(isinstance(one, dict) and str(one) != _as_text(one) and str(one) in rendered for one in shown)


def template_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools in OpenAI's form, flat ones (``{"name", "parameters"}``) wrapped. Raises UsageError: one is not a function."""
    return [
        {"type": "function", "function": dict(function_of(tool, f"tools[{place}]"))} for place, tool in enumerate(tools)
    ]


def with_tools_as_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Describe the tools in the system message, for models whose template has no place for them."""
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
        raise UsageError(f'{where}: {message!r} is no message; give {{"role": ..., "content": ...}}')
    made = dict(message)
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        made["content"] = "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif content is None:
        made["content"] = ""
    calls = made.pop("tool_calls", None)
    if calls:
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return made


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise UsageError(f'{where}: parts of type {kind!r} cannot be read, only {{"type": "text", "text": ...}} can')
    return part["text"]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(
            f'{where}: {call!r} is no call; give {{"id": ..., "type": "function", "function": '
            '{"name": ..., "arguments": ...}}'
        )
    made = {"type": "function", "function": {**function, "arguments": _arguments(function.get("arguments"))}}
    return {**made, "id": call["id"]} if call.get("id") else made


def _arguments(value: Any) -> Any:
    """An object where it is one; text that is no JSON object stays as the model wrote it."""
    if not isinstance(value, str):
        return value or {}
    try:
        parsed = json.loads(value) if value.strip() else {}
    except ValueError:
        return value
    return parsed if isinstance(parsed, dict) else value


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
