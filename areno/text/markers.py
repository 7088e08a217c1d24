"""Prompts that bring the markers of a chat template along, and would get them a second time."""

import logging
import re
from typing import Any
from weakref import WeakSet

from areno.text.chat import Prompt, is_chat_formatted

logger = logging.getLogger(__name__)

# Turns as published templates write them, also where the tokenizer at hand belongs to another one.
_TURNS = re.compile(
    r"<[|｜](?:im_start|im_end|im_sep|user|assistant|system|end|eot_id|start_header_id|end_header_id|start_of_role|"
    r"begin[_▁]of[_▁](?:text|sentence)|end[_▁]of[_▁]sentence)[|｜]>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>",
    re.IGNORECASE,
)
# Opens the assistant's reasoning where a prompt ends with it; inside a prompt it is most often part of an instruction.
_REASONING = re.compile(r"<think>\s*$")
_told: WeakSet[Any] = WeakSet()  # tokenizers of runs that have been warned


def marker_in(tokenizer: Any, prompt: Prompt) -> str | None:
    """The first marker of a chat template in a prompt that the tokenizer's template is applied to; None without any.

    Markers are the tokenizer's special tokens, the turns of published templates, and ``<think>`` at the end. A text that is
    recognized as a rendered conversation gets no template.
    """
    if not getattr(tokenizer, "chat_template", None) or (isinstance(prompt, str) and is_chat_formatted(prompt)):
        return None
    contents = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    for text in (content for content in contents if isinstance(content, str)):
        special = [token for token in getattr(tokenizer, "all_special_tokens", ()) if len(token) > 2 and token in text]
        found = _TURNS.search(text) or _REASONING.search(text)
        if special or found:
            return special[0] if found is None else found[0].strip()
    return None


def warn_of_markers(tokenizer: Any, prompt: Prompt, where: str) -> None:
    """Say once for each tokenizer, which is once per run, that a prompt has markers of its own, or gets no template at all."""
    if tokenizer in _told:
        return
    if not getattr(tokenizer, "chat_template", None):
        _told.add(tokenizer)
        form = "used as they are" if isinstance(prompt, str) else 'written as lines of "role: content"'
        logger.warning(
            "the tokenizer has no chat template: prompts are %s, which suits a base model; a chat model needs the "
            "chat_template of its tokenizer_config.json or chat_template.jinja in the checkpoint folder",
            form,
        )
        return
    marker = marker_in(tokenizer, prompt)
    if marker is not None:
        _told.add(tokenizer)
        logger.warning(
            "%s: the prompt holds %r, which chat templates write, and the model's own template is applied to it as well; "
            "strip such markers from all prompts, in the function of --dataset-loader-fn (areno train) or of "
            "train_dataset.dataset_kwargs.loader (areno run), or give messages with a role and a content",
            *(where, marker),
        )
