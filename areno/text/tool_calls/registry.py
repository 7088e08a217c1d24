"""Tool-call formats by name, and detection of a model's format from its chat template and added tokens."""

from typing import Any

from areno.errors import UsageError
from areno.text.tool_calls.deepseek import DEEPSEEK, DEEPSEEK_V31
from areno.text.tool_calls.gemma import FUNCTION_GEMMA, GEMMA
from areno.text.tool_calls.harmony import HARMONY
from areno.text.tool_calls.hermes import HERMES
from areno.text.tool_calls.json_calls import JSON, LLAMA3
from areno.text.tool_calls.kimi import KIMI
from areno.text.tool_calls.mistral import MISTRAL, MISTRAL_ARGS
from areno.text.tool_calls.parser import ToolCallParser
from areno.text.tool_calls.pythonic import PYTHONIC
from areno.text.tool_calls.qwen import MINICPM, QWEN, QWEN3_CODER
from areno.text.tool_calls.xml_calls import DEEPSEEK_V32, GLM, MINIMAX

_PARSERS: dict[str, ToolCallParser] = {
    parser.name: parser
    for parser in (
        *(
            HERMES,
            QWEN,
            QWEN3_CODER,
            JSON,
            LLAMA3,
            MISTRAL,
            MISTRAL_ARGS,
            GEMMA,
            FUNCTION_GEMMA,
            DEEPSEEK,
            DEEPSEEK_V31,
        ),
        *(DEEPSEEK_V32, KIMI, GLM, MINICPM, MINIMAX, PYTHONIC, HARMONY),
    )
}
_ALIASES = {
    **dict.fromkeys(("qwen25", "qwen3", "qwen3_moe"), "qwen"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_xml"), "qwen3_coder"),
    **dict.fromkeys(("llama", "llama3_json", "llama4_json"), "llama3"),
    **dict.fromkeys(("llama4", "llama4_pythonic"), "pythonic"),
    **dict.fromkeys(("deepseek_v3", "deepseekv3", "deepseek_r1"), "deepseek"),
    **dict.fromkeys(("glm4", "glm45", "glm47"), "glm"),
    **dict.fromkeys(("gpt_oss", "openai"), "harmony"),
    "minicpmv46": "minicpm",
    "gemma": "gemma4",
    "bailing_moe_linear_v2": "json",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "kimi_k2": "kimi",
    "minimax_m2": "minimax",
}

# Signs of a format in a chat template or among the added tokens, most specific first: a template that describes a format in
# words often contains signs of a more general format as well.
_SIGNS: tuple[tuple[str, str], ...] = (
    ("<|tool_call>", "gemma4"),
    ("<start_function_call>", "functiongemma"),
    ("<｜DSML｜", "deepseek_v32"),
    ("function<｜tool▁sep｜>", "deepseek"),
    ("'function' + '<｜tool▁sep｜>", "deepseek"),
    ("tool['type'] + '<｜tool▁sep｜>", "deepseek"),
    ("<｜tool▁call▁begin｜>", "deepseek_v31"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("<|channel|>", "harmony"),
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("<minimax:tool_call>", "minimax"),
    ("<arg_key>", "glm"),
    ("<function name=", "minicpm"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "qwen"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ("<|start_header_id|>", "llama3"),
)


def register_tool_call_parser(name: str, parser: ToolCallParser, replace: bool = False) -> None:
    """Register a tool-call parser under a name.

    Raises UsageError if the name is ``auto``, or if the name is taken and ``replace`` is False.
    """
    if name == "auto":
        raise UsageError(
            "the tool-call parser name 'auto' is reserved for the detection of the format; use another name"
        )
    if not replace and (name in _PARSERS or name in _ALIASES):
        raise UsageError(f"a tool-call parser {name!r} already exists; use another name, or pass replace=True")
    _PARSERS[name] = parser


def list_tool_call_parsers() -> list[str]:
    """Return the values of ``--tool-call-parser``, except ``auto``."""
    return sorted({*_PARSERS, *_ALIASES})


def parser_for(tokenizer: Any, name: str = "auto") -> ToolCallParser:
    """Return the tool-call parser ``name``.

    ``auto`` detects the format from the chat template and the added tokens. If no format is detected, the parser is
    ``json``. Raises UsageError if the name is unknown.
    """
    if name == "auto":
        return _PARSERS[_detect(tokenizer)]
    key = name if name in _PARSERS else name.replace("-", "_")
    key = key if key in _PARSERS else _ALIASES.get(key, key)
    if key not in _PARSERS:
        raise UsageError(
            f"--tool-call-parser {name} is unknown; use one of: auto, {', '.join(list_tool_call_parsers())}"
        )
    return _PARSERS[key]


def _detect(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, dict):  # with named templates, prefer the one for tools
        template = template.get("tool_use") or "\n".join(template.values())
    added = "\n".join(tokenizer.get_added_vocab())
    return next((name for text in (template, added) for sign, name in _SIGNS if sign in text), "json")
