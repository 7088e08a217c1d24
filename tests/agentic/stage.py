"""A stage for agents: a real server and a real engine, whose model generates scripted answers.

The script stands in for a model that has learned to think and call tools: a grammar allows one token at each position.
Everything else is real: prompts, sampling, and the log-probs, which are those of the model without the grammar.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from areno import ArenoConfig, SamplingParams, Trainer
from areno.api.agentic import AgentBatch
from areno.types import PromptBatch, PromptItem
from tests.support.tiny import tiny_module


@dataclass
class Exchange:
    """What the engine was sent and what it sampled."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class Script:
    """Forces the next answers of an engine, and records its requests and samples.

    Args:
        engine: engine whose ``submit`` is wrapped.
    """

    def __init__(self, engine: Any) -> None:
        self.lines: deque[list[int]] = deque()
        self.log: list[Exchange] = []
        self._vocabulary = engine.actor.model.vocab_size
        submit = engine.submit

        def forced(requests: list[Any]) -> list[Any]:
            changed = [replace(one, constraint=self._line) if self.lines else one for one in requests]
            futures = submit(changed)
            for one, future in zip(requests, futures, strict=True):
                future.add_done_callback(lambda done, prompt=one.prompt_tokens: self._keep(prompt, done))
            return futures

        engine.submit = forced

    def _line(self, _tokenizer: Any) -> Any:
        return _Forced(self.lines.popleft(), self._vocabulary)

    def _keep(self, prompt: list[int], done: Any) -> None:
        for sequence in done.result().sequences:
            self.log.append(Exchange(list(prompt), list(sequence.resp_tokens), list(sequence.resp_logprobs)))


class _Forced:
    finished = False

    def __init__(self, tokens: list[int], vocabulary: int) -> None:
        self._left, self._vocabulary = deque(tokens), vocabulary

    def allowed(self) -> np.ndarray | None:
        if not self._left:
            return None
        mask = np.zeros(self._vocabulary, dtype=np.bool_)
        mask[self._left[0]] = True
        return mask

    def forces(self, token: int) -> bool:
        """Return False: scripted tokens count as chosen by the policy."""
        return False

    def push(self, token: int) -> None:
        if self._left:
            self._left.popleft()


def save_model(folder: Path, tokenizer: Any, eos: list[int], vocab: int = 704) -> Path:
    module = tiny_module(
        "llama", vocab=vocab, eos_token_id=tokenizer.eos_token_id, hidden=32, layers=2, heads=2, sharpen=2.0
    )
    module.generation_config.eos_token_id = eos  # type: ignore[union-attr]
    module.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def open_trainer(checkpoint: Path, **runtime: Any) -> Iterator[Trainer]:
    config = ArenoConfig(runtime={"kv_cache_tokens": 40000, **runtime})
    with Trainer(1, str(checkpoint), custom_config=config) as trainer:
        trainer.init()
        yield trainer


def batch_of(prompts: list[str], n_samples: int = 1, tokens: list[int] | None = None) -> AgentBatch:
    items = [PromptItem(prompt, ["4"], tokens or [5, 6], {"prompt": prompt, "solutions": ["4"]}) for prompt in prompts]
    return AgentBatch.from_prompt_batch(PromptBatch(items), n_samples)


def sampling(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 200, **changes})


_NAMES = itertools.count()


def split_tokens(tokenizer: Any, text: str, cuts: list[int]) -> list[int]:
    """Token ids of a text tokenized in pieces; they usually differ from those of the whole text."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    return [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]
