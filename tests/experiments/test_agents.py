"""Agents that query the real server with real clients, in this process and in processes that are killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import httpx
import openai
import pytest

from areno.errors import AgentError, UsageError
from areno.rollouts.dispatcher import BatchDispatcher
from areno.rollouts.engine_client import EngineClient
from areno.rollouts.staleness import StalenessManager
from areno.rollouts.tasks import RolloutStoppedError
from areno.rollouts.trajectory import check_trajectory, samples_of
from areno.rollouts.workflows.agents import DEFAULTS, AgentWorkflow
from areno.rollouts.workflows.base import as_trajectory
from areno.rollouts.workflows.processes import AgentProcesses
from areno.rollouts.workflows.resolve import resolve_workflow
from tests.experiments.stage import Generation
from tests.experiments.test_workflows import gone

ROW = {"prompt": "What is 2 plus 2?", "answer": "4"}
SHORT = Generation(max_new_tokens=6, ignore_eos=True)


class Talker:
    """Talks for some turns; `how` says what it returns."""

    def __init__(self, turns: int = 3, how: str = "number") -> None:
        self.turns, self.how = turns, how

    async def run(self, data: dict[str, Any], base_url: str, api_key: str, http_client: Any = None) -> Any:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": data["prompt"]}]
        ids = []
        async with client:
            for turn in range(self.turns):
                answer = await client.chat.completions.create(model="default", messages=messages)
                ids.append(answer.id)
                messages += [answer.choices[0].message, {"role": "user", "content": f"Again, {turn}."}]
        if self.how == "posted":
            root, headers = base_url.removesuffix("/v1"), {"Authorization": f"Bearer {api_key}"}
            async with httpx.AsyncClient() as http:
                for body in ({"interaction_id": ids[0], "reward": 4.0}, {"reward": 2.0}):
                    (await http.post(f"{root}/rl/set_reward", json=body, headers=headers)).raise_for_status()
            return None
        return {
            "number": 1.0,
            "by id": {ids[0]: 4.0, ids[-1]: 2.0} if ids else {},
            "text": "good",
            "none": None,
            "bad id": {"x": 1.0},
            "nan": float("nan"),
            "infinite": {ids[0]: float("inf")} if ids else {},
        }[self.how]


class Reader:
    """Finds address and key in the environment, like programs that know nothing about training."""

    async def run(self, data: dict[str, Any]) -> float:
        import anthropic

        async with anthropic.AsyncAnthropic(max_retries=0) as client:
            text = [{"role": "user", "content": data["prompt"]}]
            await client.messages.create(model="default", max_tokens=5, messages=text)
        async with openai.AsyncOpenAI(max_retries=0) as client:
            await client.chat.completions.create(model="default", messages=text, max_tokens=4)
        return 0.5 if "torch" not in __import__("sys").modules else -1.0


class Blocker:
    """Blocks its process forever, and leaves a child process running."""

    async def run(self, data: dict[str, Any]) -> float:
        import subprocess
        import sys

        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(data["pids"], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        while True:
            time.sleep(1000)


def run(engine: Any, agent: Any, data: dict[str, Any] = ROW, **options: Any) -> Any:
    async def main() -> Any:
        workflow = AgentWorkflow(agent, SHORT, replace(DEFAULTS, **options))
        try:
            return await workflow.arun_episode(EngineClient(engine), data)
        finally:
            await workflow.aclose()

    return asyncio.run(main())


def test_every_answer_is_a_sample_with_its_own_prompt(engine):
    found = list(run(engine, Talker(), turn_discount=0.5).values())
    assert [one.reward for one in found] == [0.25, 0.5, 1.0]
    assert [sum(one.row.trained) for one in found] == [6, 6, 6]
    for one, after in itertools.pairwise(found):
        assert after.row.tokens[: len(one.row.tokens)] == one.row.tokens  # extends the same tokens
        assert not any(after.row.trained[: len(one.row.tokens)])
    assert found[-1].messages[0]["content"] == ROW["prompt"]
    trajectory = as_trajectory(run(engine, Talker()), check=True)
    assert trajectory is not None
    assert trajectory["rewards"].tolist() == [1.0, 1.0, 1.0]
    assert trajectory["num_turns"].tolist() == [3, 3, 3]


def test_a_conversation_is_one_row_when_concatenated(engine):
    trajectory = as_trajectory(run(engine, Talker(how="by id"), export_style="concat", turn_discount=0.5), check=True)
    assert trajectory is not None
    (row,) = samples_of(trajectory)
    assert sum(row["loss_mask"]) == 18
    assert row["rewards"] == 2.0
    assert [version >= 0 for version in row["versions"]] == [bool(mark) for mark in row["loss_mask"]]


@pytest.mark.parametrize("how", ["by id", "posted"])
def test_rewards_may_be_given_to_single_answers(engine, how):
    found = list(run(engine, Talker(how=how), turn_discount=0.5).values())
    assert [one.reward for one in found] == [4.0 + 0.5 * (0 + 0.5 * 2.0), 0.5 * 2.0, 2.0]


@pytest.mark.parametrize(
    ("how", "returns"), [("number", [0.5, 1.0]), ("posted", [4.0 + 0.5 * 2.0, 2.0]), ("by id", [4.0 + 0.25 * 2.0, 1.0])]
)
def test_a_reward_is_not_lost_in_an_answer_that_has_no_tokens(engine, how, returns):
    whole = list(run(engine, Talker(how=how)).values())
    assert len(whole) == 3
    full = len(whole[-1].row.tokens) - 6  # the prompt of the last answer fills the context
    found = list(run(engine, Talker(how=how), turn_discount=0.5, engine_max_tokens=full).values())
    assert [one.row.tokens for one in found] == [one.row.tokens for one in whole[:2]]
    assert [one.reward for one in found] == returns


@pytest.mark.parametrize("style", ["individual", "concat"])
def test_an_answer_that_a_grammar_forced_has_no_row(engine, style):
    class Obedient:
        async def run(self, data: dict[str, Any], base_url: str, api_key: str) -> float:
            form = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"const": 1}}}
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                for prompt, options in ((data["prompt"], {}), ("Say 1.", {"response_format": form})):
                    messages: list[Any] = [{"role": "user", "content": prompt}]
                    answer = await client.chat.completions.create(model="default", messages=messages, **options)  # type: ignore[call-overload]
            assert answer.choices[0].message.content == "1"
            return 1.0

    (only,) = run(engine, Obedient(), export_style=style, turn_discount=0.5).values()
    assert (sum(only.row.trained), only.reward) == (6, 0.5)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (Talker(how="text"), "returned str 'good'"),
        (Talker(how="none"), "neither returned nor set a reward"),
        (Talker(how="bad id"), "this session has no answer with the id 'x'"),
        (Talker(how="nan"), "returned the reward nan; return finite numbers"),
        (Talker(how="infinite"), "returned the reward inf; return finite numbers"),
        (Talker(turns=0), "ended without a model answer"),
    ],
)
def test_an_agent_without_a_usable_reward_is_an_error(engine, agent, message):
    with pytest.raises((AgentError, TypeError, ValueError), match=message):
        run(engine, agent)


def test_a_late_agent_is_cancelled(engine):
    class Sleeper:
        async def run(self, data: dict[str, Any], **extra: Any) -> float:
            await asyncio.sleep(1000)
            return 1.0

    with pytest.raises(AgentError, match=r"Sleeper did not end within 0.2 s \(agent.session_timeout_seconds\)"):
        run(engine, Sleeper(), session_timeout_seconds=0.2)


def test_a_session_ends_with_its_episode(engine):
    kept = {}

    class Keeper(Talker):
        async def run(self, data: dict[str, Any], base_url: str, api_key: str, http_client: Any = None) -> Any:
            kept.update(url=base_url, key=api_key)
            return await super().run(data, base_url, api_key, http_client)

    async def main() -> int:
        workflow = AgentWorkflow(Keeper(turns=1), SHORT)
        try:
            await workflow.arun_episode(EngineClient(engine), ROW)
            async with httpx.AsyncClient(base_url=kept["url"]) as http:
                headers = {"Authorization": f"Bearer {kept['key']}"}
                answer = await http.post("/chat/completions", json={"messages": []}, headers=headers)
                return answer.status_code
        finally:
            await workflow.aclose()

    assert asyncio.run(main()) == 401


def test_a_subprocess_finds_the_model_in_its_environment(engine):
    found = list(run(engine, Reader(), mode="subproc", subproc_max_workers=1).values())
    assert [sum(one.row.trained) for one in found] == [5, 4]
    assert found[-1].reward == 0.5


def test_a_blocked_subprocess_is_killed_with_its_children(engine, tmp_path: Path):
    pids = tmp_path / "pids"
    with pytest.raises(AgentError, match=r"did not end within 4 s"):
        run(engine, Blocker(), {"pids": str(pids)}, mode="subproc", session_timeout_seconds=4)
    assert all(gone(int(pid)) for pid in pids.read_text().split())


@pytest.mark.parametrize("answer", ["garbage", '["value", "good"]', '["error", 5]', '{"value": 1}'])
def test_a_process_that_violates_the_protocol_costs_one_episode_and_is_replaced(answer):
    class Forger:
        async def run(self, data: dict[str, Any]) -> float:
            import gc

            from areno.frames import Frames

            frames = next(each for each in gc.get_objects() if isinstance(each, Frames))
            if data["answer"] == "garbage":
                frames._socket.send(b"garbage")
            elif data["answer"]:
                frames.send(data["answer"].encode())
            return 1.0

    async def ask(text: str) -> Any:
        return await processes.run(cloudpickle.dumps(Forger()), {"answer": text}, {}, {}, 60)

    async def both() -> None:
        with pytest.raises(AgentError, match="sent an invalid message"):
            await ask(answer)
        assert await ask("") == 1.0

    processes = AgentProcesses(1)
    try:
        asyncio.run(both())
    finally:
        processes.close()


def test_a_process_that_answers_while_the_pool_closes_is_closed_too(tmp_path):
    class Touching:
        async def run(self, data: dict[str, Any]) -> float:
            Path(data["file"]).touch()
            return 1.0

    async def close_during_the_answer() -> float:
        agent, data = cloudpickle.dumps(Touching()), {"file": str(tmp_path / "ran")}
        asked = asyncio.create_task(processes.run(agent, data, {}, {}, 60))
        await asyncio.sleep(0)
        while not (tmp_path / "ran").exists():
            time.sleep(0.01)  # blocks the event loop, which therefore learns of the answer after the close
        time.sleep(0.5)
        processes.close()
        return await asked

    before = len(os.listdir("/proc/self/fd"))
    processes = AgentProcesses(1)
    assert asyncio.run(close_during_the_answer()) == 1.0
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_subprocess_that_dies_or_raises_costs_one_episode(engine):
    class Dying:
        async def run(self, data: dict[str, Any], **extra: Any) -> float:
            if data["how"] == "die":
                os.kill(os.getpid(), 9)
            raise RuntimeError("my own mistake")

    with pytest.raises(AgentError, match=r"its worker process died \(SIGKILL\)"):
        run(engine, Dying(), {"how": "die"}, mode="subproc")
    with pytest.raises(AgentError, match=r"(?s)the agent failed: Traceback.*RuntimeError: my own mistake"):
        run(engine, Dying(), {"how": "raise"}, mode="subproc")


def test_batches_of_agents_keep_groups(engine):
    workflow = resolve_workflow(Talker(turns=2), SHORT, n_samples=2, agent=replace(DEFAULTS, export_style="concat"))
    staleness = StalenessManager(consumer_batch_size=2)
    with BatchDispatcher(EngineClient(engine), staleness, check_trajectory_format=True) as dispatcher:
        batch = dispatcher.prepare_batch(iter([ROW, {**ROW, "prompt": "What is 3 plus 3?"}] * 3), workflow)
    for trajectory in batch.trajectories:
        check_trajectory(trajectory)
        first, second = (row["input_ids"] for row in samples_of(trajectory))
        assert first[:5] == second[:5]
        assert first != second  # each sample has its own seed


def test_an_agent_that_always_fails_stops_the_run(engine):
    workflow = resolve_workflow(Talker(how="none"), SHORT)
    with (
        BatchDispatcher(
            EngineClient(engine), StalenessManager(consumer_batch_size=2), max_errors_in_a_row=3
        ) as dispatcher,
        pytest.raises(RolloutStoppedError, match="neither returned nor set a reward"),
    ):
        dispatcher.prepare_batch(iter([ROW] * 50), workflow)


@pytest.mark.parametrize(
    ("agent", "options", "message"),
    [
        (object(), {}, "is not an agent; define the method"),
        (Talker(), {"mode": "online"}, "agent.mode 'online' is not supported"),
        (Talker(), {"export_style": "tree"}, "agent.export_style 'tree' is unknown"),
    ],
)
def test_wrong_options_are_named(agent, options, message):
    with pytest.raises(UsageError, match=message):
        AgentWorkflow(agent, SHORT, replace(DEFAULTS, **options))
