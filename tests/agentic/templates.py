"""Chat templates in the formats of real model families, written for these tests, with tokenizers that know their markers.

Each renders calls in its own format, so that an answer in that format is rendered exactly as it was generated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\nCall with <tool_call>.<|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{%- elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{%- endif %}{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
# Keeps reasoning while tools are called, and drops it at the next question.
THINKING = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + CHATML.replace(
        "<|im_start|>assistant\n{{ m.content }}",
        "<|im_start|>assistant\n{% if loop.index0 > ns.last and m.reasoning_content %}<think>\n{{ m.reasoning_content }}"
        "\n</think>\n\n{% endif %}{{ m.content }}",
        1,
    )
)
LLAMA3 = (
    "<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nFunctions:"
    "{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|eot_id|>{% endif %}"
    "{%- for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{%- elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{%- for m in messages %}{% if m.role in ('user', 'system') %}[INST] {{ m.content }}[/INST]"
    "{%- elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{%- elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}]</s>'
    "{%- else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# No tools or system role; turns are trimmed.
GEMMA = (
    "<bos>{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# The prompt opens the reasoning, and the history never contains any.
DEEPSEEK = (
    "<s>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
# No end-of-turn token: the model ends with the marker of the next role.
GLM = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def _json_call(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {json.dumps(arguments)}}}'


def _hermes(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return "\n".join(f"<tool_call>\n{_json_call(*call)}\n</tool_call>" for call in calls)


@dataclass(frozen=True)
class Format:
    """A family's template, its markers, and how the model writes answers in it.

    Attributes:
        ends: tokens that end an answer, by what follows it.
        calls: renders calls; None if the template does not support them.
        thinks: format of the reasoning, with the markers that the model generates itself.
        drops_thinking_at: kinds of next message at which the template drops the reasoning.
        opens_thinking: the prompt opens the reasoning, and the history has none.
    """

    template: str
    markers: list[str]
    eos: str
    ends: dict[str, str] = field(default_factory=dict)
    calls: Callable[[list[tuple[str, dict[str, Any]]]], str] | None = None
    most_calls: int = 2
    thinks: str = ""
    drops_thinking_at: tuple[str, ...] = ()
    opens_thinking: bool = False
    metaspace: bool = False

    def end(self, step: str | None) -> str:
        """The end token of an answer that ``step`` follows."""
        return self.ends.get(step or "user", self.eos)


_CHATML_MARKERS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
FORMATS = {
    "chatml": Format(CHATML, _CHATML_MARKERS, "<|im_end|>", calls=_hermes),
    "thinking": Format(
        THINKING,
        [*_CHATML_MARKERS, "<think>", "</think>"],
        "<|im_end|>",
        calls=_hermes,
        thinks="<think>\n{}\n</think>\n\n",
        drops_thinking_at=("user",),
    ),
    "llama3": Format(
        LLAMA3,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
        "<|eot_id|>",
        calls=lambda calls: _json_call(*calls[0], key="parameters"),
        most_calls=1,
    ),
    "mistral": Format(
        MISTRAL,
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"],
        "</s>",
        calls=lambda calls: "[TOOL_CALLS] [" + ", ".join(_json_call(*call) for call in calls) + "]",
    ),
    "gemma": Format(GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<end_of_turn>", metaspace=True),
    "deepseek": Format(
        DEEPSEEK,
        ["<s>", "<｜User｜>", "<｜Assistant｜>", "<｜end｜>", "<think>", "</think>"],
        "<｜end｜>",
        thinks="{}\n</think>\n\n",
        opens_thinking=True,
    ),
    "glm": Format(
        GLM,
        ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        "<|user|>",
        ends={"user": "<|user|>", "tool": "<|observation|>"},
    ),
}

_CORPUS = [
    "What is the weather in Paris and Rome today? It is sunny; 21 degrees. " * 3,
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}',
    "Let me think about it. I look it up, step by step.\n\n",
    "naïve café 你好 🙂 ".strip(),
]


def tokenizer_of(form: Format) -> Any:
    """A tokenizer of the family's kind: byte-level, or SentencePiece-like with a space before words."""
    markers = ["<pad>", "<unk>", *form.markers]
    if form.metaspace:
        raw = Tokenizer(models.BPE(unk_token="<unk>"))
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        raw.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = sorted(
            {char for text in _CORPUS for char in text} | set("abcdefghijklmnopqrstuvwxyz.?!0123456789\n▁")
        )
    else:
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=markers, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(_CORPUS, trainer)
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token=form.eos)
    tokenizer.chat_template = form.template
    return tokenizer
