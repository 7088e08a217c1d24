"""Detect prompts that already contain chat template markers, which the chat template would write again."""

import logging
import re
from typing import Any
from weakref import WeakSet

from areno.text.chat import Prompt, is_chat_formatted

logger = logging.getLogger(__name__)

# Turn markers of published templates, including those of other models.
_TURNS = re.compile(
    r"<[|｜](?:im_start|im_end|im_sep|user|assistant|system|end|eot_id|start_header_id|end_header_id|start_of_role|"
    r"begin[_▁]of[_▁](?:text|sentence)|end[_▁]of[_▁]sentence)[|｜]>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>",
    re.IGNORECASE,
)
# At the end of a prompt this marker opens the reasoning; elsewhere it is usually part of an instruction.
_REASONING = re.compile(r"<think>\s*$")
_warned: WeakSet[Any] = WeakSet()  # tokenizers for which a warning was logged


def marker_in(tokenizer: Any, prompt: Prompt) -> str | None:
    """Return a chat template marker that a prompt contains; None if there is no marker.

    Markers are the tokenizer's special tokens, the turn markers of published templates, and ``<think>`` at the end of a
    prompt. Also returns None if areno does not apply a chat template to the prompt, because the tokenizer has no chat
    template, or because the prompt is text that looks like a rendered conversation.
    """
    if not getattr(tokenizer, "chat_template", None) or (isinstance(prompt, str) and is_chat_formatted(prompt)):
        return None
    contents = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    for text in (content for content in contents if isinstance(content, str)):
        special = [token for token in getattr(tokenizer, "all_special_tokens", ()) if len(token) > 2 and token in text]
        match = _TURNS.search(text) or _REASONING.search(text)
        if special or match:
            return special[0] if match is None else match[0].strip()
    return None


def warn_about_markers(tokenizer: Any, prompt: Prompt, where: str) -> None:
    """Warn if a prompt contains chat template markers, or if the tokenizer has no chat template.

    There is at most one warning per tokenizer.
    """
    if tokenizer in _warned:
        return
    if not getattr(tokenizer, "chat_template", None):
        _warned.add(tokenizer)
        form = "used verbatim" if isinstance(prompt, str) else 'written as lines of "role: content"'
        logger.warning(
            "the tokenizer has no chat template, so prompts are %s; this is correct for a base model, but a chat model needs "
            "a template in the checkpoint folder: chat_template in tokenizer_config.json, or the file chat_template.jinja",
            form,
        )
        return
    marker = marker_in(tokenizer, prompt)
    if marker is not None:
        _warned.add(tokenizer)
        logger.warning(
            "%s: the prompt contains the chat template marker %r, and the model's chat template adds its own markers; use a "
            "dataset loader that removes the markers (areno train: --dataset-loader-fn, areno run: "
            "train_dataset.dataset_kwargs.loader), or write each prompt as a list of messages (role and content)",
            *(where, marker),
        )
