"""The rollout benchmark is correct: its counts of a model's work, its checks of a side's results, and its ratios."""

import json
import math
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import areno  # noqa: F401

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "workers")]

import common  # noqa: E402
import limits  # noqa: E402
import rollout  # noqa: E402
import side  # noqa: E402
from limits import Rates, Shape  # noqa: E402

SHAPE = Shape(hidden=24, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=40, vocab=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import transformers

    folder = tmp_path_factory.mktemp("shape")
    common.make_checkpoint(folder, **asdict(SHAPE))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def flop_of(work):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        output = work()
    return counter.get_total_flops(), output


def test_flop_of_prefill_and_decode_are_those_of_the_real_model(model):
    prompt, samples = 7, 3
    phases = limits.phases(SHAPE, [prompt], samples, [3], 4)
    ids = torch.randint(2, 300, (1, prompt))
    flop, prefill = flop_of(lambda: model(ids, use_cache=True, logits_to_keep=1))
    masked = prompt * (prompt - 1) // 2  # eager attention also computes the masked pairs
    assert phases[0].flop == flop - SHAPE.attention_flop * masked

    cache = prefill.past_key_values
    cache.batch_repeat_interleave(samples)
    for phase in phases[1:]:
        token = torch.randint(2, 300, (samples, 1))
        flop, _ = flop_of(lambda token=token: model(token, past_key_values=cache, use_cache=True))
        assert phase.flop == flop
    assert len(phases) == 3


def test_bytes_count_the_weights_once_and_every_cached_token_once(model):
    prompts, samples, lengths, itemsize = [3, 5], 2, [2, 4], 2
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2) * itemsize
    per_token = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * itemsize
    phases = limits.phases(SHAPE, prompts, samples, lengths, itemsize)
    assert [phase.bytes for phase in phases[:1]] == [weights + 8 * per_token]
    for new, phase in enumerate(phases[1:], start=1):
        touched = set()
        for index, (count, length) in enumerate(zip(prompts, lengths, strict=True)):
            if length > new:
                touched |= {("prompt", index, position) for position in range(count)}
                touched |= {(index, sample, position) for sample in range(samples) for position in range(new)}
        assert phase.bytes == weights + len(touched) * per_token
    last = sum(count + samples * length for count, length in zip(prompts, lengths, strict=True))
    assert limits.working_set(SHAPE, prompts, samples, lengths, itemsize) == weights + last * per_token


def test_a_phase_takes_the_longer_of_its_compute_and_memory_times():
    phases = [limits.Phase(flop=100, bytes=1), limits.Phase(flop=1, bytes=30)]
    assert Rates(flop=10, bytes=10).seconds(phases) == 10 + 3


def test_the_mixed_workload_and_its_decode_limit_are_the_published_ones():
    work = rollout.workloads()["mixed"]
    assert (len(work.prompts), sum(work.prompts), work.tokens) == (256, 142_827, 133_966)
    decode = limits.phases(work.shape, work.prompts, work.samples, work.lengths, 2)[1:]
    h200 = Rates(flop=989e12, bytes=4.8e12)
    assert work.tokens / h200.seconds(decode) == pytest.approx(42_600, rel=0.01)


def test_long_tail_lengths_have_their_documented_mean_and_bounds():
    lengths = rollout.workloads()["long-tail"].lengths
    assert sum(lengths) / len(lengths) == pytest.approx(128, rel=0.05)
    assert max(lengths) <= 1024
    assert min(lengths) >= 4
    assert sorted(lengths)[len(lengths) // 2] < 100  # a long tail: half of them are far below the mean


def test_models_have_their_documented_sizes(tmp_path):
    assert common.make_checkpoint(tmp_path, **asdict(rollout.TINY)) == pytest.approx(0.9e6, rel=0.05)
    assert rollout.SMALL.body + rollout.SMALL.head == pytest.approx(41.5e6, rel=0.05)
    assert rollout.QWEN3_06B.body + rollout.QWEN3_06B.head == pytest.approx(0.596e9, rel=0.01)


def settings(**changes):
    defaults = {"model": "", "device": "cpu", "dtype": "float32", "threads": 2, "prompts": [3, 4], "samples": 2}
    return side.Settings(**(defaults | {"lengths": [2, 2, 5, 5], "prompt_ids": 500, "passes": 1} | changes))


def samples(counts):
    return [([7] * count, [-1.5] * count) for count in counts]


def test_missing_or_wrong_results_of_a_side_are_refused():
    config = settings()
    assert side.check(config, samples([2, 2, 5, 5])) == (14, -21.0)
    with pytest.raises(AssertionError, match="wrong numbers of tokens"):
        side.check(config, samples([2, 2, 5, 4]))
    with pytest.raises(AssertionError, match="log-probs for"):
        side.check(config, [*samples([2, 2, 5]), ([7] * 5, [-1.5] * 4)])
    for wrong in (math.nan, 0.5):
        with pytest.raises(AssertionError, match="not one"):
            side.check(config, [*samples([2, 2, 5]), ([7] * 5, [wrong] * 5)])


def test_prompts_are_the_same_for_all_sides_and_new_in_each_pass():
    config = settings(prompts=[64, 64])
    assert config.draw(1) == settings(prompts=[64, 64], threads=1).draw(1)
    first, second = config.draw(0), config.draw(1)
    assert first != second
    assert [len(prompt) for prompt in first] == [64, 64]
    assert all(2 <= token < 500 for prompt in first for token in prompt)
    assert config.prompt_lengths() == [2, 5]


def test_compile_time_is_the_additional_time_of_loading_and_the_first_pass(capsys):
    pauses = iter([0.3, 0.05, 0.05, 0.05])

    def one_pass(prompts, number):
        time.sleep(next(pauses))
        return samples([2, 2, 5, 5])

    side.measure(settings(passes=3), one_pass, how="test", load_s=9.0, load_compile_s=2.0)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["first_pass_s"] == pytest.approx(0.3, abs=0.15)
    assert result["compile_s"] == pytest.approx(2.25, abs=0.15)
    assert len(result["seconds"]) == 3
    assert (result["tokens"], result["mean_logprob"]) == (14, -1.5)


@pytest.mark.parametrize("best", [1, 2])
def test_the_fastest_number_of_threads_is_used(best):
    now = []
    work = lambda: time.sleep(0.01 if now[-1] == best else 0.05)  # noqa: E731
    assert side.fastest_threads(settings(), work, now.append) == best
    assert now[-1] == best


def test_peak_memory_counts_the_processes_that_a_side_started():
    before = side.peak_mib()
    script = "import sys; data = bytearray(b'x') * (150 << 20); print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"ready\n"
        assert 150 < side.peak_mib() - before < 300
    finally:
        child.communicate()


def test_a_side_that_samples_differently_is_refused():
    runs = {"areno": [{"mean_logprob": -6.36}], "vllm": [{"mean_logprob": -6.38}]}
    rollout.check_sampling(runs, 32_768)
    with pytest.raises(AssertionError, match="differ"):
        rollout.check_sampling(runs | {"greedy": [{"mean_logprob": -5.6}]}, 32_768)


def test_ratios_and_rates_of_hand_made_results():
    def one(seconds, compile_s):
        result = {"how": "", "seconds": seconds, "compile_s": compile_s, "first_pass_s": 1, "load_s": 1}
        return result | {"mean_logprob": -1.0, "peak_mib": 1}

    ours = rollout.combine([one([2.0, 1.0, 2.0], 8.0), one([2.0, 2.0, 4.0], 0.5)], 1000)
    theirs = rollout.combine([one([4.0, 4.0, 4.0], 0.0)], 1000)
    assert (ours["tokens_per_s"], ours["tokens_per_s_with_compile"]) == (500, 100)
    assert (ours["compile_s"], ours["compile_cached_s"]) == (8.0, 0.5)
    assert (theirs["tokens_per_s"], theirs["compile_cached_s"]) == (250, None)
    over = rollout.ratios({"areno": ours, "vllm": theirs})
    assert over == {"areno": {"vllm": {"excluding_compile": 2.0, "including_compile": 0.4}}}


def test_a_peer_that_fails_is_named_and_does_not_end_the_run(tmp_path, monkeypatch):
    (tmp_path / "works.py").write_text(
        'import json; print(json.dumps({"how": "", "seconds": [1.0], "compile_s": 0, "first_pass_s": 1, "load_s": 1,'
        ' "mean_logprob": -1.0, "peak_mib": 1, "tokens": 4}))'
    )
    (tmp_path / "breaks.py").write_text("raise SystemExit('no such kernel')")
    monkeypatch.setattr(rollout, "SIDES", {name: rollout.Side(f"{name}.py") for name in ("works", "breaks")})
    monkeypatch.setattr(rollout, "WORKERS", tmp_path)
    args = type("Args", (), {"device": "cpu", "dtype": "float32", "threads": 1, "passes": 1, "repeats": 2})
    work = rollout.Workload(rollout.TINY, [3], 1, [4])
    result = rollout.run_sides(work, ["works", "breaks"], args, tmp_path)
    assert list(result["sides"]) == ["works"]
    assert "no such kernel" in result["failed"]["breaks"]
    monkeypatch.setattr(rollout, "OURS", {"breaks": None})
    with pytest.raises(common.WorkerFailedError, match="no such kernel"):
        rollout.run_sides(work, ["works", "breaks"], args, tmp_path)


def test_a_worker_that_exceeds_its_deadline_is_stopped(tmp_path):
    script = tmp_path / "slow.py"
    script.write_text("import time; time.sleep(60)")
    began = time.perf_counter()
    with pytest.raises(common.WorkerFailedError, match=r"slow.py took longer than 1 s"):
        common.run_worker(sys.executable, script, {}, deadline_s=1)
    assert time.perf_counter() - began < 20


def test_absent_peers_say_how_to_set_them_up():
    assert "bash benchmarks/peers.sh nobody" in rollout.Side("x.py", peer="nobody").missing("cpu")
    assert rollout.SIDES["vllm"].missing("cuda") == "runs on cpu only"
    assert rollout.SIDES["generate"].missing("cuda") == ""


def test_a_workload_that_the_device_cannot_run_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rollout.py", "--only", "tiny", "mixed"])
    with pytest.raises(SystemExit):
        rollout.arguments()
    assert "--only mixed: not for --device cpu; it has tiny, small, 135m, long-tail, shared" in capsys.readouterr().err


@pytest.mark.long
def test_the_sides_of_this_environment_return_the_same_keys_and_sample_alike(tmp_path):
    common.make_checkpoint(tmp_path / "model", **asdict(rollout.TINY))
    work = rollout.Workload(rollout.TINY, [5, 16, 9, 7], 4, [16, 24, 32, 40])
    args = type("Args", (), {"device": "cpu", "dtype": "float32", "threads": 2, "passes": 1, "repeats": 1})
    result = rollout.run_sides(work, ["areno_eager", "generate", "continuous_batching"], args, tmp_path)
    assert result["failed"] == {}
    assert len({frozenset(entry) for entry in result["sides"].values()}) == 1


def test_a_run_shows_a_table_and_ends_with_its_result_as_json(tmp_path, monkeypatch, capsys):
    for name, seconds in (("ours", 0.5), ("theirs", 2.0)):
        result = {"how": name, "seconds": [seconds], "compile_s": 1.5, "first_pass_s": 2, "load_s": 1}
        result |= {"mean_logprob": -6.0, "peak_mib": 100, "tokens": 64}
        (tmp_path / f"{name}.py").write_text(f"print({json.dumps(json.dumps(result))})")
    ours, others = {"areno": rollout.Side("ours.py")}, {"generate": rollout.Side("theirs.py")}
    others |= {"vllm": rollout.Side("theirs.py", peer="nobody")}
    for name, value in (("OURS", ours), ("OTHERS", others), ("SIDES", ours | others), ("WORKERS", tmp_path)):
        monkeypatch.setattr(rollout, name, value)
    monkeypatch.setattr(rollout, "workloads", lambda: {"tiny": rollout.Workload(rollout.TINY, [4] * 4, 2, [8] * 4)})
    monkeypatch.setattr(sys, "argv", ["rollout.py", "--peers", "generate", "vllm", "--repeats", "1", "--threads", "1"])
    rollout.main()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("vllm is absent: not set up") for line in lines)
    assert any(line.split()[:3] == ["generate", "32", "1.5"] and "4.00 x" in line for line in lines)
    result = json.loads(lines[-1])
    assert list(result["absent"]) == ["vllm"]
    tiny = result["workloads"]["tiny"]
    over = tiny["areno_over"]["areno"]["generate"]
    assert over == {"excluding_compile": 4.0, "including_compile": pytest.approx(3.5 / 2.0, abs=0.05)}
    limit = tiny["limit"]
    assert tiny["sides"]["areno"]["share_of_limit"] == pytest.approx(limit["seconds"] / 0.5, abs=0.002)
    assert limit["gemm_gflops"] > 1
    assert limit["gb_per_s"] > 0.5
    assert limit["tokens_per_s"] == pytest.approx(64 / limit["seconds"], rel=0.1)
