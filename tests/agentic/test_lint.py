"""The linter's findings about templates are what happens to conversations."""

from __future__ import annotations

import subprocess
import sys

import pytest

from areno.api.agentic import lint_chat_template
from tests.agentic.templates import FORMATS, tokenizer_of

WANTED = {
    "chatml": set(),
    "llama3": set(),
    "mistral": set(),
    "gemma": set(),
    "thinking": {("drops thinking", "user message", True)},
    "deepseek": {
        ("rewrites history", "user message", False),
        ("rewrites history", "tool result", False),
        ("drops thinking", "user message", True),
        ("drops thinking", "tool result", True),
    },
    "glm": {("no turn end", "tool result", False)},
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_findings_describe_what_a_template_does(name):
    findings = {(f.kind, f.step, f.thinking) for f in lint_chat_template(tokenizer_of(FORMATS[name]))}
    assert findings == WANTED[name]


def test_a_template_that_refuses_a_conversation_is_reported():
    tokenizer = tokenizer_of(FORMATS["chatml"])
    tokenizer.chat_template = "{% if messages | length > 1 %}{{ raise_exception('one question only') }}{% endif %}" + (
        tokenizer.chat_template
    )
    assert {f.kind for f in lint_chat_template(tokenizer)} == {"refused"}


def test_findings_explain_the_consequences():
    [finding] = lint_chat_template(tokenizer_of(FORMATS["thinking"]))
    text = str(finding)
    assert "drops the reasoning of earlier turns when a user message follows an answer with reasoning, " in text
    assert "several training rows with the same reward" in text


def test_disabled_thinking_gives_no_findings_about_it():
    assert lint_chat_template(tokenizer_of(FORMATS["thinking"]), disable_thinking=True) == []


def test_training_without_agents_needs_no_server_packages():
    code = (
        "import sys\n"
        "sys.modules['starlette'] = sys.modules['fastapi'] = sys.modules['uvicorn'] = None\n"
        "import areno.api.trainers.policy_only, areno.api.agentic.collect, areno.api.agentic.lint\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
