"""Agents' requests to a fleet: grammars reach the processes of the replicas, and a failed request affects no other request."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from areno.engine.engine import Engine
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from areno.rollouts.conversation.agent_server import AgentServer
from areno.serving.server import ServerThread
from areno.serving.service import Service, ServingConfig
from areno.types import Request, SamplingParams
from tests.experiments.fleet.conftest import config
from tests.experiments.fleet.support import generated, wait_until
from tests.serving.running import WEATHER, save_sharp_checkpoint
from tests.support.stubs import BrokenGrammar

QUESTION = [{"role": "user", "content": "hi"}]
COLORS = {"type": "json_schema", "json_schema": {"name": "color", "schema": {"enum": ["red", "green"]}}}
LONG = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_sharp_checkpoint(tmp_path_factory.mktemp("ckpt") / "sharp", heads=4)


class Agent:
    """A client of an agent server."""

    def __init__(self, server: AgentServer) -> None:
        self.session, self.url = server.open(seed=1), server.url

    def post(self, **body) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.session.api_key}"}
        body = {"messages": QUESTION, "temperature": 0, **body}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=100)

    def message(self, **body) -> dict:
        answer = self.post(**body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]


@contextmanager
def agent_of(engine):
    server = AgentServer(engine, SamplingParams(max_new_tokens=60), None, model_name="default")
    try:
        yield Agent(server)
    finally:
        server.stop()


def kill(fleet) -> None:
    before = generated(fleet)
    wait_until(lambda: generated(fleet) > before + 20)
    os.kill(fleet.health().replicas[0].worker.pids[0], signal.SIGKILL)


@pytest.mark.parametrize("ranks", [1, 2])
def test_grammars_constrain_replicas_in_other_processes(open_fleet, checkpoint, ranks):
    bodies = [{"response_format": COLORS}, {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 300}]
    engine = Engine(str(checkpoint), config())
    with agent_of(open_fleet(path=checkpoint, tp_size=ranks)) as far, agent_of(engine) as near:
        color, call = (far.message(**body) for body in bodies)
        assert json.loads(color["content"]) in ("red", "green")
        arguments = json.loads(call["tool_calls"][0]["function"]["arguments"])
        assert arguments.keys() == {"city", "days"}
        assert arguments["city"] in ("Paris", "Rome")
        for body in bodies:
            near.message(**body)
        assert [turn.tokens for turn in far.session.recorder.turns] == [
            turn.tokens for turn in near.session.recorder.turns
        ]
        assert [turn.forced for turn in far.session.recorder.turns] == [
            turn.forced for turn in near.session.recorder.turns
        ]
    engine.close()


def test_metrics_remain_after_the_failure_of_an_engine(checkpoint):
    group = EngineGroup(str(checkpoint), config(), Layout(1, 1))
    with ServerThread(Service(ServingConfig(model_name="default"), group)) as server:
        os.kill(group.workers.pids[0], signal.SIGKILL)
        failed = httpx.post(f"{server.base_url}/chat/completions", json={"messages": QUESTION}, timeout=60)
        assert failed.status_code in (500, 503)
        wait_until(lambda: group.failed)
        page = httpx.get(f"{server.url}/metrics")
    group.close()
    assert page.status_code == 200
    assert f'areno_requests_total{{endpoint="/v1/chat/completions",status="{failed.status_code}"}} 1.0' in page.text


def test_a_grammar_that_fails_in_a_replica_is_a_bad_request(open_fleet, checkpoint, monkeypatch):
    with agent_of(open_fleet(path=checkpoint)) as agent:
        with monkeypatch.context() as patch:
            patch.setattr("areno.text.grammar.json_object_constraint", lambda *_, **__: BrokenGrammar)
            refused = agent.post(response_format={"type": "json_object"}, ignore_eos=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "grammar_failed")
        assert "out of fuel; simplify the schema" in refused.json()["error"]["message"]
        assert agent.message()["role"] == "assistant"


def test_a_request_that_cannot_be_sent_fails_alone_and_does_not_stay_open(open_fleet, checkpoint):
    fleet, lock = open_fleet(path=checkpoint, replicas=2), threading.Lock()
    sampling = SamplingParams(max_new_tokens=2)
    for _ in range(2):
        [refused] = fleet.submit([Request([1, 2], sampling, [1], constraint=lambda _: lock)])
        with pytest.raises(TypeError, match="pickle"):
            refused.result(10)
    assert [replica.unfinished for replica in fleet.health().replicas] == [0, 0]
    fleet.resize(1)
    assert fleet.submit([Request([1, 2], sampling, [1])])[0].result(30).sequences[0].resp_tokens


def test_the_death_of_a_replica_restarts_answers_but_not_streams_and_ends_no_agent(open_fleet, checkpoint):
    fleet = open_fleet(path=checkpoint)
    with agent_of(fleet) as agent, ThreadPoolExecutor() as threads:
        expected = agent.message(**LONG)["content"]
        answer = threads.submit(agent.message, **LONG)
        kill(fleet)
        assert answer.result(100)["content"] == expected
        first, second = agent.session.recorder.turns
        assert second.tokens == first.tokens
        stream = threads.submit(agent.post, **LONG, stream=True)
        kill(fleet)
        assert "died while streaming the answer" in stream.result(100).text
        assert agent.message(**LONG)["content"] == expected
    assert fleet.health().restarts == 2
