"""Effects of the settings of agents and session traces in small runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.errors import UsageError
from areno.rollouts.tasks import RolloutStoppedError
from tests.experiments.trainer_stage import InProcessTrainer, RolloutRun

AGENTS = "tests.experiments.settings_agents."


# -- agents ----------------------------------------------------------------------------------------------------------

AGENT = {
    "rollout.agent.agent_cls_path": AGENTS + "Talker",
    "actor.reward_norm": None,
    "train_dataset.batch_size": 1,
    "gconfig.n_samples": 1,
    "gconfig.max_tokens": 512,
}


def agent(**more: Any) -> dict[str, Any]:
    return AGENT | {f"rollout.agent.{name}": value for name, value in more.items()}


def test_an_agent_yields_a_row_per_turn_or_per_conversation(rl):
    each = rl(agent(turn_discount=0.5))
    assert [row["rewards"] for row in each.samples] == [0.25, 0.5, 1.0]
    assert [row["rewards"] for row in rl(agent()).samples] == [1.0, 1.0, 1.0]
    one = rl(agent(export_style="concat", chat_template_type="concat"))
    assert len(one.samples) == 1
    assert len(one.answers()[0]) == sum(map(len, each.answers()))


def test_engine_max_tokens_limits_a_conversation(rl):
    endless = {"gconfig.ignore_eos": True}
    longest = max(len(row["input_ids"]) for row in rl(agent() | endless).samples)
    cut = rl(agent(engine_max_tokens=longest - 3) | endless)
    assert max(len(row["input_ids"]) for row in cut.samples) == longest - 3


def test_an_agent_is_stopped_at_its_session_timeout(rl):
    with pytest.raises(RolloutStoppedError, match=r"1 s.*agent\.session_timeout_seconds"):
        given = {"workflow.kwargs": {"how": "sleeps", "turns": 1}, "workflow.path": "agent"}
        rl(agent(session_timeout_seconds=1) | given | {"train_dataset.batch_size": 4})


def test_rewards_may_come_after_the_agent_has_ended(rl):
    def run(seconds: float) -> RolloutRun:
        def late(trainer: InProcessTrainer) -> None:
            from tests.experiments.settings_agents import Talker

            trainer.train = lambda *_: InProcessTrainer.train(trainer, Talker(how="late", turns=1))  # type: ignore[method-assign]

        plain = {
            name: value for name, value in agent(set_reward_finish_timeout=seconds).items() if "cls_path" not in name
        }
        return rl(plain, watch=late)

    assert [row["rewards"] for row in run(2.0).samples] == [1.0]
    with pytest.raises(RolloutStoppedError, match="neither returned nor set a reward"):
        run(0.0)


def test_agents_run_inline_or_in_the_configured_number_of_processes(rl):
    given = {"rollout.agent.agent_cls_path": AGENTS + "Process", "gconfig.n_samples": 2}
    here = rl(agent() | given)
    assert {row["rewards"] for row in here.samples} == {float(torch.tensor(float(os.getpid())))}
    for workers in (1, 2):
        run = rl(agent(mode="subproc", subproc_max_workers=workers) | given)
        processes = {row["rewards"] for row in run.samples}
        assert len(processes) == workers
        assert float(os.getpid()) not in processes


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_named(rl, name):
    with pytest.raises(UsageError, match=rf"rollout\.agent\.{name} 'nonesuch' is unknown.*choose one of auto, "):
        rl({f"rollout.agent.{name}": "nonesuch"})  # also without an agent


def test_an_adapter_is_served_under_its_name(rl):
    pytest.importorskip("peft")

    def named(trainer: InProcessTrainer) -> None:
        from tests.experiments.settings_agents import Talker

        trainer.train = lambda *_: InProcessTrainer.train(trainer, Talker(how="named", turns=1))  # type: ignore[method-assign]

    plain = {name: value for name, value in AGENT.items() if "cls_path" not in name}
    assert rl({**plain, "actor.use_lora": True, "gconfig.lora_name": "mine"}, watch=named).steps == 1
    with pytest.raises(RolloutStoppedError):
        rl({**plain, "actor.use_lora": True}, watch=named)


# -- traces ----------------------------------------------------------------------------------------------------------


def sessions_of(run: RolloutRun) -> list[Path]:
    return list(run.folder.rglob("sessions-r*.jsonl"))


def test_sessions_are_written_when_asked_for(rl):
    assert not sessions_of(rl({"perf_tracer.session_tracer.enabled": False}))
    (path,) = sessions_of(rl({"perf_tracer.session_tracer.enabled": True}))
    assert len(path.read_text().splitlines()) >= 4


@pytest.mark.parametrize(("agent", "answers"), [("Talker", 3), ("Streamer", 1)])
def test_sessions_of_agents_have_what_the_server_generated_for_them(rl, agent, answers):
    given = {"rollout.agent.agent_cls_path": AGENTS + agent, "perf_tracer.session_tracer.enabled": True}
    (path,) = sessions_of(rl(given))
    found = [json.loads(line) for line in path.read_text().splitlines()]
    done = [one for one in found if one["status"] == "accepted"]
    assert len(done) >= 4
    for one in done:
        spans = one["phases"]["generate"]
        assert len(spans) == 2 * answers  # of both samples
        assert one["generate_s"] == pytest.approx(sum(span["end_ts"] - span["start_ts"] for span in spans)) != 0
        assert all(one["submit_ts"] <= span["start_ts"] <= span["end_ts"] <= one["finalized_ts"] for span in spans)


@pytest.mark.parametrize(("threshold", "written"), [(1, True), (1000, False)])
def test_sessions_are_written_at_the_flush_threshold(rl, threshold, written):
    found: list[bool] = []

    def look(trainer: InProcessTrainer) -> None:
        update = trainer._update

        def seen(*given: Any) -> Any:
            found.append(bool(list(trainer.run_dir.path.rglob("sessions-r*.jsonl"))))
            return update(*given)

        trainer._update = seen  # type: ignore[method-assign]

    given = {"perf_tracer.session_tracer": {"enabled": True, "flush_threshold": threshold}}
    rl(given, watch=look)
    assert found == [written]
