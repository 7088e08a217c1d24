"""SGLang's calls against a stand-in server that speaks its documented protocol; SGLang itself needs a GPU."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.errors import EngineError, UsageError
from areno.rollouts.fleet.fleet import FleetOptions, RolloutFleet
from areno.rollouts.fleet.router import RequestRouter
from areno.rollouts.servers.command_line import ServerOptions
from areno.rollouts.servers.replica import ExternalServer, ServerReplica
from areno.rollouts.servers.sglang_client import SglangCalls
from areno.types import Request, SamplingParams
from tests.experiments.fleet.support import wait_until
from tests.support.stubs import JsonAnswers

PROMPT = [5, 6, 7]
FAILS = 13
"""A seed for which the server's answer is incomplete."""


class Protocol(JsonAnswers, BaseHTTPRequestHandler):
    """Answers 10, 11, 12, ... with log-probs -0.1, -0.2, ...; a weight update changes the version of later answers."""

    def do_GET(self):
        self.answer(
            {"context_length": 64, "weight_version": self.server.version} if self.path == "/server_info" else {},
            503 if self.server.down else 200,
        )

    def do_POST(self):
        body = self.body()
        self.server.heard.append((self.path, body))
        if self.server.fails_at == self.path:
            self.server.fails_at, self.server.down = "", True
        if self.server.down:
            self.answer({"message": "the engine died"}, 503)
        elif self.path == "/generate" and body.get("lora_path", "") not in self.server.adapters:
            self.answer({"message": "the adapter is not loaded"}, 400)
        elif self.path == "/generate":
            self.answer(self.generated(body))
        elif self.path == "/abort_request":
            self.server.aborted.set()
            self.answer({})
        elif self.path == "/update_weights_from_disk":
            whole = "broken" not in body["model_path"]
            self.server.version = body["weight_version"] if whole else self.server.version
            self.answer({"success": whole, "message": "" if whole else "no such folder"}, 200 if whole else 400)
        else:
            if self.path == "/load_lora_adapter":
                self.server.adapters.add(body["lora_name"])
            elif self.path == "/unload_lora_adapter":
                self.server.adapters.remove(body["lora_name"])
                time.sleep(0.05)
            self.answer({"message": "", "status": "ok", "success": True})

    def generated(self, body):
        if body.get("logprob_start_len") == 0:
            entries = [
                [None, PROMPT[0], None],
                *([-0.5 * place, token, None] for place, token in enumerate(PROMPT[1:], 1)),
            ]
            return {"output_ids": [1], "meta_info": {"input_token_logprobs": entries}}
        count, reason = body["sampling_params"]["max_new_tokens"], {"type": "length"}
        if body["sampling_params"]["sampling_seed"] == FAILS:
            return {"output_ids": []}
        if count == 40:  # the server aborts by itself
            count, reason = 2, {"type": "abort", "message": "retracted"}
        if count == 50:  # runs until it is aborted
            self.server.aborted.wait(10)
            count, reason = 2, {"type": "abort", "message": "aborted"}
        tokens = list(range(10, 10 + count))
        spans = [{"version": "0", "start": 0, "end": 1}, {"version": self.server.version, "start": 1, "end": count}]
        logprobs = [[-0.1 * (place + 1), token, None] for place, token in enumerate(tokens)]
        meta = {"finish_reason": reason, "output_token_logprobs": logprobs, "weight_versions": spans}
        return {"output_ids": tokens, "meta_info": meta}


@pytest.fixture
def server():
    found = ThreadingHTTPServer(("127.0.0.1", 0), Protocol)
    found.heard, found.version, found.aborted = [], "0", threading.Event()
    found.fails_at, found.down, found.adapters = "", False, {""}
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def join(server, checkpoint):
    url = f"http://127.0.0.1:{server.server_address[1]}"
    lost = ExternalServer(lambda _: None)
    return ServerReplica(str(checkpoint), url, SglangCalls(), lost, startup_s=5, timeout_s=20, vocab_size=100)


@pytest.fixture
def replica(server, tiny_checkpoint):
    made = join(server, tiny_checkpoint)
    yield made
    made.close()


def ask(replica, tokens=3, **sampling):
    return replica.submit([Request(PROMPT, SamplingParams(max_new_tokens=tokens, **sampling), [7])])[0]


def test_an_answer_has_tokens_log_probs_and_versions(replica, server):
    server.version = "4"
    heard = []
    request = Request(
        PROMPT, SamplingParams(max_new_tokens=3, temperature=0.5, top_k=9), [7, 8], lambda *one: heard.append(one)
    )
    first, second = replica.submit([request])[0].result(10).sequences
    assert first.resp_tokens == second.resp_tokens == [10, 11, 12]
    assert first.resp_logprobs == pytest.approx([-0.1, -0.2, -0.3])
    assert (first.versions, first.finish_reason, first.temperature) == ([0, 4, 4], "length", 0.5)
    assert [(sample, token.token) for sample, token in heard] == [(n, t) for n in (0, 1) for t in (10, 11, 12)]
    asked = [body for path, body in server.heard if path == "/generate"]
    assert sorted(body["sampling_params"]["sampling_seed"] for body in asked) == [7, 8]
    assert asked[0]["input_ids"] == PROMPT
    assert asked[0]["return_logprob"] is True
    assert {"max_new_tokens": 3, "temperature": 0.5, "top_k": 9, "top_p": 1.0}.items() <= asked[0][
        "sampling_params"
    ].items()


def test_a_server_that_was_started_without_a_weight_version_has_version_0(server, tiny_checkpoint):
    server.version = "default"
    with closing(join(server, tiny_checkpoint)) as replica:
        assert ask(replica).result(10).sequences[0].versions == [0, 0, 0]
    server.version = "best-model"
    with pytest.raises(
        UsageError, match="has the weight version 'best-model', which is not a number; start the server with"
    ):
        join(server, tiny_checkpoint)


def test_a_cancelled_request_returns_the_tokens_so_far(replica):
    future = ask(replica, 50)
    time.sleep(0.2)
    replica.cancel(future)
    answer = future.result(10).sequences[0]
    assert (answer.finish_reason, answer.resp_tokens) == ("abort", [10, 11])


def test_an_answer_that_the_server_aborted_is_an_error_and_not_a_short_answer(replica):
    with pytest.raises(EngineError, match=r"SGLang ended an answer early \(finish reason abort\)"):
        ask(replica, 40).result(10)


def test_a_failed_sample_aborts_the_others_of_its_request(replica, server):
    [future] = replica.submit([Request(PROMPT, SamplingParams(max_new_tokens=50), [7, FAILS])])
    with pytest.raises(EngineError):
        future.result(5)
    asked = {
        body["sampling_params"]["sampling_seed"]: body["rid"] for path, body in server.heard if path == "/generate"
    }
    wait_until(lambda: ("/abort_request", {"rid": asked[7]}) in server.heard, 5)
    assert ask(replica).result(10).sequences[0].resp_tokens == [10, 11, 12]


def test_a_closed_replica_has_closed_its_connections(server, tiny_checkpoint):
    replica = join(server, tiny_checkpoint)
    running = ask(replica, 50)
    replica.close()
    assert replica._http.is_closed
    with pytest.raises(EngineError, match="the replica is closed"):
        running.result(0)


def test_a_grammar_fails_only_its_own_request(replica):
    router = RequestRouter()
    router.enter(0, replica)
    sampling = SamplingParams(max_new_tokens=3)
    [refused] = router.submit([Request(PROMPT, sampling, [7], constraint=lambda _: None)])
    with pytest.raises(EngineError, match="SGLang replicas do not support grammars"):
        refused.result(10)
    assert router.unfinished(0) == 0
    assert router.submit([Request(PROMPT, sampling, [7])])[0].result(10).sequences[0].resp_tokens == [10, 11, 12]


def test_weights_change_between_two_tokens_and_a_failure_is_reported(replica, server):
    replica.take_over(Path("/weights/v3"), 3)
    paths = [path for path, _ in server.heard]
    assert paths[-3:] == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert server.heard[-3][1] == {"mode": "retract"}
    assert server.heard[-2][1]["weight_version"] == "3"
    assert ask(replica).result(10).sequences[0].versions == [0, 3, 3]
    with pytest.raises(EngineError, match="no such folder"):
        replica.take_over(Path("/weights/broken"), 4)
    assert replica.probe(PROMPT, 1) == (PROMPT, [-0.5, -1.0])


def test_a_joined_server_is_one_replica(server, tiny_checkpoint, tmp_path):
    url = f"http://127.0.0.1:{server.server_address[1]}"
    options = FleetOptions(log_folder=tmp_path, server=ServerOptions(product="sglang", addresses=(url,)))
    with closing(RolloutFleet(str(tiny_checkpoint), EngineConfig(), options)) as fleet:
        with pytest.raises(UsageError, match=f"--add {url} is already a replica"):
            fleet.resize(2, [f"{url}/"])
        with pytest.raises(UsageError, match=r"--add http://127\.0\.0\.1:1 is repeated"):
            fleet.resize(3, ["http://127.0.0.1:1", "http://127.0.0.1:1/"])
        assert fleet.size() == 1


@pytest.mark.parametrize(
    ("arguments", "limit"), [((), "0.3"), (("--dtype", "float32"), "0.01"), (("--dtype=float32",), "0.01")]
)
def test_the_limit_of_the_log_prob_gap_depends_on_the_dtype(server, tiny_checkpoint, tmp_path, arguments, limit):
    url = f"http://127.0.0.1:{server.server_address[1]}"
    joined = ServerOptions(product="sglang", addresses=(url,), arguments=arguments)
    with (
        closing(Engine(str(tiny_checkpoint), EngineConfig())) as trainer,
        closing(
            RolloutFleet(str(tiny_checkpoint), EngineConfig(), FleetOptions(log_folder=tmp_path, server=joined))
        ) as fleet,
        pytest.raises(EngineError, match=rf"\(limit: {limit}\)"),
    ):
        fleet.update_weights(trainer, 1, verify=True)


def test_a_server_that_dies_before_its_weights_are_verified_is_restarted(server, tiny_checkpoint, tmp_path):
    url = f"http://127.0.0.1:{server.server_address[1]}"
    joined = ServerOptions(product="sglang", addresses=(url,))
    options = FleetOptions(log_folder=tmp_path, server=joined, backoff_s=0.1)
    with (
        closing(Engine(str(tiny_checkpoint), EngineConfig())) as trainer,
        closing(RolloutFleet(str(tiny_checkpoint), EngineConfig(), options)) as fleet,
    ):
        server.fails_at = "/generate"
        assert fleet.update_weights(trainer, 1, verify=True).logprob_gap is None
        assert server.version == "1"
        server.version, server.down = "0", False  # a new process of the server
        wait_until(lambda: fleet.health().restarts == 1 and fleet.health().replicas[0].worker.state == "ready")
        assert server.version == "1"


def test_an_adapter_has_its_version_in_its_name(replica, server):
    replica.take_over(Path("/a/1"), 1, "mine")
    replica.take_over(Path("/a/2"), 2, "mine")
    replica.take_over(Path("/a/3"), 3, "mine")
    calls = [(path, body["lora_name"]) for path, body in server.heard if "lora" in path]
    assert calls == [
        ("/load_lora_adapter", "mine-v1"),
        ("/load_lora_adapter", "mine-v2"),
        ("/unload_lora_adapter", "mine-v1"),
        ("/load_lora_adapter", "mine-v3"),
    ]
    ask(replica).result(10)
    assert server.heard[-1][1]["lora_path"] == "mine-v3"


def test_no_request_names_an_adapter_that_is_not_loaded(replica):
    replica.take_over(Path("/a/0"), 0, "mine")
    ended, answers = threading.Event(), [0] * 4

    def ask_until_the_end(agent: int) -> None:
        while not ended.is_set():
            ask(replica).result(10)
            answers[agent] += 1

    with ThreadPoolExecutor(4) as threads:
        agents = [threads.submit(ask_until_the_end, agent) for agent in range(4)]
        for version in range(1, 8):
            before = list(answers)
            replica.take_over(Path(f"/a/{version}"), version, "mine")
            wait_until(lambda before=before: ended.is_set() or all(map(int.__gt__, answers, before)))
        ended.set()
        for agent in agents:
            agent.result(20)


def test_a_lost_server_is_marked_failed_before_its_request_fails(replica, server):
    server.shutdown()
    server.server_close()
    with pytest.raises(EngineError):
        ask(replica).result(20)
    assert replica.workers.failed
