"""Each algorithm really learns: a short run through ``areno train``, judged by plain ``transformers`` on held-out prompts.

The RL task cannot be solved without reading the prompt: it asks for digits or for letters, and the reward is the fraction
of characters of that kind. A random byte-level model earns about 0.07. The thresholds leave a margin: seeds 0 to 4 reach at
least 0.98.
"""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areno.cli.main import main
from tests.support.cli import LOADER
from tests.support.examples import some_quick
from tests.support.tiny import TEXTS, save_tiny_checkpoint

NEW_TOKENS = 12
REWARD = """
def reward_fn(record):
    wanted = str.isdigit if "digits" in record.prompt else str.islower
    return sum(map(wanted, record.completion)) / max(len(record.completion), 1)
"""
RL_STEPS, SFT_STEPS = 70, 40


def train(algo, checkpoint, rows, folder, *further, seed=0):
    """Train in this process; returns the folder of the last checkpoint."""
    files = {"data.jsonl": "\n".join(map(json.dumps, rows)), "reward.py": REWARD, "loader.py": LOADER}
    for name, text in files.items():
        (folder / name).write_text(text)
    hook = (
        ("--dataset-loader-fn", folder / "loader.py") if algo == "sft" else ("--reward-fn-path", folder / "reward.py")
    )
    arguments = ["--algo", algo, "--ckpt", checkpoint, "--dataset-path", folder / "data.jsonl", *hook]
    arguments += ["--run-dir", folder / "run", "--mini-bs", 128, "--lr", "6e-3", "--seed", seed, *further]
    assert main(["train", *map(str, arguments)]) == 0
    return max((folder / "run" / "checkpoints").iterdir())


def load(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return tokenizer, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def mean_reward(folder, prompts):
    """Mean reward of one random completion of each prompt."""
    tokenizer, model = load(folder)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    encoded = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    torch.manual_seed(0)
    with torch.inference_mode():
        output = model.generate(**encoded, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS)
    texts = tokenizer.batch_decode(output[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    shares = [
        sum(map(str.isdigit if "digits" in prompt else str.islower, text)) / max(len(text), 1)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return sum(shares) / len(shares)


def kinds_task(folder, seed=0):
    """A random model, training rows and held-out prompts."""
    prompts = [f"{a} {kind} {b}" for kind in ("digits", "letters") for a in range(30) for b in range(30)]
    random.Random(0).shuffle(prompts)
    checkpoint = save_tiny_checkpoint(folder / "model", texts=prompts, vocab=261, seed=seed)
    return checkpoint, [{"prompt": prompt} for prompt in prompts[:-64]], prompts[-64:]


@pytest.mark.parametrize("algo", some_quick(["gspo", "grpo"], "gspo"))
def test_a_policy_learns_from_rewards_alone_to_do_what_the_prompt_asks(algo, tmp_path):
    checkpoint, rows, held_out = kinds_task(tmp_path)
    sizes = ("--batch-size", 8, "--n-samples", 16, "--max-new-tokens", NEW_TOKENS, "--reward-workers", 1)
    before = mean_reward(checkpoint, held_out)
    after = mean_reward(train(algo, checkpoint, rows, tmp_path, *sizes, "--max-steps", RL_STEPS), held_out)
    assert before < 0.15
    assert after > 0.8


def negative_log_likelihood(folder, rows):
    """Mean over the response tokens, including EOS."""
    tokenizer, model = load(folder)
    total = tokens = 0
    for row in rows:
        chat = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        response = [*tokenizer.encode(row["response"]), tokenizer.eos_token_id]
        ids = torch.tensor([[*prompt, *response]])
        with torch.inference_mode():
            logprobs = model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])
        total -= float(logprobs[-len(response) :].sum())
        tokens += len(response)
    return total / tokens


def test_a_model_learns_to_imitate_answers_it_has_not_seen(tmp_path):
    rows = [dict(zip(("prompt", "response"), text.split("? "), strict=True)) for text in TEXTS]
    random.Random(0).shuffle(rows)
    checkpoint = save_tiny_checkpoint(tmp_path / "model")
    trained = train("sft", checkpoint, rows[:-64], tmp_path, "--batch-size", 32, "--max-steps", SFT_STEPS)
    before, after = (negative_log_likelihood(folder, rows[-64:]) for folder in (checkpoint, trained))
    assert before > 5.5
    assert after < 1.0
