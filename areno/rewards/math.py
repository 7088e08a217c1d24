"""Reward 1 for a mathematically right answer, 0 for a wrong one, decided by ``math-verify``.

Equality is symbolic: 1/2, 0.5 and \\frac{1}{2} are the same. The last ``\\boxed{...}`` counts; without one, math-verify
looks for the answer in the text. An answer that takes more than a few seconds to compare, such as a tower of powers, is
wrong: what a model writes must not be able to stop a run.

math-verify reads what is in a box as one expression, so that ``72 dollars`` becomes a product of 72 and seven letters.
Where words surround exactly one expression, that expression alone goes into the box.
"""

import logging
import re
import threading
from typing import Any

from areno.config.packages import install_command
from areno.errors import RewardError

try:
    from math_verify import parse, verify
except ImportError as error:
    raise RewardError(f"the math reward needs math-verify; install it with: {install_command('math')}") from error

CHECK_TIMEOUT_S = 3  # for reading and for comparing an answer, each

_FINAL_MARK = "####"  # GSM8K writes its final answers behind it
_LEAD_IN = re.compile(r"\banswer(?:\s+is\b\s*:?|\s*[:=])", re.IGNORECASE)
_TOKEN = re.compile(
    r"\\(?:text\w*|mbox|mathrm|mathbf|operatorname|begin|end)\*?\s*\{[^{}]*\}|\\[A-Za-z]+"  # words of LaTeX stay
    r"|(?<![\w\\{])(?P<word>[A-Za-z]{2,})(?![\w(])(?:\^\{?\d\}?)?"
)
_MATHEMATICS = frozenset({"and", "or", "pi", "mod", "sqrt", "exp", "log", "ln", "min", "max", "gcd", "lcm"})
_MATHEMATICS |= {"sin", "cos", "tan", "cot", "sec", "csc"}
_UNITS = frozenset({"cm", "mm", "km", "kg", "mg", "ml", "ft", "lb", "oz", "hr"})
_COMPARISONS = frozenset({"not", "than", "least", "most"})  # the number alone would be another answer
_REWRITES = (
    (re.compile(r"(?<![\d/.])(\d+)\s+(\d+)\s*/\s*(\d+)$"), r"\1\\frac{\2}{\3}"),  # 1 1/2
    (re.compile(r"(?<=\d) (?=\d{3}(?!\d))"), ""),  # 1 000
    (re.compile(r"^([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)$"), r"\1 \\cdot 10^{\2}"),
)
_log = logging.getLogger(__name__)
_text_was_seen = threading.Event()


def math_verify_reward(completion: str, answer: Any) -> float:
    """Compare a completion with the reference answer: text, a number, or a list whose first entry is it.

    Returns:
        1.0 or 0.0.

    Raises:
        RewardError: there is no reference answer, or it cannot be read, so that no completion could ever be right.
    """
    reference = (answer[0] if answer else None) if isinstance(answer, (list, tuple)) else answer
    if reference is None or not str(reference).strip():
        raise RewardError(
            f"the row has no reference answer (got {answer!r}); set `solutions` or `answer` in the loader"
        )
    text = str(reference)
    # The library's own limit is a signal, which only the main thread can have; elsewhere the runner's deadline holds.
    limit = CHECK_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    gold = parse(_boxed(_final(text), warn=True), parsing_timeout=limit)
    if not gold:
        raise RewardError(f"math-verify cannot read the reference answer {text!r}; leave such rows out in the loader")
    box = completion.rfind("\\boxed")
    found = parse(completion if box < 0 else _boxed(completion[box:]), parsing_timeout=limit)
    return float(verify(gold, found, timeout_seconds=limit))


def _final(reference: str) -> str:
    """The part of a reference that states the answer: its last box, or what follows ``####`` or ``answer is``."""
    if (box := reference.rfind("\\boxed")) >= 0:
        return reference[box:]
    if _FINAL_MARK in reference:
        return reference.rpartition(_FINAL_MARK)[2]
    return reference[max((match.end() for match in _LEAD_IN.finditer(reference)), default=0) :]


def _boxed(text: str, warn: bool = False) -> str:
    """``text``, or the content of the box that it begins with, as a box that math-verify can read."""
    content = text
    if text.startswith("\\boxed"):
        if (inner := _content(text)) is None:
            return text
        content = inner
    expression = _expression(content)
    if expression is None and warn:
        _warn_of_text(content.strip())
    return f"\\boxed{{{content if expression is None else expression}}}"


def _content(text: str) -> str | None:
    """What the braces of the box hold that ``text`` begins with; None where they do not close."""
    depth = 0
    start = len("\\boxed")
    for place, character in enumerate(text[start:], start):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start + 1 : place] if character == "}" else None
    return None


def _expression(text: str) -> str | None:
    """The one expression of a text: ``72`` of ``72 dollars.``; None where words surround none or several."""
    words = [match["word"].lower() for match in _TOKEN.finditer(text) if match["word"]]
    prose = [word for word in words if word in _UNITS or (len(word) > 2 and word not in _MATHEMATICS)]
    pieces = [text]
    if prose:
        if not _COMPARISONS.isdisjoint(words):
            return None
        parts = _TOKEN.sub(lambda match: match[0] if not _is_prose(match["word"]) else "\0", text).split("\0")
        pieces = [part for part in parts if re.search(r"\d|\\[A-Za-z]", part)]
    if len(pieces) != 1:
        return None
    found = pieces[0].strip().lstrip(",;:").rstrip(" .,;:?(-" if prose else " .,;").strip()
    if found.count("{") != found.count("}"):
        return None
    for pattern, replacement in _REWRITES:
        found = pattern.sub(replacement, found)
    return found


def _is_prose(word: str | None) -> bool:
    return word is not None and word.lower() not in _MATHEMATICS


def _warn_of_text(text: str) -> None:
    if _text_was_seen.is_set():
        return
    _text_was_seen.set()
    _log.warning(
        "the reference answer %r is text that holds no single number or expression, so that only a box with the same "
        "text is right; if completions cannot answer so, leave such rows out in the loader or reduce them to their "
        "results (said once)",
        text[:200],
    )
