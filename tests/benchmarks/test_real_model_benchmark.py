"""The real-model benchmark measures the rows that areno computes, counts correctly, and can be run in pieces."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from areno.text.chat import encode_generation_prompt, load_tokenizer
from tests.support.tiny import save_tiny_checkpoint

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "workers")]

import common  # noqa: E402
import limits  # noqa: E402
import real_model  # noqa: E402
import real_parts  # noqa: E402
import real_report  # noqa: E402
import real_rows  # noqa: E402

SHAPE = limits.Shape(hidden=24, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=40, vocab=300)
STEP = {"seconds": [4.0, 6.0], "how": "x", "peak_mib": 700.0, "base_mib": 300.0, "response_len": 4, "seq_len": 20}
RESULTS = {
    "areno_steps.py": STEP | {"split": {"rollout": [1.0, 3.0], "train": [2.5]}, "seconds": [2.0]},
    "trl_steps.py": STEP | {"split": {"rollout_and_reward": [2.0]}, "peak_mib": 1400.0},
    "machine_limit.py": {"gemm_gflops": 1.0, "products_s": 0.01, "how": "x"},
}
ROLLOUT = {"how": "x", "compile_s": 1.0, "first_pass_s": 1.0, "load_s": 1.0, "mean_logprob": -2.0, "peak_mib": 100}
RESULTS |= {"areno_rollout.py": ROLLOUT | {"seconds": [0.5]}, "generate_rollout.py": ROLLOUT | {"seconds": [1.0]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("real") / "model")


@pytest.fixture
def workers(tmp_path, monkeypatch):
    """Scripts in place of the workers, which print a result at once and log their calls."""
    folder = tmp_path / "workers"
    folder.mkdir()
    for name, result in RESULTS.items():
        text = f"import sys\nopen({str(folder / 'log')!r}, 'a').write({name!r} + sys.argv[1] + '\\n')\n"
        (folder / name).write_text(text + f"print({json.dumps(json.dumps(result | {'tokens': 0}))})")
    for name, value in (("WORKERS", folder), ("RESULTS", tmp_path / "results"), ("PEERS", tmp_path / "peers")):
        monkeypatch.setattr(real_model, name, value)
    monkeypatch.setattr(real_parts, "PEERS", tmp_path / "peers")
    return folder


def run(capsys, *words):
    real_model.main([*words, "--repeats", "2", "--decode", "eager", "--threads", "1"])
    lines = capsys.readouterr().out.splitlines()
    return json.loads(lines[-1]), lines[:-1]


def calls(workers):
    log = workers / "log"
    entries = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [line[: line.index("{")] for line in entries]


def test_a_run_shows_tables_and_ends_with_its_result_as_json(model, workers, capsys):
    sides = ["areno", "areno_eager", "trl", "generate"]
    result, lines = run(capsys, "grpo", "rollout", "--ckpt", str(model), "--sides", *sides, "--new-tokens", "4")
    assert set(result) == {"benchmark", "runs", "machine", "absent", "model", "parts"}
    assert {"cpu", "cores", "commit", "instructions", "load_before"} <= set(result["machine"])
    assert calls(workers)[:6] == ["machine_limit.py", "areno_steps.py", "trl_steps.py"] * 2  # interleaved
    grpo, rollout = result["parts"]["grpo"], result["parts"]["rollout"]
    ours, theirs = grpo["sides"]["areno"], grpo["sides"]["trl"]
    assert (ours["step_s"], ours["rollout_s"], ours["train_s"]) == (2.0, 2.0, 2.5)
    assert (theirs["step_s"], theirs["rollout_s"], theirs["train_s"]) == (5.0, 2.0, 3.0)
    assert set(ours) == set(theirs)
    assert grpo["areno_over"] == {"areno": {"trl": {"step_s": 2.5, "rollout_s": 1.0, "train_s": 1.2, "memory": 0.5}}}
    assert ours["share_of_limit"]["step_s"] == pytest.approx(grpo["limit"]["step_s"] / 2.0, abs=1e-3)
    assert rollout["sides"]["generate"]["tokens_per_s"] == 8 * 8 * 4
    assert rollout["areno_over"]["areno_eager"]["generate"]["seconds"] == 2.0
    assert rollout["limit"]["seconds"] > 3 * 0.01  # the steps after the first token
    assert any(line.split()[:1] == ["trl"] and "2.50 x" in line for line in lines)


def test_a_run_continues_where_the_last_one_stopped(model, workers, capsys):
    words = ["grpo", "--ckpt", str(model), "--sides", "areno", "trl", "--save", "piece"]
    result, lines = run(capsys, *words, "--minutes", "0")
    assert calls(workers) == ["machine_limit.py"]
    assert "5 processes are left; the same command with --save goes on with them" in lines
    saved = json.loads((real_model.RESULTS / "piece.json").read_text())
    assert saved["runs"] == result["runs"]
    run(capsys, *words)
    assert len(calls(workers)) == 5
    result, _ = run(capsys, *words)
    assert calls(workers) == []
    assert set(result["parts"]["grpo"]["sides"]) == {"areno", "trl"}
    result, _ = run(capsys, *words, "--set", "mini_bs=8")  # areno's options are different now
    assert calls(workers) == ["areno_steps.py"] * 2
    assert [one["described"]["side"] for one in result["runs"]].count("areno") == 2


def test_a_failing_peer_is_named_and_left_out(model, workers, capsys):
    (workers / "trl_steps.py").write_text("raise SystemExit('no such trainer')")
    result, lines = run(capsys, "grpo", "--ckpt", str(model), "--sides", "areno", "trl")
    assert "no such trainer" in result["parts"]["grpo"]["failed"]["trl"]
    assert list(result["parts"]["grpo"]["sides"]) == ["areno"]
    assert any("trl" in line and "failed: no such trainer" in line for line in lines)


def test_sides_that_computed_different_rows_are_refused(model, workers, capsys):
    other = json.dumps(RESULTS["trl_steps.py"] | {"seq_len": 30})
    (workers / "trl_steps.py").write_text(f"print({other!r})")
    with pytest.raises(AssertionError, match="rows of other mean lengths"):
        run(capsys, "grpo", "--ckpt", str(model), "--sides", "areno", "trl")


def test_an_older_commit_is_run_from_its_own_sources(model, workers, capsys):
    if not common.git("rev-parse", "HEAD"):
        pytest.skip("this is not a git repository")
    script = "import json, os\nassert os.environ['PYTHONPATH'] == os.getcwd()  # python -m takes this one first\n"
    script += f"print(json.dumps({STEP!r} | {{'split': {{}}, 'how': os.getcwd()}}))"
    (workers / "areno_steps.py").write_text(script)
    words = ["sft", "--ckpt", str(model), "--sides", "areno", "against", "--against", "HEAD"]
    result, _ = run(capsys, *words)
    sides = result["parts"]["sft"]["sides"]
    assert sides["areno"]["how"] == str(real_model.ROOT)
    assert (Path(sides["against"]["how"]) / "areno" / "__init__.py").is_file()
    assert Path(sides["against"]["how"]) != real_model.ROOT


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "no part is called nothing; there are gspo, grpo"),
        (["gspo", "--steps", "1"], "--steps 1: more than --warmup 1"),
        (["gspo", "--repeats", "0"], "--repeats 0: at least 1"),
        (["gspo", "--set", "mini_bs"], "--set mini_bs: write it as NAME=VALUE"),
        (["gspo", "--against", "no-such"], "--against no-such: git knows no such commit here"),
        (["gspo", "--data", "no-such.jsonl"], "--data no-such.jsonl: no such file"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_measured(words, message, model, capsys):
    with pytest.raises(SystemExit):
        real_model.arguments([*words, "--ckpt", str(model)])
    assert message in capsys.readouterr().err


def test_rows_come_from_gsm8k_or_have_prompt_and_response(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"question": "2+3?", "answer": "2+3=<<2+3=5>>5\n#### 5"}, {"prompt": "a", "response": "b"}, {"text": "c"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    loaded = real_rows.read_rows(file, 2)
    assert [(row["prompt"], row["response"]) for row in loaded] == [("2+3?", "2+3=5\n#### 5"), ("a", "b")]
    with pytest.raises(SystemExit, match=r"line 3: a row needs the texts .* this one has text"):
        real_rows.read_rows(file, 3)
    with pytest.raises(SystemExit, match="has 3 rows, and 4 are needed"):
        real_rows.read_rows(file, 4)


def test_prompts_are_encoded_as_in_areno_and_lengthened_as_requested(model):
    tokenizer = load_tokenizer(str(model))
    rows = real_rows.read_rows(None, 4)
    assert real_rows.encode(tokenizer, rows[0]["prompt"]) == list(
        encode_generation_prompt(tokenizer, rows[0]["prompt"])
    )
    for row, long in zip(rows, real_rows.lengthen(tokenizer, rows, 200), strict=True):
        assert 190 <= len(real_rows.encode(tokenizer, long["prompt"])) <= 200
        assert long["prompt"].endswith(row["prompt"])


def test_training_flop_are_those_of_the_forward_and_backward_pass(tmp_path):
    prompt, new = 7, 5
    config = {name: getattr(SHAPE, name) for name in ("hidden", "layers", "heads", "kv_heads", "head_dim")}
    common.make_checkpoint(tmp_path, **config, intermediate=SHAPE.intermediate, vocab=SHAPE.vocab)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids = torch.randint(2, 300, (1, prompt + new))
    with FlopCounterMode(display=False) as counter:
        model(ids, logits_to_keep=new).logits.sum().backward()
    total = prompt + new
    masked = total * (total - 1) // 2  # eager attention also computes the masked pairs
    expected = counter.get_total_flops() - 3 * SHAPE.attention_flop * masked
    assert limits.train_flop(SHAPE, [prompt], 1, [new]) == expected
    # A second sample adds its own tokens, and their attention to the prompt; the prompt is not computed again.
    pairs = new * prompt + new * (new + 1) // 2
    more = 3 * (2 * (SHAPE.body + SHAPE.head) * new + SHAPE.attention_flop * pairs)
    assert limits.train_flop(SHAPE, [prompt], 2, [new]) == expected + more


def test_every_way_to_multiply_gives_the_same_products():
    left, weights = torch.randn(6, 32), [torch.randn(48, 32) for _ in range(3)]
    for work in limits._product_works(left, weights):
        for product, weight in zip(work(), weights, strict=True):
            torch.testing.assert_close(product, left @ weight.t(), rtol=1e-4, atol=1e-4)
    assert 0 < limits.measure_products(SHAPE, 4, "float32", seconds=0.01) < 1


@pytest.mark.long
def test_the_workers_of_this_environment_measure_a_tiny_model(model, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "PEERS", tmp_path)
    words = ["grpo", "sft", "rollout", "lora-sft", "--ckpt", str(model), "--steps", "2", "--passes", "1"]
    sides = ["areno", "areno_lora", "areno_eager", "trl", "generate"]
    sizes = ["--prompts", "2", "--samples", "4", "--new-tokens", "8", "--decode", "eager", "--threads", "1"]
    real_model.main([*words, "--sides", *sides, *sizes, "--repeats", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["absent"] == {}
    parts = result["parts"]
    assert list(parts) == ["grpo", "sft", "rollout", "lora-sft"]
    assert [part["failed"] for part in parts.values()] == [{}] * 4
    assert set(parts["grpo"]["sides"]) == set(parts["sft"]["sides"]) == {"areno", "trl"}
    assert parts["grpo"]["sides"]["trl"]["response_len"] == parts["grpo"]["sides"]["areno"]["response_len"] == 8
    for part in parts.values():
        for row in part["sides"].values():
            assert row["peak_mib"] > 100
    real_report.check("grpo", parts["grpo"])


@pytest.mark.long
def test_llama_cpp_samples_as_areno_does(model, capsys, tmp_path, monkeypatch):
    for name in ("xllamacpp", "gguf", "areno.engine.checkpoint.gguf_export"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    monkeypatch.setattr(real_model, "PEERS", tmp_path)
    words = ["rollout", "--ckpt", str(model), "--sides", "areno_eager", "llama", "--new-tokens", "8"]
    real_model.main([*words, "--passes", "1", "--repeats", "1", "--threads", "1"])  # compares their mean log-probs
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["parts"]["rollout"]["sides"]) == {"areno_eager", "llama"}
