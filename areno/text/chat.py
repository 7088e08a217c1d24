"""Prompts to token ids: chat templates where the tokenizer has one, plain text where it has not.

A text prompt becomes one user turn, unless it already carries chat markers. Exactly one BOS token comes out: templates
write their own, plain text gets the tokenizer's, and a text that starts with it is left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.errors import UsageError

CHAT_MARKERS = ("<|im_start|>", "<start_of_turn>", "<turn|>", "<|user|>", "<|assistant|>")

Prompt = str | Sequence[Mapping[str, Any]]


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Load a ``transformers`` tokenizer from a checkpoint folder or a hub id.

    Raises:
        UsageError: there is no tokenizer at ``path``, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        raise UsageError(f"tokenizer: {path} is not a folder; give a checkpoint folder that exists or a hub id")
    location = str(Path(path).expanduser()) if path.startswith("~") else path
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


def render_generation_prompt(tokenizer: Any, prompt: Prompt, disable_thinking: bool = False) -> RenderedPrompt:
    """Bring a prompt into the form that the model was trained to answer.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        prompt: a text, or a list of ``{"role", "content"}`` messages.
        disable_thinking: pass ``enable_thinking=False`` to templates that take it.

    Raises:
        UsageError: the template refuses the messages, for example because roles do not alternate.
    """
    if isinstance(prompt, str):
        if not tokenizer.chat_template or is_chat_formatted(prompt):
            return RenderedPrompt(prompt, templated=False)
        prompt = [{"role": "user", "content": prompt}]
    if not tokenizer.chat_template:
        lines = [f"{message['role']}: {message['content']}\n" for message in prompt]
        return RenderedPrompt("".join(lines) + "assistant:", templated=False)
    return RenderedPrompt(_apply_template(tokenizer, [dict(m) for m in prompt], disable_thinking), templated=True)


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
    """Every id that ends a response: the tokenizer's EOS and those of the model's configuration files.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        model_path_or_config: checkpoint folder, hub id, or a loaded ``transformers`` configuration.
    """
    found = _ids(tokenizer.eos_token_id)
    if isinstance(model_path_or_config, (str, Path)):
        for name in ("config.json", "generation_config.json"):
            found |= _ids_of_config(_read_json(str(model_path_or_config), name))
    else:
        found |= _ids_of_config(model_path_or_config.to_dict())
    return frozenset(found)


def _apply_template(tokenizer: Any, messages: list[dict[str, Any]], disable_thinking: bool) -> str:
    from jinja2 import TemplateError

    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    try:
        if disable_thinking:
            try:
                return tokenizer.apply_chat_template(messages, enable_thinking=False, **options)
            except TypeError:
                # A tokenizer with an `apply_chat_template` of its own may not know the switch.
                return tokenizer.apply_chat_template(messages, **options)
        return tokenizer.apply_chat_template(messages, **options)
    except TemplateError as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise UsageError(
            f"the tokenizer's chat template refuses messages with the roles {roles}: {error}; "
            "change the messages (a dataset loader can do it) or the template"
        ) from error


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
