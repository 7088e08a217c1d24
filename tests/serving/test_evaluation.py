"""``areno eval`` of a model behind a URL: areno's own server, compared with the checkpoint that it serves."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from areno.cli.main import main
from tests.support.stubs import JsonAnswers

REWARD = """
def reward_fn(record):
    assert record.messages[-1]["content"] == record.completion
    return {"length": len(record.completion), "question": float("?" in record.prompt)}
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("weather?", "count", "two calls?")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measured(capsys, ckpt, *more):
    arguments = ["--dataset-path", "data.jsonl", "--reward-fn-path", "reward.py", "--max-new-tokens", "40", "--json"]
    assert main(["eval", "--ckpt", str(ckpt), *arguments, *more]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]


def test_a_server_gets_the_results_of_the_model_that_it_serves(task, taught, taught_checkpoint, tmp_path, capsys):
    there = measured(capsys, taught.base_url, "--output", "there.jsonl")
    here = measured(capsys, taught_checkpoint, "--output", "here.jsonl")
    # Chat endpoints remove reasoning and tool calls from the text; answers without them are the same.
    texts = [
        [json.loads(line)["completion"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("there.jsonl", "here.jsonl")
    ]
    assert texts[0][1] == texts[1][1] != ""
    for name in ("num_prompts", "num_samples", "response_len_mean", "truncated_ratio", "reward_errors"):
        assert there[name] == here[name]
    assert there["reward_parts/question"] == pytest.approx(2 / 3)
    assert set(there) == set(here)


class Counting(JsonAnswers, BaseHTTPRequestHandler):
    """A stub, because areno's server reports all lengths. It answers each prompt, and reports those of ``lengths``."""

    def do_GET(self):
        self.answer({"data": [{"id": "stub"}]})

    def do_POST(self):
        body = self.body()
        length = self.server.lengths.get(body["messages"][0]["content"])
        usage = {} if length is None else {"usage": {"completion_tokens": length}}
        self.answer({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}], **usage})


@pytest.mark.parametrize("lengths", [{"weather?": 4, "two calls?": 0}, {}])
def test_answers_whose_length_a_server_does_not_report_have_no_length(task, capsys, tmp_path, lengths):
    with ThreadingHTTPServer(("127.0.0.1", 0), Counting) as stub:
        stub.lengths = lengths
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        metrics = measured(capsys, f"http://127.0.0.1:{stub.server_port}/v1", "--output", "out.jsonl")
        stub.shutdown()
    assert metrics.get("response_len_mean") == (2.0 if lengths else None)
    assert (metrics["num_samples"], metrics["reward_parts/length"]) == (3, 3.0)
    found = [json.loads(line)["response_len"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found == [lengths.get(text) for text in ("weather?", "count", "two calls?")]


class Unlisted(Counting):
    """Lists no models, as some proxies."""

    def do_GET(self):
        self.send_error(404)


def test_a_server_without_a_list_of_models_needs_the_name_of_one(task, capsys):
    with ThreadingHTTPServer(("127.0.0.1", 0), Unlisted) as stub:
        stub.lengths = {}
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{stub.server_port}/v1"
        assert measured(capsys, url, "--model", "stub")["num_samples"] == 3
        assert main(["eval", "--ckpt", url, "--dataset-path", "data.jsonl", "--reward-fn-path", "reward.py"]) != 0
        stub.shutdown()
    assert "no OpenAI-compatible server answers (HTTPStatusError" in capsys.readouterr().err


def test_samples_have_different_seeds_and_are_reproducible(task, server, capsys, tmp_path):
    more = (
        "--n-samples",
        "3",
        "--temperature",
        "1.0",
        "--seed",
        "4",
        "--max-running-prompts",
        "2",
        "--output",
        "out.jsonl",
    )
    first = measured(capsys, server.base_url, "--model", "tiny", *more)
    texts = [json.loads(line)["completion"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(set(texts[:3])) == 3
    assert first["num_samples"] == 9
    assert first["pass@2"] == 1.0
    again = measured(capsys, server.base_url, *more)
    assert again["rewards_mean"] == first["rewards_mean"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--top-k", "5", "--temperature", "1"], "--top-k 5 has no effect if --ckpt is the address of a server"),
        (["--model", "other"], "--ckpt http://127.0.0.1"),
    ],
)
def test_options_that_a_server_does_not_support_are_errors(task, server, capsys, more, message):
    arguments = ["--dataset-path", "data.jsonl", "--reward-fn-path", "reward.py"]
    assert main(["eval", "--ckpt", server.base_url, *arguments, *more]) != 0
    assert message in capsys.readouterr().err


def test_an_unreachable_server_and_a_model_name_without_a_server_are_errors(task, sharp_checkpoint, capsys):
    arguments = ["--dataset-path", "data.jsonl", "--reward-fn-path", "reward.py"]
    for address in ("http://127.0.0.1:9/v1", "http://localhost:80a/v1"):
        for more in ([], ["--model", "tiny"]):
            assert main(["eval", "--ckpt", address, *arguments, *more]) != 0
            assert f"--ckpt {address}: no OpenAI-compatible server answers (" in capsys.readouterr().err
    assert main(["eval", "--ckpt", str(sharp_checkpoint), "--model", "tiny", *arguments]) != 0
    assert "--model tiny has no effect on a local model" in capsys.readouterr().err
