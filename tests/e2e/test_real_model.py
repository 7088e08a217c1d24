"""What only a pretrained chat model can show: its template, end tokens, alphabet, long context and near ties."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areno.config.paths import base_of
from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.text.detok import IncrementalDetokenizer
from areno.types import Request, SamplingParams
from tests.support.real import real_file

pytestmark = pytest.mark.long
TASKS = (
    "Name a {}.",
    "Write one sentence about a {}.",
    "What is a {} good for?",
    "Translate '{}' into French.",
    "Spell {}.",
)
THINGS = ("river", "bakery", "violin", "bicycle", "lighthouse", "tomato", "glacier", "library", "sparrow", "compass")
# Characters of several bytes; some combine into one glyph.
SCRIPTS = "naïve Ω ß 你好，世界 Привет مرحبا नमस्ते 🙂 👩‍👩‍👧 🇫🇷 e\u0301 \u200b … “so” 𝒳"


@pytest.fixture(scope="module")
def folder():
    pytest.importorskip("gguf")
    return base_of(str(real_file()))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def stock(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(folder):
    made = Engine(folder, EngineConfig(kv_cache_tokens=60_000, max_running=64))
    yield made
    made.close()


def chat(tokenizer, question):
    turns = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


@torch.inference_mode()
def next_logprobs(stock, tokens):
    return stock(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].double().log_softmax(-1)


def test_fifty_greedy_answers_equal_those_of_transformers(engine, tokenizer, stock):
    """Token by token; where they diverge, both tokens are equally likely up to rounding."""
    prompts = [chat(tokenizer, task.format(thing)) for task, thing in itertools.product(TASKS, THINGS)]
    sampling = SamplingParams(greedy=True, max_new_tokens=32)
    answers = [one.result().sequences[0] for one in engine.submit([Request(p, sampling, [0]) for p in prompts])]
    assert len(answers) == 50
    parted = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            made = stock.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32)
        expected, got = made[0, len(prompt) :].tolist(), answer.resp_tokens
        if got != expected:
            parted += 1
            place = next(i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b)
            likely = next_logprobs(stock, [*prompt, *got[:place]])
            assert abs(float(likely[got[place]] - likely[expected[place]])) < 1e-4
        assert answer.finish_reason == ("stop" if got[-1] == tokenizer.eos_token_id else "length")
    assert parted <= 2
    ended = [answer for answer in answers if answer.finish_reason == "stop"]
    assert len(ended) >= 10, "short answers end with the end-of-turn token of the chat template"
    assert all(tokenizer.decode(answer.resp_tokens).endswith("<|im_end|>") for answer in ended)


def test_log_probs_of_sampling_equal_those_of_training_and_of_transformers(engine, tokenizer, stock):
    """About 10,000 sampled tokens against training, three of them against transformers."""
    prompts = [chat(tokenizer, f"Tell me a story about a {thing}.") for thing in THINGS]
    sampling = SamplingParams(temperature=1.0, max_new_tokens=128)
    results = engine.submit([Request(prompt, sampling, list(range(8))) for prompt in prompts])
    rows = [
        (prompt, sequence) for prompt, one in zip(prompts, results, strict=True) for sequence in one.result().sequences
    ]
    scored = engine.score_logprobs("actor", [[*prompt, *sequence.resp_tokens] for prompt, sequence in rows])
    gaps = [
        abs(a - b)
        for (prompt, sequence), row in zip(rows, scored, strict=True)
        for a, b in zip(sequence.resp_logprobs, row[len(prompt) :], strict=True)
    ]
    assert len(gaps) > 8_000
    assert max(gaps) < 1e-3
    assert sum(gaps) / len(gaps) < 1e-5
    prompt, sequence = rows[0]
    for place in (0, len(sequence.resp_tokens) // 2, len(sequence.resp_tokens) - 1):
        likely = next_logprobs(stock, [*prompt, *sequence.resp_tokens[:place]])
        assert float(likely[sequence.resp_tokens[place]]) == pytest.approx(sequence.resp_logprobs[place], abs=1e-4)


def test_a_prompt_near_the_context_limit_is_continued_as_by_transformers(engine, tokenizer, stock):
    words = " ".join(f"{number} {thing}s," for number, thing in zip(range(2000), itertools.cycle(THINGS), strict=False))
    prompt = tokenizer(words)["input_ids"][:8160]
    sampling = SamplingParams(greedy=True, max_new_tokens=16)
    [result] = engine.submit([Request(prompt, sampling, [0])])
    sequence = result.result().sequences[0]
    tokens = [*prompt, *sequence.resp_tokens]
    assert len(tokens) == 8176 == stock.config.max_position_embeddings - 16
    with torch.inference_mode():
        logits = stock(input_ids=torch.tensor([tokens]), use_cache=False, logits_to_keep=17).logits[0, :-1].double()
    likely = logits.log_softmax(-1)
    for row, token, recorded in zip(likely, sequence.resp_tokens, sequence.resp_logprobs, strict=True):
        assert float(row[token]) == pytest.approx(recorded, abs=1e-3)
        assert float(row.max() - row[token]) < 1e-3


def test_streamed_text_consists_of_whole_characters(tokenizer):
    ids = tokenizer(SCRIPTS, add_special_tokens=False)["input_ids"]
    assert len(ids) > 1.5 * len(SCRIPTS.split()), "most characters take several tokens"
    pieces = IncrementalDetokenizer(tokenizer)
    heard = [pieces.push(token) for token in ids]
    assert "\ufffd" not in "".join(heard)
    assert "".join(heard) + pieces.flush() == tokenizer.decode(ids) == SCRIPTS


def test_a_decode_step_is_compiled_in_bf16(folder, tokenizer, stock):
    """It is validated against the model before it is used; rounding in a trained model must not fail this check."""
    made = Engine(folder, EngineConfig(dtype=torch.bfloat16, decode="compiled", kv_cache_tokens=4096))
    try:
        prompt = chat(tokenizer, "What is the capital of France?")
        [future] = made.submit([Request(prompt, SamplingParams(max_new_tokens=8, greedy=True), [0])])
        [sequence] = future.result(timeout=120).sequences
    finally:
        made.close()
    assert "Paris" in tokenizer.decode(sequence.resp_tokens)
    assert sequence.resp_logprobs[0] == pytest.approx(
        float(next_logprobs(stock, prompt).max()), abs=0.3
    )  # bf16 keeps three digits of a logit
