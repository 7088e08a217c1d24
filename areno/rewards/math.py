"""Math reward: 1 if ``math-verify`` accepts the answer, otherwise 0.

Equality is symbolic: 1/2, 0.5 and \\frac{1}{2} are equal. The answer of a completion is its last ``\\boxed{...}``. Without a
box, math-verify searches the text. Some answers take long to verify, such as a tower of powers. In the main thread of a
process, verification stops after a few seconds, and the answer counts as wrong. Worker processes run reward functions in their
main thread. In other threads, only the deadline of the reward runner applies.

math-verify parses the content of a box as one expression. For example, ``72 dollars`` is the product of 72 and seven letters.
Words around a single expression are therefore removed. If both the model's answer and the reference answer consist of
words, the answers are compared as text.
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
    raise RewardError(
        f"the math reward needs math-verify ({error}); install it with: {install_command('math')}"
    ) from error

CHECK_TIMEOUT_S = 3  # limit for parsing and for verifying an answer

_FINAL_MARK = "####"  # precedes the final answer in GSM8K
_LEAD_IN = re.compile(r"\banswer(?:\s+is\b\s*:?|\s*[:=])", re.IGNORECASE)
_TOKEN = re.compile(
    r"\\(?:text\w*|mbox|mathrm|mathbf|operatorname|begin|end)\*?\s*\{[^{}]*\}|\\[A-Za-z]+"  # LaTeX commands are kept
    r"|(?<![\w\\{])(?P<word>[A-Za-z]{2,})(?![\w(])(?:\^\{?\d\}?)?"
)
_MATH_WORDS = frozenset({"and", "or", "pi", "mod", "sqrt", "exp", "log", "ln", "min", "max", "gcd", "lcm"})
_MATH_WORDS |= {"sin", "cos", "tan", "cot", "sec", "csc"}
_UNITS = frozenset({"cm", "mm", "km", "kg", "mg", "ml", "ft", "lb", "oz", "hr"})
_PLAIN_TEXT = re.compile(r"\\(?:text\w*|mbox|mathrm|mathbf)\s*\{([^{}]*)\}")
_COMPARISONS = frozenset({"not", "than", "least", "most"})  # words that change the meaning of a number
_REWRITES = (
    (re.compile(r"(?<![\d/.])(\d+)\s+(\d+)\s*/\s*(\d+)$"), r"\1\\frac{\2}{\3}"),  # 1 1/2
    (re.compile(r"(?<=\d) (?=\d{3}(?!\d))"), ""),  # 1 000
    (re.compile(r"^([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)$"), r"\1 \\cdot 10^{\2}"),
)
_log = logging.getLogger(__name__)
_text_warning_logged = threading.Event()


def math_verify_reward(completion: str, answer: Any) -> float:
    """Compare a completion with the reference answer, and return the reward.

    Args:
        completion: text of the completion.
        answer: the reference answer as text or as a number. If it is a list, the first element is used.

    Returns:
        1.0 if the answers are equal, otherwise 0.0.

    Raises:
        RewardError: the reference answer is missing or cannot be parsed.
    """
    reference = (answer[0] if answer else None) if isinstance(answer, (list, tuple)) else answer
    if reference is None or not str(reference).strip():
        raise RewardError(
            f"the row has no reference answer (got {answer!r}); set `solutions` or `answer` in the loader"
        )
    text = str(reference)
    # The library's timeout uses a signal, which works only in the main thread; in other threads the runner's deadline applies.
    limit = CHECK_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    final = _final(text)
    gold = parse(_boxed(final, warn=True), parsing_timeout=limit)
    if not gold:
        raise RewardError(f"math-verify cannot parse the reference answer {text!r}; drop such rows in the loader")
    if (right := _words(final)) is not None and (answered := _words(_final(completion))) is not None:
        return float(answered == right)
    box = completion.rfind("\\boxed")
    prediction = parse(completion if box < 0 else _boxed(completion[box:]), parsing_timeout=limit)
    return float(verify(gold, prediction, timeout_seconds=limit))


def _final(reference: str) -> str:
    r"""Return the final answer in a text.

    This is the text from the last ``\boxed`` on, else the text after ``####`` or ``answer is``, else the entire text.
    """
    if (box := reference.rfind("\\boxed")) >= 0:
        return reference[box:]
    if _FINAL_MARK in reference:
        return reference.rpartition(_FINAL_MARK)[2]
    return reference[max((match.end() for match in _LEAD_IN.finditer(reference)), default=0) :]


def _boxed(text: str, warn: bool = False) -> str:
    r"""Return a text as a ``\boxed{...}`` that math-verify can parse.

    If the text starts with ``\boxed{...}``, only the content of its braces is used.
    """
    content = text
    if text.startswith("\\boxed"):
        if (inner := _box_content(text)) is None:
            return text
        content = inner
    expression = _expression(content)
    if expression is None and warn:
        _warn_of_text(content.strip())
    return f"\\boxed{{{content if expression is None else expression}}}"


def _box_content(text: str) -> str | None:
    r"""Return the content of the ``\boxed{...}`` at the start of ``text``; None if its braces are not balanced."""
    depth = 0
    start = len("\\boxed")
    for index, character in enumerate(text[start:], start):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start + 1 : index] if character == "}" else None
    return None


def _words(answer: str) -> str | None:
    """Return the words of an answer in lower case; None if the answer is a number or an expression, such as ``xy``."""
    content = _box_content(answer) if answer.startswith("\\boxed") else answer
    text = _PLAIN_TEXT.sub(r"\1", content or "").replace("$", "").strip(" \n.,;:?!")
    words = re.findall(r"[^\W\d_]+", text.lower())
    if not re.fullmatch(r"(?:[^\W\d_]|[\s,'’])+", text):
        return None
    return " ".join(words) if any(len(word) > 2 and word not in _MATH_WORDS for word in words) else None


def _expression(text: str) -> str | None:
    """Return the expression in a text, such as ``72`` in ``72 dollars.``; None if the text has none or several."""
    words = [match["word"].lower() for match in _TOKEN.finditer(text) if match["word"]]
    prose = [word for word in words if word in _UNITS or (len(word) > 2 and word not in _MATH_WORDS)]
    pieces = [text]
    if prose:
        if not _COMPARISONS.isdisjoint(words):
            return None
        parts = _TOKEN.sub(lambda match: match[0] if not _is_prose(match["word"]) else "\0", text).split("\0")
        pieces = [part for part in parts if re.search(r"\d|\\[A-Za-z]", part)]
    if len(pieces) != 1:
        return None
    expression = pieces[0].strip().lstrip(",;:").rstrip(" .,;:?(-" if prose else " .,;").strip()
    if expression.count("{") != expression.count("}"):
        return None
    for pattern, replacement in _REWRITES:
        expression = pattern.sub(replacement, expression)
    return expression


def _is_prose(word: str | None) -> bool:
    return word is not None and word.lower() not in _MATH_WORDS


def _warn_of_text(text: str) -> None:
    if _text_warning_logged.is_set():
        return
    _text_warning_logged.set()
    _log.warning(
        "the reference answer %r is not a single number or expression, so only an answer with the same text is "
        "correct; in the loader, drop such rows, or reduce their answers to a number or an expression (logged once)",
        text[:200],
    )
