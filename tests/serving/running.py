"""The real server in its own process, and models with known answers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.cli import Process, start
from tests.support.tiny import TEXTS, bpe_tokenizer, tiny_module

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
ANSWERS = {
    "weather?": f"<think>\nI look it up.\n</think>\n\nLet me see. {CALL}",
    "two calls?": f"{CALL}\n{CALL.replace('Paris', 'Rome')}",
    "broken call?": '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> oh',
    "count": "one two three four five six seven eight nine ten",
}
TEMPLATE = (
    "{%- if tools %}<|system|>Call {{ tools[0].function.name }} in <tool_call><|end|>{% endif -%}"
    "{%- for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor -%}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
    "{#- reasoning stands in <think> and </think> -#}"
)


class Running:
    """A server process that is ready."""

    def __init__(self, process: Process, url: str) -> None:
        self.process, self.url = process, url

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": self.base_url, "api_key": "none", "max_retries": 0, **options})

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def metric(self, name: str, labels: str = "") -> float:
        """A value of ``/metrics``."""
        page = httpx.get(f"{self.url}/metrics").text
        match = re.search(rf"^{name}{re.escape(labels)} (\S+)$", page, re.MULTILINE)
        assert match, page
        return float(match[1])

    def wait_idle(self, timeout: float = 20) -> None:
        """Wait until the engine has nothing to do."""
        deadline = time.monotonic() + timeout
        while self.metric("areno_samples_running") or self.metric("areno_samples_waiting"):
            assert time.monotonic() < deadline, "samples are left in the engine"
            time.sleep(0.02)


def begin(checkpoint: Path, *options: object, fresh: bool = False) -> tuple[Process, str]:
    """Start a server on a free port; returns when the port is known, perhaps before the model is loaded."""
    process = start("serve", "--model-path", checkpoint, "--port", 0, *options, fresh=fresh)
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.search(r"at (http://\S+)/v1", line)
    assert match, line + process.stdout.read()
    return process, match[1]


def wait_ready(url: str, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while (answer := httpx.get(f"{url}/ready")).status_code != 200:
        assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
        assert time.monotonic() < deadline, "the server did not become ready"
        time.sleep(0.05)


@contextmanager
def running(checkpoint: Path, *options: object) -> Iterator[Running]:
    """A server that is ready; it must exit with code 0 when it is terminated."""
    process, url = begin(checkpoint, *options)
    try:
        wait_ready(url)
        yield Running(process, url)
        process.terminate()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        assert "Traceback" not in output, output
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def save_sharp_checkpoint(folder: Path, heads: int = 2) -> Path:
    """A random model whose distribution is far from flat, so that greedy decoding has no ties."""
    tokenizer = bpe_tokenizer(TEXTS)
    module = tiny_module(
        "llama",
        vocab=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        hidden=32,
        layers=2,
        heads=heads,
        sharpen=4.0,
    )
    module.generation_config.eos_token_id = tokenizer.eos_token_id  # type: ignore[union-attr]
    module.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return folder


def save_taught_checkpoint(folder: Path) -> Path:
    """A model that has memorized `ANSWERS`, with and without tools in its prompt."""
    tokenizer = bpe_tokenizer([*ANSWERS, *ANSWERS.values(), str(WEATHER)])
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    rows = []
    for question, answer in ANSWERS.items():
        for tools in (None, [WEATHER]):
            messages = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            rows.append((prompt_ids, answer_ids))
    module = tiny_module(
        "llama", vocab=len(tokenizer), eos_token_id=tokenizer.eos_token_id, hidden=64, layers=2, sharpen=1.0
    )
    _teach(module, rows)
    module.generation_config.eos_token_id = tokenizer.eos_token_id  # type: ignore[union-attr]
    module.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return folder


def _teach(module: Any, rows: list[tuple[list[int], list[int]]]) -> None:
    width = max(len(prompt_ids) + len(answer_ids) for prompt_ids, answer_ids in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for row, (prompt_ids, answer_ids) in enumerate(rows):
        tokens[row, : len(prompt_ids) + len(answer_ids)] = torch.tensor(prompt_ids + answer_ids)
        labels[row, len(prompt_ids) : len(prompt_ids) + len(answer_ids)] = torch.tensor(answer_ids)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(400):
        loss = module(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 5e-3:
            break
    assert loss.item() < 0.02, "the model did not learn its answers"


class Reference:
    """The same checkpoint in ``transformers``."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()

    def greedy(self, prompt: list[int], new: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = self.model.generate(ids, max_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(ids))
        return out[0, len(prompt) :].tolist()

    def logprobs(self, prompt: list[int], response: list[int]) -> torch.Tensor:
        """Log-probs [response, V] at each position of the response."""
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + response])).logits[0].double()
        return logits.log_softmax(-1)[len(prompt) - 1 : -1]
