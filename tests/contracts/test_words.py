"""Pages, messages and docstrings use the field's terms: phrases and names that were replaced do not come back."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGES = [
    *(REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((REPO / "docs").glob("*.md")),
    *sorted((REPO / "examples").rglob("*.md")),
    REPO / "benchmarks" / "README.md",
]
MODULES = sorted((REPO / "areno").rglob("*.py"))
# Phrases to avoid, and what to write instead.
PHRASES = {
    r"not here yet": "not supported",
    r"tested without one only": "untested on GPUs",
    r"\bwhoever\b": "name who",
    r"\bcomput\w+ \w* ?\w* ?anew\b|\b(begin|start)s? anew\b|\bbegan anew\b": "recompute, restart",
    r"\bgo(es)? on from\b|\bgoing on from\b": "resume from",
    r"\bshare(s|d)? (the |its )?(\w+ )?out\b|\bsharing (\w+ )?out\b": "divide, shard",
    r"\bspread (\w+ )?over\b": "sharded across",
    r"\bguess(es|ed|ing)? ahead\b": "speculative decoding",
    r"the hard way": "at once",
    r"\bworth nothing\b": "revoked, without effect",
    r"\bkeeps? books of\b": "track",
    r"takes a section away": "remove a section",
    r"answers nobody": "stops serving",
    r"\bnobody to share\b": "needs two replicas",
    r"\b(is|are|was|were) passed over\b": "skip",
    r"\b(is|was|are|were) not whole\b": "is incomplete",
    r"\bwhat makes it less\b": "reducing",
    r"\bso many seconds\b": "N seconds",
    r"\b(was|were|is) said\b|\bhad said\b": "sampled, sent, reported",
    r"costs? no talk": "needs no communication",
    r"promise at the door": "bounds admission only",
    r"\bsend everyone\b": "requeue all",
    r"\bone rhythm\b": "one schedule",
    r"\bturned around\b": "transposed",
    r"kill has fallen": "killed while writing",
    r"\btime stamps?\b": "timestamps",
    r"\b(so|of so) (many|few)\b": "repeat the number or its name",
    r"\bof such a pass\b": "repeat the noun",
    r"\bruns? of (consecutive |adjacent )?layers\b": "model chunks",
    r"\b(a|every|each|the|of|per|one) mixtures?\b(?![- ]of)": "MoE layers, MoE models",
    r"\bcalled off\b": "cancelled",
    r"\b(restart|recovery) points?\b": "recovery checkpoints",
    r"\b(experts|samples|bytes|tokens|numbers) an? (token|turn|number|parameter|weight|prompt)\b": "per",
    r"\bcomputer's memory\b": "host memory",
    r"\bthe family (below|on one loss)\b": "list the algorithms",
    r"\b(measured|nats|speed|yes|there) here\b": "in areno, in this benchmark, on this machine",
    r"\bhowever (it|they|that|he|one|a run) ends?\b": "even if it is killed",
    r"\bbeside (a|an|the|its|other|one another|one)? ?(batch|generation|training|rollouts?|work|run|step)\b": "besides, while",
    r"\bReturns? the bytes of\b": "size in bytes",
    r"(?m)^ +[a-z_]+: of (a|an|the|its|each|all)\b": "begin with a noun: seed of the shuffling",
    r"  # of (a|an|the|its|each|all)\b": "begin with a noun: gradient of the output",
    r"\bunless (it is|they are) (kept|explicit)\b": "name the setting",
    r"ApiError: [0-9]": "ApiError 400 if ...",
    r"\b(is|are) refused; remove it\b": "remove the option",
    r"\blowest level\b|\bthe least of\b": "minimum",
    r"\bteach(es)? nothing\b": "there is nothing to learn from",
}
# Names to avoid, and what to use instead.
NAMES = {
    "Desk": "RequestRouter",
    "Ticket": "RoutedRequest",
    "Delivery": "WeightTransfer",
    "Said": "TokenEvent",
    "Facts": "EngineInfo",
    "News": "LoopCommands",
    "Entering": "ChunkedPrefill",
    "Peers": "RankContext",
    "AgentTape": "ConversationRecorder",
    "Lane": "WorkerSlot",
    "keep_contexts": "enable_prefix_cache",
    "prove_decoding": "validate_decoding",
    "each_rank": "run_on_all_ranks",
    "everyone": "all_gather",
    "warmth": "temperature",
}
VAGUE_VARIABLES = {"found", "told", "said", "given"}


@pytest.mark.parametrize("phrase", PHRASES)
def test_pages_messages_and_docstrings_are_idiomatic(phrase):
    pattern = re.compile(phrase, re.IGNORECASE)
    places = []
    for path in (*PAGES, *MODULES):
        text = path.read_text(encoding="utf-8")
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            places.append(f"{path.relative_to(REPO)}:{line}: {match[0]!r}")
    assert not places, f"write {PHRASES[phrase]!r}:\n" + "\n".join(places)


def test_names_are_standard_terms_of_the_field():
    pattern = re.compile(rf"\b({'|'.join(NAMES)})\b")
    places = [
        f"{path.relative_to(REPO)}: {name} is {NAMES[name]}"
        for path in MODULES
        for name in sorted(set(pattern.findall(path.read_text(encoding="utf-8"))))
    ]
    assert not places, "\n".join(places)


def test_class_names_are_unique_and_variables_are_named_for_what_they_hold():
    """The name of a class means one thing in the whole package."""
    classes, vague = defaultdict(list), []
    for path in MODULES:
        where = str(path.relative_to(REPO))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(where)
            name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""
            if name in VAGUE_VARIABLES:
                vague.append(f"{where}:{node.lineno}: {name}")
    assert {name: places for name, places in classes.items() if len(places) > 1} == {}
    assert not vague, "\n".join(sorted(set(vague)))
