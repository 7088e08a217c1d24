"""DeepSeek's tool-call formats.

V3 writes the word ``function``, a separator, the tool's name, and the arguments in a code fence. V3.1 writes the tool's name, a
separator, and the arguments as a JSON object.
"""

from areno.text.tool_calls.block_scanner import headed_json
from areno.text.tool_calls.parser import CallShape, ToolCallParser

_BEGIN, _END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK = headed_json(
    _BEGIN,
    (_END, f"```{_END}", f"```\n{_END}"),
    rf"\s*function{_SEP}([^\s{{<]+)\s*+(?:```json)?\s*|\s*([^\s{{<]+){_SEP}\s*",
)
_V3_SHAPE = CallShape(
    before=f"{_BEGIN}function{_SEP}{{bare_name}}\n```json\n",
    after=f"\n```{_END}",
    begin=_ALL_BEGIN,
    separator="\n",
    end=_ALL_END,
)
_V31_SHAPE = CallShape(before=f"{_BEGIN}{{bare_name}}{_SEP}", after=_END, begin=_ALL_BEGIN, end=_ALL_END)
DEEPSEEK = ToolCallParser("deepseek", (_DEEPSEEK,), wrappers=(_ALL_BEGIN, _ALL_END), shape=_V3_SHAPE)
DEEPSEEK_V31 = ToolCallParser("deepseek_v31", (_DEEPSEEK,), wrappers=(_ALL_BEGIN, _ALL_END), shape=_V31_SHAPE)
