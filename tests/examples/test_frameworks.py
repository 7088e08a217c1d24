"""Agents of third-party frameworks: each solves a problem through the real server, and its tokens become a training row."""

from __future__ import annotations

import pytest

from areno.config.hooks import AGENT_HOOK, load_hook
from tests.agentic.stage import open_trainer
from tests.examples import scripted

FOLDER = scripted.FOLDER / "frameworks"
AGENTS = {"openai_agents_sdk": "agents", "langchain_agent": "langchain_openai", "anthropic_messages": "anthropic"}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = scripted.untrained(tmp_path_factory.mktemp("model"), scripted.course("calculator"))
    with open_trainer(folder) as opened:
        yield opened


@pytest.mark.parametrize("name", list(AGENTS))
def test_an_agent_solves_a_problem_and_all_its_tokens_are_recorded(name, trainer):
    pytest.importorskip(AGENTS[name])
    agent = load_hook(str(FOLDER / f"{name}.py"), AGENT_HOOK)
    row, messages, tools = scripted.played(scripted.course("calculator"), 5)
    sample = scripted.perform(trainer, agent, row, scripted.lines_of(trainer, messages, tools))
    assert scripted.plain(sample.record.messages) == scripted.plain(messages)
    assert sample.forks == []
    [trained] = sample.rows
    tokens = [token for turn in sample.turns for token in turn.tokens]
    assert [token for token, own in zip(trained.tokens, trained.sampled, strict=True) if own] == tokens
    assert scripted.rewarded(scripted.reward("calculator"), sample.record) == 1.0
