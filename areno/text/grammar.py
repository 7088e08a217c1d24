"""Structured output: constrain responses to JSON, JSON schemas or tool calls.

`llguidance <https://github.com/guidance-ai/llguidance>`_ (extra ``serve``) compiles a grammar once per tokenizer and
process. Each sample uses a copy of the compiled state. To leave reasoning unconstrained, set the option ``after`` of a
constraint to the marker that ends the reasoning, such as ``</think>``. The grammar then applies only after this marker.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import numpy as np

from areno.config.packages import install_command
from areno.errors import EngineError, UsageError
from areno.text.tool_calls.parser import CallShape, ToolCallParser, selectable_tools
from areno.text.tool_calls.schema import resolved, types_of
from areno.types import TokenConstraint

ConstraintFactory = Callable[[Any], TokenConstraint]
"""A picklable function that creates the grammar state of one sample, given the tokenizer of the generating process."""

# White space in JSON: one space, or a newline with indentation. Unlimited white space would let a model loop.
_JSON_STYLE = {"whitespace_pattern": r" |\r?\n[ \t]{0,32}"}
_LENIENT = {"lenient": True, "coerce_one_of": True}
_MAX_COMPILED = 64
_TEXT_KEYWORDS = {"type", "anyOf", "oneOf", "title", "description", "default", "examples", "deprecated", "$comment"}


class ConstraintOptions(TypedDict, total=False):
    """Options that are common to all constraints."""

    vocab_size: int | None  # length V of the masks, if the model's vocabulary is larger than the tokenizer's
    eos_ids: Collection[int] | None  # tokens that may end a complete response; by default the tokenizer's EOS
    after: str | None  # apply the grammar after this marker, for example ``</think>``


@dataclass(frozen=True, slots=True)
class Grammar:
    """A validated grammar. Error messages identify the grammar by the text in ``what``, such as ``json_schema``."""

    rules: str
    what: str
    vocab_size: int
    eos_ids: tuple[int, ...]

    def __call__(self, tokenizer: Any) -> TokenConstraint:
        """Create the grammar state of one sample. If the cache of this process does not contain the grammar, compile it."""
        return _compiler(tokenizer, {"vocab_size": self.vocab_size, "eos_ids": self.eos_ids}).state(self)


@dataclass(frozen=True, slots=True)
class OptionalReasoning:
    """A constraint for responses that may begin with reasoning.

    ``opener`` is the token that starts reasoning. If a response begins with this token, the constraint ``reasoned`` applies.
    Otherwise, ``direct`` applies.
    """

    direct: ConstraintFactory
    reasoned: ConstraintFactory
    opener: int

    def __call__(self, tokenizer: Any) -> TokenConstraint:
        """Create the grammar state of one sample."""
        return _OptionalReasoningState(self.direct(tokenizer), functools.partial(self.reasoned, tokenizer), self.opener)


def json_object_constraint(tokenizer: Any, **options: Unpack[ConstraintOptions]) -> ConstraintFactory:
    """Constrain responses to any JSON object. :func:`json_schema_constraint` describes the result and the errors."""
    return json_schema_constraint(tokenizer, {"type": "object"}, **options)


def json_schema_constraint(
    tokenizer: Any, schema: Mapping[str, Any] | bool, **options: Unpack[ConstraintOptions]
) -> ConstraintFactory:
    """Constrain responses to JSON that matches a schema, with properties in the order of the schema.

    Returns a function that creates the :class:`TokenConstraint` of one sample.

    Raises:
        UsageError: the schema is invalid or unsupported, ``llguidance`` is not installed, or the tokenizer has no EOS
            token or no fast implementation.
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
    **options: Unpack[ConstraintOptions],
) -> ConstraintFactory:
    """Constrain responses, so that they consist only of tool calls in the format of ``parser``.

    Parameter schemas are enforced as far as possible. For a tool with ``"strict": true``, a schema that cannot be enforced
    completely is an error.

    Args:
        parser: the parser of the model's tool-call format. If ``parser.shape`` is None, the format cannot be enforced.
        tool_choice: ``required``, or the only tool that may be called.

    Raises:
        UsageError: the format cannot be enforced, there are no tools, or one of the reasons listed for
            :func:`json_schema_constraint` applies.
    """
    shape = parser.shape
    functions = selectable_tools(tools, tool_choice)
    if shape is None:
        raise UsageError(
            f"tool_choice: the {parser.name} format does not support forced calls; use tool_choice auto, or another "
            "--tool-call-parser"
        )
    if not functions:
        raise UsageError("tool_choice: a call is required, but there are no tools; send tools, or use tool_choice auto")
    compiler = _compiler(tokenizer, options)
    rules = []
    for index, (name, function) in enumerate(functions.items()):
        before = shape.before.replace("{name}", json.dumps(name)).replace("{bare_name}", name)
        rules.append(f"call_{index}: {compiler.literal(before)} args_{index} {compiler.literal(shape.after)}")
        rules += _argument_rules(compiler, f"args_{index}", function, shape)
    call = " | ".join(f"call_{index}" for index in range(len(functions)))
    more = f"({compiler.literal(shape.separator)} call)*" if parallel else ""
    rules += [f"call: {call}", f"body: {compiler.literal(shape.begin)} call {more} {compiler.literal(shape.end)}"]
    return compiler.factory("\n".join(rules), options.get("after"), "tools")


def _argument_rules(compiler: _Compiler, rule: str, function: Mapping[str, Any], shape: CallShape) -> list[str]:
    schema = {"type": "object", **(function.get("parameters") or {})}
    strictness = {} if function.get("strict") else _LENIENT
    where = f"tools: parameters of {function['name']}"
    checked = _checked_schema(schema, where, strictness)
    if not shape.argument_before:
        return [f"{rule}: %json {checked}"]
    closing_tag = shape.argument_after.strip("\n")  # strings end at this marker, with or without a line break
    rest = compiler.literal(shape.argument_after.rpartition(closing_tag)[2])
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required, parts, rules = schema.get("required") or [], [], []
    for index, (key, value) in enumerate((schema.get("properties") or {}).items()):
        argument = f"{rule}_{index}"
        parts.append(argument if key in required else f"{argument}?")
        before = compiler.literal(shape.argument_before.replace("{key}", key))
        after = compiler.literal(shape.argument_after)
        kinds = types_of(value, schema)
        if kinds and "string" not in kinds:
            rules.append(f"{argument}: {before} {argument}_value {after}")
            rules.append(f"{argument}_value: %json {_checked_schema({**definitions, **value}, where, strictness)}")
        elif set(kinds) == {"string"} and (choices := _text_choices(resolved(value, schema))):
            rules.append(f"{argument}: {before} ({' | '.join(map(compiler.literal, choices))}) {after}")
        else:
            rejected = sorted(_not_for_text(resolved(value, schema)))
            if rejected and function.get("strict"):
                raise UsageError(
                    f"{where}: the argument {key} is plain text in this tool-call format, not JSON, so these keywords of its "
                    f"schema cannot be enforced: {', '.join(rejected)}; remove them, or omit `strict` from the tool"
                )
            rules.append(f"{argument}: {before} {argument}_any {rest}")
            rules += compiler.text_until(closing_tag, f"{argument}_any")
    return [f"{rule}: {' '.join(parts) or _quoted('')}", *rules]


def _text_choices(schema: Any) -> list[str]:
    if not isinstance(schema, Mapping) or set(schema) - _TEXT_KEYWORDS - {"enum"} - {"const"}:
        return []
    values = schema.get("enum", [schema.get("const")])
    return values if all(isinstance(value, str) and value for value in values) else []


def _not_for_text(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    branches = [*schema.get("anyOf", []), *schema.get("oneOf", [])]
    return set(schema).difference(_TEXT_KEYWORDS).union(*map(_not_for_text, branches))


class _GrammarState:
    __slots__ = ("_choices", "_matcher", "_tokens", "_vocab_size")

    def __init__(self, matcher: Any, tokens: Any, vocab_size: int) -> None:
        self._matcher, self._tokens = matcher, tokens
        self._vocab_size = vocab_size
        self._choices = 0

    def allowed(self) -> np.ndarray:
        """Return the allowed next tokens as bool [V]. EOS tokens are allowed only after a complete response."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        self._choices = int(mask.sum())
        if not self._choices:
            raise EngineError("the grammar rejects every token of this model as the next token of the response")
        return mask

    def forces(self, token: int) -> bool:
        if self._choices == 1:
            return True
        text = self._matcher.compute_ff_bytes()
        return bool(text) and text.startswith(self._tokens.decode_bytes([token]))

    def push(self, token: int) -> None:
        """Advance the state by a sampled token.

        Raises EngineError if the grammar rejects the token, or if parsing the response exceeds a limit of llguidance.
        """
        self._matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise EngineError(f"the response cannot be parsed with the grammar: {reason}")


class _OptionalReasoningState:
    def __init__(self, direct: TokenConstraint, reasoned: Callable[[], TokenConstraint], opener: int) -> None:
        self._active, self._reasoned, self._opener = direct, reasoned, opener
        self._started = False

    def allowed(self) -> np.ndarray | None:
        mask = self._active.allowed()
        if self._started or mask is None:
            return mask
        mask = mask.copy()
        mask[self._opener] = True
        return mask

    def forces(self, token: int) -> bool:
        return self._started and self._active.forces(token)

    def push(self, token: int) -> None:
        if not self._started and token == self._opener:
            self._active = self._reasoned()
        self._started = True
        self._active.push(token)

    @property
    def finished(self) -> bool:
        return self._active.finished


class _Compiler:
    """Compiles grammars for one tokenizer, with a cache of recent grammars."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        from llguidance.hf import from_tokenizer

        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        try:
            self._tokens = from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=list(eos_ids))
        except ValueError as error:
            raise UsageError(f"this tokenizer does not support structured output: {error}") from error
        # Tokens to which a grammar must refer by id: special tokens, and other tokens that look like a tag.
        added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
        self._special = {text: number for number, text in added.items() if self._tokens.is_special_token(number)}
        self._matcher = functools.lru_cache(_MAX_COMPILED)(self._compile)

    def factory(self, rules: str, after: str | None, what: str) -> Grammar:
        """Create and validate a grammar from ``rules``. The rule named ``body`` describes the response.

        ``what`` is the name of the grammar in error messages.
        """
        grammar = Grammar(f"{self._start(after)}\n{rules}", what, self._vocab_size, self._eos_ids)
        self._matcher(grammar)  # validates the grammar
        return grammar

    def state(self, grammar: Grammar) -> _GrammarState:
        return _GrammarState(self._matcher(grammar).deep_copy(), self._tokens, self._vocab_size)

    def literal(self, text: str) -> str:
        """Return a grammar expression that matches exactly ``text``, including the special tokens in it."""
        parts = []
        while text:
            hits = [(start, -len(token)) for token in self._special if token and (start := text.find(token)) >= 0]
            start, length = min(hits, default=(len(text), 0))
            if start:
                parts.append(_quoted(text[:start]))
            if length:
                parts.append(f"<[{self._special[text[start : start - length]]}]>")
            text = text[start - length :]
        return " ".join(parts)

    def text_until(self, end: str, rule: str, any_token: bool = False) -> list[str]:
        """Return rules for text up to and including ``end``.

        ``any_token`` allows special tokens except EOS in the text before ``end``, but only if ``end`` itself contains a special
        token.
        """
        if not any(token in end for token in self._special if token):
            return [f"{rule}[suffix={_quoted(end)}]: /(.|\\n)*/"]
        others = sorted(set(self._special.values()) - {self._special.get(end), *self._eos_ids})
        text = f"{rule.upper()}_TEXT"
        free = f"({text} | <[{','.join(map(str, others))}]>)*" if any_token and others else f"{text}?"
        return [f"{rule}: {free} {self.literal(end)}", f"{text}: /(.|\\n)+/"]

    def _start(self, after: str | None) -> str:
        if after is None:
            return "start: body"
        gap = "gap: /[ \\t\\r\\n]{0,8}/"
        return "\n".join(["start: free gap body", *self.text_until(after, "free", any_token=True), gap])

    def _compile(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher

        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar.rules, self._tokens)
        if is_error:
            reason = " ".join(messages[0].split())
            raise UsageError(f"{grammar.what}: {reason}; change the grammar, or omit the constraint")
        return LLMatcher(self._tokens, grammar.rules)


_compilers: weakref.WeakKeyDictionary[Any, dict[tuple[int, tuple[int, ...]], _Compiler]] = weakref.WeakKeyDictionary()


def _compiler(tokenizer: Any, options: ConstraintOptions) -> _Compiler:
    _llguidance()
    eos_ids = options.get("eos_ids")
    eos = tuple(sorted(eos_ids if eos_ids is not None else {tokenizer.eos_token_id} - {None}))
    if not eos:
        raise UsageError(
            "structured output requires an EOS token, but this tokenizer has none; pass eos_ids to the constraint"
        )
    size = options.get("vocab_size") or len(tokenizer)
    compilers = _compilers.setdefault(tokenizer, {})
    if (size, eos) not in compilers:
        compilers[size, eos] = _Compiler(tokenizer, size, eos)
    return compilers[size, eos]


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError(
            f"structured output requires the package llguidance; install it: {install_command('serve')}"
        ) from error
    return llguidance


def _checked_schema(schema: Any, what: str, strictness: Mapping[str, bool]) -> str:
    """Validate a JSON schema, add llguidance's options for white space and strictness, and return the JSON text."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        raise UsageError(f"{what}: a JSON schema must be an object, got {schema!r}")
    matcher = _llguidance().LLMatcher
    try:
        text = json.dumps({**schema, "x-guidance": {**_JSON_STYLE, **strictness}})
        is_error, messages = matcher.validate_grammar_with_warnings(matcher.grammar_from_json_schema(text))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what}: the schema is not valid JSON: {error}; correct the schema") from error
    if is_error:
        raise UsageError(f"{what}: {' '.join(messages[0].split())}; change the schema")
    return text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
