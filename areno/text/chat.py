"""Converts prompts to token ids, with the tokenizer's chat template if there is one.

A text prompt becomes the content of one user message. If there are no tools, a text is used unchanged in two cases: the
tokenizer has no chat template, or the text already contains markers of a chat template. If the model uses a BOS token,
its chat template writes this token. If no template renders the prompt, and the tokenizer adds BOS by default, BOS is
prepended where it is missing.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.errors import UsageError, first_line
from areno.text.hub import check_reachable
from areno.text.messages import has_python_arguments, template_messages, template_tools, with_tools_as_text

CHAT_MARKERS = ("<|im_start|>", "<start_of_turn>", "<turn|>", "<|user|>", "<|assistant|>")

# Arguments of `apply_chat_template` that users may not pass.
_RESERVED_VARIABLES = frozenset(
    {"messages", "conversation", "tools", "chat_template", "tokenize", "add_generation_prompt"}
    | {"continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask"}
    | {"padding", "truncation", "max_length", "tokenizer_kwargs", "self"}
)

Prompt = str | Sequence[Mapping[str, Any]]


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Load a tokenizer from a checkpoint folder or a hub id. Raises UsageError if the tokenizer cannot be loaded."""
    from transformers import AutoTokenizer

    location = os.path.expanduser(path)
    if path.startswith((".", "/", "~")) and not Path(location).is_dir():
        raise UsageError(f"tokenizer: the folder {path} does not exist; use an existing checkpoint folder or a hub id")
    check_reachable(location)
    try:
        return AutoTokenizer.from_pretrained(location, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many types
        raise UsageError(
            f"cannot load a tokenizer from {path}: {first_line(error)}\n"
            "Check that the folder contains tokenizer.json and tokenizer_config.json, or that the hub id is correct and "
            "the network is reachable; a tokenizer with custom code requires --trust-remote-code."
        ) from error


def is_chat_formatted(text: str) -> bool:
    """Return whether a text contains at least one of :data:`CHAT_MARKERS`."""
    return any(marker in text for marker in CHAT_MARKERS)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as text. If ``templated`` is True, a chat template rendered the text, and wrote BOS if the model uses BOS."""

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
    """Render a prompt with the chat template.

    Args:
        prompt: text, or a list of ``{"role", "content"}`` messages in OpenAI's format, including content parts,
            ``tool_calls`` and messages of the role ``tool``.
        disable_thinking: whether to pass the variable ``enable_thinking=False`` to the template. Some templates ignore
            this variable.
        tools: available tools in OpenAI's format. If the template does not support tools, the system message describes
            the tools.
        chat_template_kwargs: additional template variables, which override ``disable_thinking``.
        add_generation_prompt: whether to open the assistant's turn at the end of the prompt.

    Raises:
        UsageError: a message, call or tool is malformed; content is not text; a variable is reserved; or the template
            rejects the messages, for example because roles do not alternate.
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
        template_arguments = wrapped if "tools" in template else []
        try:
            text = _apply_template(tokenizer, messages, template_arguments, variables, add_generation_prompt)
        except TypeError as error:  # because the template concatenates the arguments of a call with text
            if as_text or not any("tool_calls" in message for message in messages):
                raise _template_error(messages, error) from error
            continue
        if as_text or not has_python_arguments(text, messages):
            break
    return RenderedPrompt(text, templated=True)


def encode_rendered(tokenizer: Any, prompts: Sequence[RenderedPrompt]) -> list[list[int]]:
    """Encode each prompt to token ids.

    Prompts that a chat template rendered already contain BOS if the model uses BOS. Any other prompt gets a BOS if the
    tokenizer adds BOS by default, and the prompt does not begin with BOS yet.
    """
    if not prompts:
        return []
    bos = _automatic_bos(tokenizer)
    encoded = tokenizer([prompt.text for prompt in prompts], add_special_tokens=False)["input_ids"]
    return [
        ids if prompt.templated or ids[: len(bos)] == bos else bos + ids
        for prompt, ids in zip(prompts, encoded, strict=True)
    ]


def encode_generation_prompt(tokenizer: Any, prompt: Prompt, disable_thinking: bool = False) -> list[int]:
    """Render and encode one prompt. The arguments and errors are those of :func:`render_generation_prompt`."""
    return encode_rendered(tokenizer, [render_generation_prompt(tokenizer, prompt, disable_thinking)])[0]


def eos_token_ids(tokenizer: Any, model_path_or_config: Any) -> frozenset[int]:
    """Return all ids that end a response: the EOS ids of the tokenizer, and those of a checkpoint or model configuration."""
    eos_ids = _ids(tokenizer.eos_token_id)
    if isinstance(model_path_or_config, (str, Path)):
        for name in ("config.json", "generation_config.json"):
            eos_ids |= _ids_of_config(_read_json(str(model_path_or_config), name))
    else:
        eos_ids |= _ids_of_config(model_path_or_config.to_dict())
    return frozenset(eos_ids)


def _variables(disable_thinking: bool, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    reserved = sorted(set(kwargs or {}) & _RESERVED_VARIABLES)
    if reserved:
        raise UsageError(f"chat_template_kwargs: {', '.join(reserved)} is reserved; remove the key")
    return {**({"enable_thinking": False} if disable_thinking else {}), **(kwargs or {})}


def template_source(tokenizer: Any) -> str:
    """Return the source of all chat templates of a tokenizer; empty if there are no chat templates."""
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
            # A custom `apply_chat_template` may not accept the variable.
            if set(variables) != {"enable_thinking"}:
                raise
            return tokenizer.apply_chat_template(messages, **options)
    except TypeError:
        raise
    except Exception as error:  # templates are user code, with arbitrary variables
        raise _template_error(messages, error) from error


def _template_error(messages: Sequence[Mapping[str, Any]], error: Exception) -> UsageError:
    roles = ", ".join(str(message.get("role")) for message in messages[:20])
    return UsageError(
        f"the tokenizer's chat template rejects messages with the roles {roles}: {error}; "
        "change the messages (for example in a dataset loader), the template variables or the template"
    )


def _automatic_bos(tokenizer: Any) -> list[int]:
    # Try the tokenizer: some have a BOS token but never add it, and some also add an EOS token.
    first = tokenizer("")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def _read_json(model_path: str, name: str) -> dict[str, Any]:
    from transformers.utils import cached_file

    path = cached_file(
        model_path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return {}
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(
            f"{path} is not valid JSON, so the checkpoint is damaged ({error}); download the file again"
        ) from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} is not a JSON object, so the checkpoint is damaged; download the file again")
    return config


def _ids_of_config(config: Mapping[str, Any]) -> set[int]:
    nested = config.get("text_config")
    return _ids(config.get("eos_token_id")) | (_ids_of_config(nested) if isinstance(nested, Mapping) else set())


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    ids = [value] if isinstance(value, int) else value
    if not (isinstance(ids, list) and all(isinstance(token, int) for token in ids)):
        raise UsageError(
            f"eos_token_id is {value!r}, but must be a token id or a list of token ids; correct eos_token_id in config.json "
            "and generation_config.json of the model"
        )
    return set(ids)
