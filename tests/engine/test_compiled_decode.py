"""The compiled decode step: same output as the eager one, shared weights, built in the background without blocking."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from areno.engine.kernels import decode_attention, plain_draw, row_product
from areno.engine.model.loading import prepare
from areno.engine.rollout import loop as loop_module
from areno.engine.rollout.compiled import spec, switch
from areno.engine.rollout.compiled.spec import StepSpec
from areno.engine.rollout.decode import SharedPrefixes, StepDecode
from areno.engine.rollout.loop import RolloutLoop
from areno.engine.rollout.probe import validate_decoding
from areno.engine.rollout.sequence import Prefill
from areno.errors import EngineError
from areno.types import Request, SamplingParams
from tests.support.cli import environment, preloaded, start_text
from tests.support.preloaded import Forked
from tests.support.tiny import VOCAB, tiny_module

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")
LOGGER = "areno.engine.inference"
KERNELS = (decode_attention.KERNEL, plain_draw.KERNEL, row_product.KERNEL)


def make_model(family="llama", seed=0):
    return prepare(tiny_module(family, seed=seed, layers=2, hidden=32, heads=2, sharpen=1.5), family)


@pytest.fixture
def make_loop():
    loops = []

    def make(model, mode="auto", running=32, budget=8192):
        loop = RolloutLoop(
            model,
            eos_ids=frozenset(),
            tokenizer=None,
            budget_tokens=budget,
            max_running=running,
            layers=validate_decoding(model, "test").layers,
            decode_mode=mode,
        )
        loops.append(loop)
        loop.decode.prepare()
        return loop

    yield make
    for loop in loops:
        loop.close()


@pytest.fixture(scope="module")
def kernels():
    """The folder of areno's kernels in the cache that all tests share."""
    for kernel in KERNELS if shutil.which("g++") else ():
        assert kernel.build() == ""
    return KERNELS[0].path().parent


@pytest.fixture
def own_cache(kernels, tmp_path, monkeypatch):
    """A private cache folder that has the kernels, each of which takes about ten seconds to compile."""
    if kernels.exists():
        shutil.copytree(kernels, tmp_path / "kernels")
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path))
    return tmp_path


def forked(command, *, stderr, **_):
    """Replaces ``subprocess.Popen``: the build process is forked with its imports done."""
    files = (stderr.fileno(), stderr.fileno())
    return Forked(preloaded().fork("tests.support.build", command[3:], environment(), *files))


@pytest.fixture(scope="module")
def built(kernels, tmp_path_factory):
    """A cache folder that has the compiled step of the tiny llama."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(kernels, folder / "kernels")
    before = os.environ.get("ARENO_CACHE_DIR")
    os.environ["ARENO_CACHE_DIR"] = str(folder)
    model = make_model()
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr(switch, "subprocess", SimpleNamespace(Popen=forked, DEVNULL=subprocess.DEVNULL))
        failure = switch._Build(StepSpec.of(model, validate_decoding(model, "test").layers)).wait()
    assert failure == ""
    if before is not None:
        os.environ["ARENO_CACHE_DIR"] = before
    return folder


@pytest.fixture(params=["kernels", pytest.param("compiled", marks=pytest.mark.long)])
def fast_steps(request, kernels, monkeypatch):
    """How a test's loops run their decode steps."""
    if request.param == "compiled":
        monkeypatch.setenv("ARENO_CACHE_DIR", str(request.getfixturevalue("built")))
    else:
        monkeypatch.setattr(switch, "_LEAST_BYTES", 0)
    return request.param


def mixed_requests():
    kinds = [
        {},
        {"greedy": True},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7, "temperature": 1.3},
        {"repetition_penalty": 1.3},
        {"top_logprobs": 3},
    ]
    return [
        Request([3 + i, 50, 60 + i] * (1 + i % 4), SamplingParams(max_new_tokens=12 + 9 * i, **kind), [i, i + 50])
        for i, kind in enumerate(kinds)
    ]


def answers(loop, requests):
    sequences = [s for f in loop.submit(requests) for s in f.result(timeout=120).sequences]
    return [s.resp_tokens for s in sequences], [x for s in sequences for x in s.resp_logprobs]


def assert_same(first, second):
    assert first[0] == second[0]
    assert first[1] == pytest.approx(second[1], abs=5e-6)


@needs_compiler
@pytest.mark.long
def test_a_step_on_disk_is_used_from_the_first_token_and_changes_no_output(make_loop, built, monkeypatch):
    model = make_model()
    eager, compiled = make_loop(model, "eager"), make_loop(model)
    expected = answers(eager, mixed_requests())
    monkeypatch.setenv("ARENO_CACHE_DIR", str(built))
    assert_same(answers(compiled, mixed_requests()), expected)
    assert compiled.decode.compiled
    assert not eager.decode.compiled
    plain = [Request([9, 8, 7], SamplingParams(max_new_tokens=40, greedy=g), [1, 2, 3]) for g in (True, False)]
    assert_same(answers(compiled, plain), answers(eager, plain))


@needs_compiler
def test_samples_that_share_prompts_generate_what_each_generates_alone(make_loop, fast_steps, monkeypatch):
    """They read the prompt's columns from each other while some end, are preempted, or are prefilled again."""
    monkeypatch.setattr(loop_module, "IDLE_PREFILL", 100)
    monkeypatch.setattr(loop_module, "BUSY_PREFILL", 24)
    rng, model = random.Random(3), make_model()
    requests = [
        Request(
            [rng.randrange(VOCAB) for _ in range(rng.choice([2, 17, 60]))],
            SamplingParams(max_new_tokens=rng.randint(5, 60)),
            [10 * i + s for s in range(rng.choice([1, 4, 6]))],
        )
        for i in range(24)
    ]
    alone, busy = make_loop(model), make_loop(model, running=14, budget=10 * 128)
    expected = [answers(alone, [Request(r.prompt_tokens, r.sampling, [seed])]) for r in requests for seed in r.seeds]
    futures = busy.submit(requests)
    while busy.counters.generated_total < 300:
        time.sleep(0.001)
    with busy.weights_changing(1):
        pass  # to the same weights, but everything is prefilled again, including generated tokens
    got = [s for f in futures for s in f.result(timeout=120).sequences]
    assert [s.resp_tokens for s in got] == [tokens for (tokens,), _ in expected]
    assert [x for s in got for x in s.resp_logprobs] == pytest.approx([x for _, own in expected for x in own], abs=5e-6)
    assert isinstance(busy.decode.decoder, StepDecode)
    assert busy.decode.compiled == (fast_steps == "compiled")
    assert busy.scheduler.preemptions > 0


@pytest.mark.parametrize("rows", [4, 8])
def test_rows_of_one_prefill_refer_to_the_first_of_them(rows):
    one, other = Prefill(5), Prefill(5)
    shared = SharedPrefixes([one, other, one, None])
    leaders, lengths = shared.padded(rows)
    assert leaders.tolist() == [0, 1, 0, *range(3, rows)]
    assert lengths.tolist() == [5, 5, 5, *[0] * (rows - 3)]


@needs_compiler
@pytest.mark.long
def test_trained_and_moved_weights_are_used(make_loop, built, monkeypatch):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(built))
    model = make_model()
    loop, eager = make_loop(model), make_loop(model, "eager")
    before = answers(loop, mixed_requests())
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.2)
    trained = answers(loop, mixed_requests())
    assert trained[0] != before[0]
    assert_same(trained, answers(eager, mixed_requests()))
    kept = []  # the old memory must not be reused by chance
    for parameter in model.module.parameters():
        kept.append(parameter.data)
        parameter.data = parameter.data * 0.7
    assert_same(answers(loop, mixed_requests()), answers(eager, mixed_requests()))
    assert loop.decode.compiled


@needs_compiler
@pytest.mark.long
def test_it_is_built_in_the_background_when_that_pays_off(make_loop, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, LOGGER)
    model = make_model()
    loop, eager = make_loop(model), make_loop(model, "eager")
    answers(loop, mixed_requests())
    assert list(tmp_path.rglob("*")) == []  # a short queue does not justify a build
    monkeypatch.setattr(switch, "BUILD_BASE_S", -1e9)
    requests, rounds, slowest, started = mixed_requests(), 0, 0.0, time.monotonic()
    expected = answers(eager, requests)
    while not loop.decode.compiled:
        began = time.perf_counter()
        assert_same(answers(loop, requests), expected)
        slowest = max(slowest, time.perf_counter() - began)
        rounds += 1
        assert time.monotonic() - started < 600, "the build has the lowest priority, but it must end"
    assert rounds > 3, "tokens must be generated during the build"
    assert_same(answers(loop, requests), expected)
    assert [r.message.split(" (")[0].split(": ")[0] for r in caplog.records if r.name == LOGGER] == [
        "compiling the decode step in the background",
        "switched to the compiled decode step",
    ]
    made = tmp_path / spec.CACHE_KIND  # our kernels, which the build uses, are in a folder next to it
    assert [path.suffix for path in made.iterdir()] == [".pt2"]


@needs_compiler
def test_a_large_model_decodes_with_kernels_and_without_compiling(make_loop, kernels, own_cache, monkeypatch):
    model = make_model()
    expected = answers(make_loop(model, "eager"), mixed_requests())
    monkeypatch.setattr(switch, "_LEAST_BYTES", 0)
    loop = make_loop(model, "eager")
    assert_same(answers(loop, mixed_requests()), expected)
    assert isinstance(loop.decode.decoder, StepDecode)
    assert not loop.decode.compiled
    assert not (own_cache / spec.CACHE_KIND).exists()
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.2)
    monkeypatch.undo()
    assert_same(answers(loop, mixed_requests()), answers(make_loop(model, "eager"), mixed_requests()))


def test_kernels_that_cannot_be_built_are_named_once(make_loop, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    caplog.set_level(logging.INFO, LOGGER)
    model = make_model()
    expected = answers(make_loop(model, "eager"), mixed_requests())
    monkeypatch.setattr(switch, "_LEAST_BYTES", 0)
    loop = make_loop(model, "eager")
    for _ in range(2):
        assert answers(loop, mixed_requests()) == expected
    (line,) = [r.message for r in caplog.records if r.name == LOGGER]
    assert "decoding runs without areno's kernels" in line
    assert "install g++" in line


def test_without_a_compiler_one_line_says_so(make_loop, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setattr(switch, "BUILD_BASE_S", -1e9)
    caplog.set_level(logging.INFO, LOGGER)
    model = make_model()
    loop = make_loop(model)
    expected = answers(make_loop(model, "eager"), mixed_requests())
    for _ in range(2):
        assert_same(answers(loop, mixed_requests()), expected)
    lines = [r.message for r in caplog.records if r.name == LOGGER]
    assert len(lines) == 1
    assert "decoding stays eager" in lines[0]
    assert "g++" in lines[0]


def test_a_package_that_every_user_can_write_to_is_not_loaded(make_loop, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, LOGGER)
    model = make_model()
    loop = make_loop(model)
    path = StepSpec.of(model, loop.decode.layers).path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"what it holds does not matter")
    path.chmod(0o666)
    expected = answers(make_loop(model, "eager"), mixed_requests())
    assert_same(answers(loop, mixed_requests()), expected)
    assert any("is world-writable" in r.message for r in caplog.records)
    assert path.exists(), "it is neither loaded nor deleted"
    assert not loop.decode.compiled


def test_a_broken_package_is_reported_and_removed(make_loop, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, LOGGER)
    model = make_model()
    loop = make_loop(model)
    path = StepSpec.of(model, loop.decode.layers).path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no archive")
    expected = answers(make_loop(model, "eager"), mixed_requests())
    assert_same(answers(loop, mixed_requests()), expected)
    assert any("could not be loaded" in r.message for r in caplog.records)
    assert not path.exists(), "so that the next run can build it"
    assert not loop.decode.compiled


@needs_compiler
@pytest.mark.long
def test_a_package_that_computes_something_else_is_refused(make_loop, built, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("ARENO_CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, LOGGER)
    model = make_model()
    loop = make_loop(model)
    model.config.rms_norm_eps = 1.0  # both have the same tensors; only the arithmetic differs
    for layer in model.module.model.layers:
        layer.input_layernorm.variance_epsilon = 1.0
    path = StepSpec.of(model, loop.decode.layers).path()
    path.parent.mkdir(parents=True)
    shutil.copy(next(built.rglob("*.pt2")), path)
    shutil.copytree(built / "kernels", tmp_path / "kernels")
    answers(loop, mixed_requests())
    assert any("differs from the model" in r.message for r in caplog.records)
    assert not loop.decode.compiled


def test_what_decides_the_arithmetic_decides_the_name():
    model = make_model()
    layers = validate_decoding(model, "test").layers
    name = StepSpec.of(model, layers).path().name
    assert StepSpec.of(make_model(seed=3), layers).path().name == name  # weights do not matter
    model.config.rms_norm_eps = 0.5
    assert StepSpec.of(model, layers).path().name != name


def test_compiling_a_model_with_recurrent_states_is_refused(make_loop):
    model = prepare(tiny_module("qwen3_5"), "qwen3_5")
    with pytest.raises(EngineError, match="has recurrent states"):
        make_loop(model, "compiled")


@pytest.mark.long
def test_a_failed_build_says_why(own_cache):
    model = make_model()
    spec = StepSpec.of(model, validate_decoding(model, "test").layers)
    broken = StepSpec(spec.config, "AnotherForCausalLM", spec.attention, spec.dtype, spec.layers)
    assert (
        "describes a model of class LlamaForCausalLM, but the loaded model has class AnotherForCausalLM"
        in switch._Build(broken).wait()
    )
    assert [p for p in own_cache.rglob("*") if p.is_file() and p.suffix != ".so"] == []


def _running(marker: str) -> list[str]:
    lines = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if "rollout.compiled.build" in line and marker in line]


def _wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
def test_no_build_outlives_its_loop_or_its_parent(make_loop, own_cache, monkeypatch):
    monkeypatch.setattr(switch, "BUILD_BASE_S", -1e9)
    loop = make_loop(make_model())
    for _ in range(20):
        answers(loop, mixed_requests())
        if _running(str(own_cache)):
            break
    assert _running(str(own_cache))
    loop.close()
    assert not _running(str(own_cache))
    program = (
        "import sys, time; from tests.engine.test_compiled_decode import *\n"
        "model = make_model()\n"
        "b = switch._Build(StepSpec.of(model, validate_decoding(model, 'test').layers)); print('up', flush=True)\n"
        "time.sleep(60)"
    )
    parent = start_text(program, own_cache)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    _wait_until(lambda: _running(str(own_cache)))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _wait_until(lambda: not _running(str(own_cache)))


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma3", "gpt_oss", "qwen3_moe"])
def test_families(family, make_loop, own_cache):
    model = prepare(tiny_module(family), family)
    assert model.vocab_size == VOCAB
    eager = make_loop(model, "eager")
    compiled = make_loop(model, "compiled")
    assert_same(answers(compiled, mixed_requests()), answers(eager, mixed_requests()))
