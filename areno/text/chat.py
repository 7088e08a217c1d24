"""Prompts to token ids: chat templates where the tokenizer has one, plain text where it has not.

A text prompt becomes one user turn, unless it already carries chat markers. Exactly one BOS token comes out: templates
write their own, plain text gets the tokenizer's, and a text that starts with it is left alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.errors import UsageError
from areno.text.hub import check_reachable
from areno.text.messages import shows_objects, template_messages, template_tools, with_tools_as_text

CHAT_MARKERS = ("<|im_start|>", "<start_of_turn>", "<turn|>", "<|user|>", "<|assistant|>")

# Arguments of `apply_chat_template`, and what the rendered prompt depends on.
_OWN_VARIABLES = frozenset(
    {"messages", "conversation", "tools", "chat_template", "tokenize", "add_generation_prompt"}
    | {"continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask"}
    | {"padding", "truncation", "max_length", "tokenizer_kwargs", "self"}
)

Prompt = str | Sequence[Mapping[str, Any]]


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Load a tokenizer from a checkpoint folder or a hub id. Raises UsageError: there is none, or it cannot be loaded."""
    from transformers import AutoTokenizer

    if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        raise UsageError(f"tokenizer: {path} is not a folder; give a checkpoint folder that exists or a hub id")
    location = str(Path(path).expanduser()) if path.startswith("~") else path
    check_reachable(location)
    try:
        return AutoTokenizer.from_pretrained(location, trust_remote_code=trust_remote_code)
    except Exception as error:  # a folder's content or the hub may fail in any way; the cause stays attached
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"no tokenizer could be loaded from {path}: {reason}\n"
            "Check that the folder holds tokenizer.json and tokenizer_config.json, or that the hub id is right and the "
            "network is reachable; a tokenizer with code of its own needs --trust-remote-code."
        ) from error


def is_chat_formatted(text: str) -> bool:
    """Whether a text already carries the markers of a chat template."""
    return any(marker in text for marker in CHAT_MARKERS)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The text that a model is asked to continue; ``templated`` says that a chat template wrote it, BOS included."""

    text: str
    templated: bool


def render_generation_prompt(
    tokenizer: Any,
    prompt: Prompt,
    disable_thinking: bool = False,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> RenderedPrompt:
    """Bring a prompt into the form that the model was trained to answer.

    Args:
        prompt: a text, or a list of ``{"role", "content"}`` messages as OpenAI clients send them: content in text parts,
            ``tool_calls`` of the assistant and answers of the role ``tool`` included.
        disable_thinking: pass ``enable_thinking=False`` to templates that take it.
        tools: what the model may call, in OpenAI's form; a template without a place for tools gets them as text in the
            system message.
        chat_template_kwargs: further variables of the template; they win over ``disable_thinking``.
        add_generation_prompt: open the assistant's turn at the end; without it the text ends where the last message does.

    Raises:
        UsageError: the template refuses the messages, for example because roles do not alternate; or a message holds
            something other than text; or a variable is one that areno sets itself.
    """
    if isinstance(prompt, str):
        if not tools and (not tokenizer.chat_template or is_chat_formatted(prompt)):
            return RenderedPrompt(prompt, templated=False)
        prompt = [{"role": "user", "content": prompt}]
    variables = _variables(disable_thinking, chat_template_kwargs)
    template = template_source(tokenizer)
    wrapped = template_tools(tools or [])
    for as_text in (False, True):
        messages = template_messages(prompt, template, arguments_as_text=as_text)
        if wrapped and "tools" not in template:
            messages = with_tools_as_text(messages, wrapped)
        if not template:
            lines = [f"{message['role']}: {message['content']}\n" for message in messages]
            return RenderedPrompt("".join(lines) + ("assistant:" if add_generation_prompt else ""), templated=False)
        shown = wrapped if "tools" in template else []
        try:
            text = _apply_template(tokenizer, messages, shown, variables, add_generation_prompt)
        except TypeError as error:  # it adds text to the arguments of a call
            if as_text or not any("tool_calls" in message for message in messages):
                raise _template_error(messages, error) from error
            continue
        if as_text or not shows_objects(text, messages):
            break
    return RenderedPrompt(text, templated=True)


def encode_rendered(tokenizer: Any, prompts: Sequence[RenderedPrompt]) -> list[list[int]]:
    """Token ids per prompt, with exactly one BOS where the tokenizer uses one; one call for many prompts is fastest."""
    if not prompts:
        return []
    bos = _automatic_bos(tokenizer)
    encoded = tokenizer([prompt.text for prompt in prompts], add_special_tokens=False)["input_ids"]
    return [
        ids if prompt.templated or ids[: len(bos)] == bos else bos + ids
        for prompt, ids in zip(prompts, encoded, strict=True)
    ]


def encode_generation_prompt(tokenizer: Any, prompt: Prompt, disable_thinking: bool = False) -> list[int]:
    """Token ids of one prompt, ready for generation; arguments and errors as in :func:`render_generation_prompt`."""
    return encode_rendered(tokenizer, [render_generation_prompt(tokenizer, prompt, disable_thinking)])[0]


def eos_token_ids(tokenizer: Any, model_path_or_config: Any) -> frozenset[int]:
    """Every id that ends a response: the tokenizer's EOS and those of a checkpoint's configuration, or a loaded one."""
    found = _ids(tokenizer.eos_token_id)
    if isinstance(model_path_or_config, (str, Path)):
        for name in ("config.json", "generation_config.json"):
            found |= _ids_of_config(_read_json(str(model_path_or_config), name))
    else:
        found |= _ids_of_config(model_path_or_config.to_dict())
    return frozenset(found)


def _variables(disable_thinking: bool, given: Mapping[str, Any] | None) -> dict[str, Any]:
    taken = sorted(set(given or {}) & _OWN_VARIABLES)
    if taken:
        raise UsageError(
            f"chat_template_kwargs: {', '.join(taken)} cannot be given, areno sets it itself; leave it out"
        )
    return {**({"enable_thinking": False} if disable_thinking else {}), **(given or {})}


def template_source(tokenizer: Any) -> str:
    """All chat templates of a tokenizer; empty without any."""
    template = tokenizer.chat_template or ""
    return "\n".join(template.values()) if isinstance(template, Mapping) else template


def _apply_template(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    variables: dict[str, Any],
    add_generation_prompt: bool,
) -> str:
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    options |= {"tools": tools} if tools else {}
    try:
        try:
            return tokenizer.apply_chat_template(messages, **variables, **options)
        except TypeError:
            # A tokenizer with an `apply_chat_template` of its own may not know the switch.
            if set(variables) != {"enable_thinking"}:
                raise
            return tokenizer.apply_chat_template(messages, **options)
    except TypeError:
        raise
    except Exception as error:  # a template is somebody else's code, and its variables may be anything
        raise _template_error(messages, error) from error


def _template_error(messages: Sequence[Mapping[str, Any]], error: Exception) -> UsageError:
    roles = ", ".join(str(message.get("role")) for message in messages[:20])
    return UsageError(
        f"the tokenizer's chat template refuses messages with the roles {roles}: {error}; "
        "change the messages (a dataset loader can do it), the template's variables or the template"
    )


def _automatic_bos(tokenizer: Any) -> list[int]:
    # Asked of the tokenizer itself: some have a BOS token that they never add, and some add an EOS token as well.
    first = tokenizer("")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def _read_json(model_path: str, name: str) -> dict[str, Any]:
    from transformers.utils import cached_file

    found = cached_file(
        model_path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is None:
        return {}
    try:
        return json.loads(Path(found).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{found} is not valid JSON: {error}; the checkpoint is damaged, fetch it again") from error


def _ids_of_config(config: Mapping[str, Any]) -> set[int]:
    nested = config.get("text_config")
    return _ids(config.get("eos_token_id")) | (_ids_of_config(nested) if isinstance(nested, Mapping) else set())


def _ids(value: int | Sequence[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)
