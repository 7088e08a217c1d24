"""Detects prompts that already contain chat template markers, which the template would add again."""

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
    """A chat template marker in a prompt. None without markers, or if no chat template will be applied.

    Markers are the tokenizer's special tokens, the turn markers of published templates, and ``<think>`` at the end of a
    prompt. Text that looks like a rendered conversation is not searched, because no template is applied to such text.
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
    """Warn if a prompt contains markers, or if the tokenizer has no template. There is one warning per tokenizer."""
    if tokenizer in _warned:
        return
    if not getattr(tokenizer, "chat_template", None):
        _warned.add(tokenizer)
        form = "used verbatim" if isinstance(prompt, str) else 'written as lines of "role: content"'
        logger.warning(
            "the tokenizer has no chat template: prompts are %s, which suits a base model; a chat model needs the "
            "chat_template in tokenizer_config.json or chat_template.jinja of the checkpoint folder",
            form,
        )
        return
    marker = marker_in(tokenizer, prompt)
    if marker is not None:
        _warned.add(tokenizer)
        logger.warning(
            "%s: the prompt contains the chat template marker %r, and the model's chat template is applied as well; strip "
            "such markers in --dataset-loader-fn (areno train) or train_dataset.dataset_kwargs.loader (areno run), or use "
            "messages with role and content as prompts",
            *(where, marker),
        )
