"""Scripted runs of the examples: agents talk to a real session whose model gives scripted answers, good or bad."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.api.agentic.demonstrations import Course, Message, demonstrate, demonstration_rows
from areno.config.hooks import AGENT_HOOK, REWARD_HOOK, load_hook
from areno.types import RewardRecord

if TYPE_CHECKING:  # rules and rewards are tested without the engine, which takes seconds to import
    from areno import Trainer
    from areno.api.agentic import AgentSample

FOLDER = Path(__file__).parents[2] / "examples" / "agentic"
NAMES = ("tictactoe", "duelgrid", "shopping", "coding", "calculator")


@functools.cache
def module(path: Path) -> Any:
    """Import a program of the examples, always as the same module, so that its classes are the same too."""
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def course(name: str, variable: str = "EXPERT") -> Course:
    """What an example's expert demonstrates."""
    return getattr(module(FOLDER / name / "expert.py"), variable)


def agent(name: str, function: str = "run_agent") -> Any:
    """The agent, loaded as ``--agent-fn`` does."""
    spec = f"{FOLDER / name / 'run_agent.py'}:{function}"
    return load_hook(spec, AGENT_HOOK)


def reward(name: str, function: str = "reward_fn") -> Any:
    """The reward function, loaded as ``--reward-fn-path`` does."""
    spec = f"{FOLDER / name / 'reward.py'}:{function}"
    return load_hook(spec, REWARD_HOOK)


def rewarded(function: Any, record: RewardRecord) -> float:
    return asyncio.run(function(record))


def replayed(function: Any, data_row: dict[str, Any], messages: Sequence[Message]) -> float:
    """The reward of a made-up conversation."""
    return rewarded(function, RewardRecord(messages=list(messages), source_record=data_row))


def played(expert_course: Course, seed: int) -> tuple[dict[str, Any], list[Message], list[dict[str, Any]]]:
    """A data row, the expert's conversation about it, and the tools."""
    row, environment = expert_course.draw(random.Random(seed)), expert_course.make()
    messages, tools = asyncio.run(
        demonstrate(environment, row, expert_course.expert, max_turns=expert_course.max_turns)
    )
    return dict(row), messages, tools


def perform(
    trainer: Trainer, function: Any, row: dict[str, Any], lines: Sequence[str], max_new_tokens: int = 400
) -> AgentSample:
    """Let an agent work on one row, while the model gives the lines as answers."""
    from areno import SamplingParams
    from areno.api.agentic import AgentBatch, LossMaskPolicy
    from areno.api.agentic.collect import AgentRunner
    from tests.agentic.stage import Script

    tokenizer = trainer.get_tokenizer()
    engine = trainer.backend
    script, submit = Script(engine), engine.submit
    for line in lines:
        script.lines.append([*tokenizer(line, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])
    runner = AgentRunner(function, LossMaskPolicy(), tokenizer, timeout_s=300, retries=0)
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    try:
        with trainer.rollout_session(sampling_params=sampling, max_running_prompts=1, proxy=True) as ctx:
            collected = runner.collect(ctx.proxy, AgentBatch([row], [""], [[1]], 1))
    finally:
        assert engine.submit is submit
        del engine.submit
    assert not collected.errors, collected.errors
    assert not script.lines, "the agent sent fewer requests than there are lines"
    return collected.samples[0]


def lines_of(trainer: Trainer, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[str]:
    """What the model must say for the assistant's messages of a conversation."""
    return [row["response"] for row in demonstration_rows(trainer.get_tokenizer(), messages, tools)]


def untrained(folder: Path, expert_course: Course) -> Path:
    """The random model that a warm start begins with."""
    module(FOLDER / "warm_start.py").write_start(folder, expert_course, 96, 6, 0)
    return folder / "random"


def plain(messages: Sequence[Message]) -> list[tuple[Any, ...]]:
    """Messages without what differs between runs: call ids, and spaces in JSON."""
    shown = []
    for message in messages:
        functions = [call["function"] for call in message.get("tool_calls") or []]
        calls = [(function["name"], "".join(function["arguments"].split())) for function in functions]
        shown.append((message["role"], (message.get("content") or "").strip(), calls))
    return shown
