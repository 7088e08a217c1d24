"""Answers that must have a form: JSON, a JSON schema, a tool call.

The grammars are those of `llguidance <https://github.com/guidance-ai/llguidance>`_ (extra ``serve``): each is compiled
once per tokenizer, every sample walks a copy of it. A model that reasons first may do so freely: ``after`` names the
marker that ends the reasoning, and the form holds from there on.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np

from areno.config.packages import install_command
from areno.errors import EngineError, UsageError
from areno.text.tool_calls.base import CallShape, ToolCallParser, selectable_tools
from areno.text.tool_calls.schema import types_of
from areno.types import TokenConstraint

ConstraintFactory = Callable[[], TokenConstraint]

# Between the parts of JSON: one space, or a new line with its indent. A model in doubt may write white space without end.
_JSON_STYLE = {"whitespace_pattern": r" |\r?\n[ \t]{0,32}"}
_LENIENT = {"lenient": True, "coerce_one_of": True}
_MAX_COMPILED = 64


class Options(TypedDict, total=False):
    """What every constraint may be told besides its form."""

    vocab_size: int | None  # length V of the masks, where the model's vocabulary is larger than the tokenizer's
    eos_ids: Collection[int] | None  # tokens that may end a complete answer; the tokenizer's own EOS where not given
    after: (
        str | None
    )  # the form holds from this marker on, for example ``</think>``; before it the model writes what it likes


def json_object_constraint(tokenizer: Any, **options: Unpack[Options]) -> ConstraintFactory:
    """Any JSON object; see :func:`json_schema_constraint`."""
    return json_schema_constraint(tokenizer, {"type": "object"}, **options)


def json_schema_constraint(
    tokenizer: Any, schema: Mapping[str, Any] | bool, **options: Unpack[Options]
) -> ConstraintFactory:
    """JSON that fits a schema, its properties in the order in which the schema has them.

    Returns a function that makes the state of one sample, cheap to call. Raises UsageError: the schema is invalid or
    cannot be enforced; or ``llguidance`` is not installed, or the tokenizer has no fast implementation or no EOS.
    """
    rules = f"body: %json {_checked_schema(schema, 'json_schema', {})}"
    return _compiler(tokenizer, options).factory(rules, options.get("after"), "json_schema")


def tool_call_constraint(
    tokenizer: Any,
    parser: ToolCallParser,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: Any = "required",
    *,
    parallel: bool = True,
    **options: Unpack[Options],
) -> ConstraintFactory:
    """Calls of the tools and nothing else, in the form that ``parser`` reads.

    Parameters that cannot be enforced in full are enforced in part, unless the tool says ``"strict": true``.

    Args:
        parser: the model's format; it must have a ``shape``.
        tool_choice: ``required``, or the one tool to be called.

    Raises:
        UsageError: calls in the format cannot be enforced, there is no tool, or as in :func:`json_schema_constraint`.
    """
    shape = parser.shape
    functions = selectable_tools(tools, tool_choice)
    if shape is None:
        raise UsageError(
            f"tool_choice: calls in the {parser.name} format cannot be enforced; use auto, or another --tool-call-parser"
        )
    if not functions:
        raise UsageError("tool_choice: a call is required but there are no tools; give tools, or use auto")
    compiler = _compiler(tokenizer, options)
    rules = []
    for place, (name, function) in enumerate(functions.items()):
        before = shape.before.replace("{name}", json.dumps(name)).replace("{bare_name}", name)
        rules.append(f"call_{place}: {compiler.written(before)} args_{place} {compiler.written(shape.after)}")
        rules += _argument_rules(compiler, f"args_{place}", function, shape)
    call = " | ".join(f"call_{place}" for place in range(len(functions)))
    more = f"({compiler.written(shape.separator)} call)*" if parallel else ""
    rules += [f"call: {call}", f"body: {compiler.written(shape.begin)} call {more} {compiler.written(shape.end)}"]
    return compiler.factory("\n".join(rules), options.get("after"), "tools")


def _argument_rules(compiler: _Compiler, rule: str, function: Mapping[str, Any], shape: CallShape) -> list[str]:
    schema = {"type": "object", **(function.get("parameters") or {})}
    strictness = {} if function.get("strict") else _LENIENT
    where = f"tools: parameters of {function['name']}"
    if not shape.argument_before:
        return [f"{rule}: %json {_checked_schema(schema, where, strictness)}"]
    closing_tag = shape.argument_after.strip("\n")  # where a text ends, whether or not a line does
    rest = compiler.written(shape.argument_after.rpartition(closing_tag)[2])
    required, parts, rules = schema.get("required") or [], [], []
    for place, (key, value) in enumerate((schema.get("properties") or {}).items()):
        one = f"{rule}_{place}"
        parts.append(one if key in required else f"{one}?")
        before = compiler.written(shape.argument_before.replace("{key}", key))
        kinds = types_of(value)
        if kinds and "string" not in kinds:
            value = {"$defs": schema.get("$defs", {}), **value}
            rules.append(f"{one}: {before} {one}_value {compiler.written(shape.argument_after)}")
            rules.append(f"{one}_value: %json {_checked_schema(value, where, strictness)}")
        else:
            rules.append(f"{one}: {before} {one}_any {rest}")
            rules += compiler.text_until(closing_tag, f"{one}_any")
    return [f"{rule}: {' '.join(parts) or _literal('')}", *rules]


class _State:
    """One sample's place in a grammar."""

    __slots__ = ("_choices", "_matcher", "_tokens", "_vocab_size")

    def __init__(self, matcher: Any, tokens: Any, vocab_size: int) -> None:
        self._matcher, self._tokens = matcher, tokens
        self._vocab_size = vocab_size
        self._choices = 0

    def allowed(self) -> np.ndarray:
        """Which tokens may come next, bool [V]; an end of text only where the answer is complete."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        self._choices = int(mask.sum())
        return mask

    def forces(self, token: int) -> bool:
        """Whether an allowed token spells text that is the only one that may follow."""
        if self._choices == 1:
            return True
        text = self._matcher.compute_ff_bytes()
        return bool(text) and text.startswith(self._tokens.decode_bytes([token]))

    def push(self, token: int) -> None:
        """A token was sampled. Raises EngineError: it was not allowed, or the grammar became too complex to follow."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise EngineError(f"the grammar of an answer cannot be followed any further: {reason}")


class _Compiler:
    """Grammars over one tokenizer; the last ones used stay compiled."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        from llguidance.hf import from_tokenizer

        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        try:
            self._tokens = from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=list(eos_ids))
        except ValueError as error:
            raise UsageError(f"this tokenizer cannot be used with structured output: {error}") from error
        # Tokens that the grammar knows by number alone: special ones, and others that look like a tag.
        added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
        self._special = {text: number for number, text in added.items() if self._tokens.is_special_token(number)}
        self._matcher = functools.lru_cache(_MAX_COMPILED)(self._compile)

    def factory(self, rules: str, after: str | None, what: str) -> ConstraintFactory:
        """States of a grammar whose answer is the rule ``body``; ``what`` is what the caller gave."""
        matcher = self._matcher(f"{self._start(after)}\n{rules}", what)
        return lambda: _State(matcher.deep_copy(), self._tokens, self._vocab_size)

    def written(self, text: str) -> str:
        """A text as a sequence of the grammar: special tokens by number, all else spelled out."""
        parts = []
        while text:
            hits = [(place, -len(token)) for token in self._special if token and (place := text.find(token)) >= 0]
            place, length = min(hits, default=(len(text), 0))
            if place:
                parts.append(_literal(text[:place]))
            if length:
                parts.append(f"<[{self._special[text[place : place - length]]}]>")
            text = text[place - length :]
        return " ".join(parts)

    def text_until(self, end: str, rule: str, any_token: bool = False) -> list[str]:
        """Rules for any text up to and with ``end``; ``any_token`` lets it have special tokens as well."""
        if not any(token in end for token in self._special if token):
            return [f"{rule}[suffix={_literal(end)}]: /(.|\\n)*/"]
        others = sorted(set(self._special.values()) - {self._special.get(end), *self._eos_ids})
        text = f"{rule.upper()}_TEXT"
        free = f"({text} | <[{','.join(map(str, others))}]>)*" if any_token and others else f"{text}?"
        return [f"{rule}: {free} {self.written(end)}", f"{text}: /(.|\\n)+/"]

    def _start(self, after: str | None) -> str:
        """The rule to start with; with a marker there may be anything before it."""
        if after is None:
            return "start: body"
        gap = "gap: /[ \\t\\r\\n]{0,8}/"
        return "\n".join(["start: free gap body", *self.text_until(after, "free", any_token=True), gap])

    def _compile(self, grammar: str, what: str) -> Any:
        from llguidance import LLMatcher

        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokens)
        if is_error:
            raise UsageError(f"{what}: {' '.join(messages[0].split())}; change it, or do not ask for this form")
        return LLMatcher(self._tokens, grammar)


_compilers: weakref.WeakKeyDictionary[Any, dict[tuple[int, tuple[int, ...]], _Compiler]] = weakref.WeakKeyDictionary()


def _compiler(tokenizer: Any, options: Options) -> _Compiler:
    _llguidance()
    eos_ids = options.get("eos_ids")
    ends = tuple(sorted(eos_ids if eos_ids is not None else {tokenizer.eos_token_id} - {None}))
    if not ends:
        raise UsageError("structured output needs an end-of-text token, and this tokenizer has none; give eos_ids")
    size = options.get("vocab_size") or len(tokenizer)
    known = _compilers.setdefault(tokenizer, {})
    if (size, ends) not in known:
        known[size, ends] = _Compiler(tokenizer, size, ends)
    return known[size, ends]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError(
            f"structured output needs the package llguidance; install it: {install_command('serve')}"
        ) from error
    return llguidance


def _checked_schema(schema: Any, what: str, strictness: Mapping[str, bool]) -> str:
    """The schema as JSON text with the style of JSON to write, known to be enforceable."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise UsageError(f"{what}: a JSON schema is an object, got {schema!r}")
    from_llguidance = _llguidance().LLMatcher
    try:
        text = json.dumps({**schema, "x-guidance": {**_JSON_STYLE, **strictness}})
        is_error, messages = from_llguidance.validate_grammar_with_warnings(
            from_llguidance.grammar_from_json_schema(text)
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what}: {error}; give a JSON schema") from error
    if is_error:
        raise UsageError(f"{what}: {' '.join(messages[0].split())}; change the schema")
    return text


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
