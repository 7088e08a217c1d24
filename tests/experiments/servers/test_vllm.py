"""Replicas that are real vLLM servers: tokens, log-probs, versions, weight updates during answers, and killed servers."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from areno.config.experiment.backend_sections import vLLMConfig
from areno.config.experiment.server_arguments import vllm_arguments
from areno.engine.engine import Engine
from areno.engine.model.adapter import AdapterOptions
from areno.errors import EngineError, UsageError
from areno.rollouts.fleet import weight_update
from areno.rollouts.fleet.fleet import FleetOptions, RolloutFleet
from areno.rollouts.servers.command_line import ServerOptions
from areno.rollouts.servers.scorer import ServerScorer
from areno.types import Request, SamplingParams
from examples.experiments import toy
from tests.experiments.fleet.conftest import config
from tests.experiments.fleet.support import wait_until
from tests.support.cli import areno
from tests.support.tiny import save_tiny_checkpoint
from tests.support.vllm import VLLM, make_wide_toy, needs_vllm

MANY = range(16)
"""Seeds of enough samples to take seconds."""

pytestmark = [pytest.mark.long, needs_vllm]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Tied embeddings, of which vLLM on a CPU keeps a stale copy; heads of a size that it supports.

    Large enough that long answers take many seconds: updates arrive before an answer ends, also on a busy machine.
    """
    return save_tiny_checkpoint(
        tmp_path_factory.mktemp("ckpt") / "qwen3",
        "qwen3",
        heads=16,
        hidden=1024,
        layers=6,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="module")
def fleet(policy, tmp_path_factory):
    section = vLLMConfig(enforce_eager=True, max_num_seqs=16)
    arguments = vllm_arguments(section, dtype="float32", context_length=512, gpu=False)
    server = ServerOptions(product="vllm", arguments=tuple(arguments), command=(str(VLLM), "serve"))
    options = FleetOptions(replicas=1, log_folder=tmp_path_factory.mktemp("logs"), server=server, backoff_s=0.1)
    with_fleet = RolloutFleet(str(policy), config(), options)
    yield with_fleet
    with_fleet.close()


@pytest.fixture
def trainer(policy):
    engine = Engine(str(policy), config())
    yield engine
    engine.close()


def perturb(engine, scale=0.02, seed=1):
    """Change the weights as training could."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in engine.actor.model.module.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)


def ask(fleet, prompt=(5, 6, 7, 8), tokens=12, seeds=(1,), **sampling):
    chosen = SamplingParams(max_new_tokens=tokens, ignore_eos=True, **sampling)
    return fleet.submit([Request(list(prompt), chosen, list(seeds))])[0]


def scored(engine, prompt, answer, temperature=1.0):
    return engine.score_logprobs("actor", [list(prompt) + answer.resp_tokens], temperature)[0][len(prompt) :]


def test_answers_have_the_tokens_log_probs_and_versions_of_the_weights(fleet, trainer):
    fleet.update_weights(trainer, 0)
    sequences = ask(fleet, seeds=(1, 2, 1), temperature=0.7).result(60).sequences
    assert sequences[0].resp_tokens == sequences[2].resp_tokens != sequences[1].resp_tokens
    for answer in sequences:
        assert answer.versions == [0] * 12
        assert answer.finish_reason == "length"
        torch.testing.assert_close(
            torch.tensor(answer.resp_logprobs),
            torch.tensor(scored(trainer, (5, 6, 7, 8), answer, 0.7)),
            atol=1e-4,
            rtol=0,
        )


def test_new_weights_arrive_during_an_answer_and_in_the_tied_output_layer(fleet, trainer):
    before = ask(fleet, greedy=True).result(60).sequences[0]
    perturb(trainer)
    future = ask(fleet, tokens=480, seeds=MANY)
    time.sleep(0.2)
    report = fleet.update_weights(trainer, 1, verify=True)
    assert report.logprob_gap is not None
    assert report.logprob_gap < 1e-4
    long = future.result(120).sequences[0]
    assert set(long.versions) == {0, 1}
    assert long.versions == sorted(long.versions)
    cut = long.versions.index(1)
    # Tokens of the new version have the log-probs of the new weights, after a context that the old weights sampled.
    torch.testing.assert_close(
        torch.tensor(long.resp_logprobs[cut:]),
        torch.tensor(scored(trainer, (5, 6, 7, 8), long)[cut:]),
        atol=1e-3,
        rtol=0,
    )
    after = ask(fleet, greedy=True).result(60).sequences[0]
    assert after.resp_tokens != before.resp_tokens
    assert after.versions == [1] * 12


def test_broadcast_weights_reach_a_server_also_after_its_restart(fleet, trainer):
    """vLLM's own calls for RL, with areno's transfer engine; no folder is written."""
    perturb(trainer, seed=5)
    fleet.update_weights(trainer, 50, "xccl")  # opens the channel, which may take as long as an answer
    for version in (51, 52):
        perturb(trainer, seed=version)
        future = ask(fleet, tokens=480, seeds=MANY)
        time.sleep(0.3)
        report = fleet.update_weights(trainer, version, "xccl", verify=True)
        assert report.logprob_gap < 1e-4
        assert fleet._transfer.newest is None
        assert report.nbytes == sum(p.numel() * 4 for _, p in trainer.actor.model.parameters())
        long = future.result(120).sequences[0]
        assert set(long.versions) == {version - 1, version}
        cut = long.versions.index(version)
        torch.testing.assert_close(
            torch.tensor(long.resp_logprobs[cut:]),
            torch.tensor(scored(trainer, (5, 6, 7, 8), long)[cut:]),
            atol=1e-3,
            rtol=0,
        )
    restarts = fleet.health().restarts
    for pid in fleet.health().replicas[0].worker.pids[1:]:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: fleet.health().restarts > restarts and fleet.health().replicas[0].worker.state == "ready", 300)
    answer = ask(fleet).result(60).sequences[0]
    assert answer.versions == [52] * 12
    torch.testing.assert_close(
        torch.tensor(answer.resp_logprobs), torch.tensor(scored(trainer, (5, 6, 7, 8), answer)), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("again", [True, False], ids=["sent again", "as a folder"])
def test_an_interrupted_broadcast_leaves_no_partially_loaded_layer(fleet, trainer, monkeypatch, again):
    """It breaks between parts of layers that vLLM fuses."""
    perturb(trainer, seed=6 + again)
    calls, whole = [], weight_update._broadcast

    def breaks(name, memory):
        calls.append(name)
        if len(calls) == 9:
            raise weight_update.BrokenChannelError("broken for the test")
        whole(name, memory)

    def fails(_replica):
        raise EngineError("failed for the test")

    sends = fleet._transfer._channel
    monkeypatch.setattr(weight_update, "_broadcast", breaks)
    monkeypatch.setattr(sends, "_bucket_bytes", 1 << 20)
    if not again:
        monkeypatch.setattr(sends, "catch_up", fails)
    report = fleet.update_weights(trainer, 60 + again, "xccl", verify=True)
    assert len(calls) >= 9
    assert report.logprob_gap < 1e-4
    assert (fleet._transfer.newest is None) == again
    assert fleet.health().replicas[0].worker.state == "ready"


def test_weights_that_have_not_arrived_fail_the_update(fleet, trainer, monkeypatch):
    perturb(trainer, seed=2)
    kept = fleet._replicas[0].calls.transfers
    monkeypatch.setattr(fleet._replicas[0].calls, "transfers", False)  # as a server without areno's extension
    with pytest.raises(EngineError, match="does not have the weights of version 2"):
        fleet.update_weights(trainer, 2, verify=True)
    monkeypatch.setattr(fleet._replicas[0].calls, "transfers", kept)
    assert fleet.update_weights(trainer, 3, verify=True).logprob_gap < 1e-4


def test_a_running_server_is_joined_and_left_running(fleet, policy, tmp_path):
    url = str(fleet._replicas[0]._http.base_url).rstrip("/")
    joined = ServerOptions(product="vllm", arguments=("--dtype", "float32"), addresses=(url,))
    with closing(RolloutFleet(str(policy), config(), FleetOptions(log_folder=tmp_path, server=joined))) as other:
        assert len(ask(other).result(60).sequences[0].resp_tokens) == 12
        assert other.health().replicas[0].worker.pids == ()
        with pytest.raises(
            UsageError, match="the number of replicas cannot be 2, because only 1 server addresses are known"
        ):
            other.resize(2)
        with pytest.raises(UsageError, match="is already a replica"):
            other.resize(2, [url])
        other.resize(2, [url.replace("127.0.0.1", "localhost")])  # the same server under another address
        assert [len(future.result(60).sequences[0].resp_tokens) for future in (ask(other), ask(other))] == [12, 12]
        other.resize(1)
        assert other.size() == 1
    assert len(ask(fleet).result(60).sequences[0].resp_tokens) == 12


@pytest.mark.parametrize("wait_s", [0.0, 0.05, 0.1])  # before and after the server has begun the samples
def test_a_cancelled_request_returns_the_tokens_so_far(fleet, wait_s):
    future = ask(fleet, tokens=480, seeds=MANY)
    time.sleep(wait_s)
    fleet.cancel(future)
    for answer in future.result(30).sequences:
        assert answer.finish_reason == "abort"
        assert len(answer.resp_tokens) < 480


def test_a_killed_server_is_restarted_with_the_current_weights_and_its_requests_are_answered(fleet, trainer):
    perturb(trainer, seed=4)
    fleet.update_weights(trainer, 4)
    before = fleet.health().restarts
    future = ask(fleet, tokens=480, seeds=MANY)
    time.sleep(0.3)
    for pid in fleet.health().replicas[0].worker.pids[1:]:
        os.kill(pid, signal.SIGKILL)
    answer = future.result(300).sequences[0]
    assert answer.versions == [4] * 480
    assert fleet.health().restarts == before + 1
    assert fleet.health().resubmitted == 1


def test_adapters_arrive_with_their_version_and_running_samples_keep_theirs(policy, tmp_path):
    adapted = config(adapter=AdapterOptions(rank=4, seed=3))
    section = vLLMConfig(enforce_eager=True, max_num_seqs=16, enable_lora=True, max_lora_rank=8)
    arguments = vllm_arguments(section, dtype="float32", context_length=512, gpu=False)
    server = ServerOptions(product="vllm", arguments=tuple(arguments), command=(str(VLLM), "serve"), adapter="adapter")
    options = FleetOptions(replicas=1, log_folder=tmp_path, server=server, backoff_s=0.1)
    with (
        closing(Engine(str(policy), adapted)) as trainer,
        closing(RolloutFleet(str(policy), adapted, options)) as fleet,
    ):
        plain = ask(fleet, greedy=True).result(120).sequences[0]
        for version in (1, 2):
            with torch.no_grad():
                for _, parameter in trainer.actor.model.parameters():
                    parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
            running = ask(fleet, tokens=480, seeds=MANY) if version == 2 else None
            time.sleep(0.3)
            assert fleet.update_weights(trainer, version, verify=True).logprob_gap < 1e-4
            answer = ask(fleet, greedy=True).result(120).sequences[0]
            assert answer.versions == [version] * 12
            assert answer.resp_tokens != plain.resp_tokens
            torch.testing.assert_close(
                torch.tensor(answer.resp_logprobs),
                torch.tensor(scored(trainer, (5, 6, 7, 8), answer)),
                atol=1e-4,
                rtol=0,
            )
        assert {version for sample in running.result(200).sequences for version in sample.versions} == {1}


@pytest.fixture
def wide_toy(tmp_path):
    make_wide_toy(tmp_path)
    return tmp_path


def test_training_by_options_generates_with_vllm(wide_toy):
    """``areno train`` with vLLM in place of areno's own replicas."""
    checkpoint = wide_toy / "model"
    (wide_toy / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{i} + {i} ="}) + "\n" for i in range(8)))
    (wide_toy / "reward.py").write_text("def reward_fn(record):\n    return len(record.completion) / 100\n")
    words = ["--algo", "grpo", "--ckpt", checkpoint, "--dataset-path", wide_toy / "data.jsonl"]
    words += [
        "--reward-fn-path",
        wide_toy / "reward.py",
        "--batch-size",
        "4",
        "--n-samples",
        "4",
        "--max-new-tokens",
        "8",
    ]
    words += ["--max-steps", "3", "--run-dir", wide_toy / "run", "--rollout", "async", "--rollout-replicas", "1"]
    words += ["--rollout-backend", "vllm", "--rollout-server-command", f"{VLLM} serve"]
    done = areno("train", *words, "--rollout-server-args=--enforce-eager", timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (wide_toy / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert max(row["train/logp_abs_diff_mean"] for row in rows) < 1e-3  # the next samples come from the newest weights
    assert "arrived: log-probs differ by" in (wide_toy / "run/log.txt").read_text()


def test_an_experiment_learns_with_vllm(wide_toy):
    """The GRPO example with vLLM as rollout backend."""
    tmp_path = wide_toy
    changes = [
        "rollout.backend=vllm:d1",
        f"vllm.command={VLLM} serve",
        "vllm.enforce_eager=true",
        "total_train_steps=12",
    ]
    example = Path(toy.__file__).with_name("grpo.yaml")
    done = areno("run", example, f"cluster.fileroot={tmp_path}", *changes, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("logs/*/*/*/metrics.jsonl")
    rewards = [
        row["rollout/reward"] for row in map(json.loads, file.read_text().splitlines()) if "rollout/reward" in row
    ]
    assert len(rewards) == 12
    assert sum(rewards[:2]) / 2 < 0.4
    assert sum(rewards[-2:]) / 2 > 0.7
    assert "weights of version 1 arrived: log-probs differ by" in done.stdout + done.stderr


def test_a_teacher_by_address_scores_rows_as_the_engine_does(fleet, trainer):
    """Rows of several lengths, the longest longer than a block; an unknown token and a dead address are errors."""
    replica = next(iter(fleet._up().values()))
    address = f"{str(replica._http.base_url).rstrip('/')}/v1"
    scorer = ServerScorer(address, "teacher.path", 60.0)
    rows = [[5, 6, 7, 8], [9], [3 + (7 * i) % 90 for i in range(130)]]
    fleet.update_weights(trainer, 100, verify=True)
    for found, expected in zip(scorer(rows, [1.0] * len(rows)), trainer.score_logprobs("actor", rows), strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    with pytest.raises(EngineError, match="failed to score a row of 2 tokens: status 4"):
        scorer([[5, 10**6]], [1.0])
    with pytest.raises(UsageError, match=r"teacher\.path=http://127\.0\.0\.1:9/v1: no OpenAI-compatible server"):
        ServerScorer("http://127.0.0.1:9/v1", "teacher.path", 5.0)
