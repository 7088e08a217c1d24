"""Measuring a model behind an address: any server of the OpenAI protocol answers, and rewards are those of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from areno.api.datasets import first_rows, load_training_dataset
from areno.api.evaluation import EVALUATION_STREAM, Answer, OnScored, evaluation_sampling, measure, prompts_of_piece
from areno.api.records import reward_record
from areno.api.rewards import reward_runner
from areno.config.splits import TEST
from areno.config.train_options import TrainOptions
from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import EngineError
from areno.openai_client import OpenAIClient, ServerError
from areno.text.data_rows import text_or_messages
from areno.types import (
    FinishReason,
    PromptBatch,
    PromptItem,
    RewardRecord,
    RolloutSequence,
    SamplingParams,
)

_TIMEOUT_S = 600.0
# Seeds of the protocol are 32 bits wide at some servers.
_SEEDS = 2**31


def evaluate_server(
    url: str,
    model: str | None,
    options: TrainOptions,
    *,
    loader_fn: Callable[..., Any] | None = None,
    on_start: Callable[[int], None] | None = None,
    on_scored: OnScored | None = None,
) -> dict[str, float]:
    """The metrics of :func:`areno.api.evaluation.evaluate_prompts` for a model at an address, as ``areno eval`` has them.

    Args:
        url: of the server, with its version.
        model: name at the server; None takes the first that it lists.
        options: as for :func:`areno.api.run.run_evaluation`; a prompt that is a text becomes the message of a user.

    Raises:
        UsageError: no server answers there.
        EngineError: it refuses a prompt, or is gone.
    """
    rows = first_rows(load_training_dataset(str(options.dataset_path), loader_fn, split=TEST), options.eval_max_rows)
    client = OpenAIClient(url, _TIMEOUT_S, model)
    client.check(f"--ckpt {url}")
    if on_start is not None:
        on_start(len(rows))
    runner = reward_runner(options)

    def rewards(records: list[RewardRecord], _: list[list[int]]) -> list[float | None]:
        return [outcome.value for outcome in runner.run(records)]

    n_samples, at_once = options.eval_n_samples, options.running_sequences
    ask = Questions(client, evaluation_sampling(options), n_samples, options.seed)
    try:
        runner.start()
        with ThreadPoolExecutor(at_once, thread_name_prefix="areno-eval") as pool:
            pieces = _pieces(rows, prompts_of_piece(at_once, n_samples), str(options.dataset_path))
            return measure(pieces, lambda piece, prompts: ask.all(pool, piece, prompts), rewards, n_samples, on_scored)
    finally:
        runner.close()


def _pieces(rows: Sequence[Mapping[str, Any]], size: int, source: str) -> Iterator[PromptBatch]:
    """Rows as prompts without tokens: the server has the tokenizer."""
    for begin in range(0, len(rows), size):
        items = []
        for index in range(begin, min(begin + size, len(rows))):
            row = dict(rows[index])
            prompt = text_or_messages(row, "prompt", source, index)
            text = prompt if isinstance(prompt, str) else "\n".join(str(message.get("content")) for message in prompt)
            items.append(PromptItem(text, row.get("solutions"), [], {**row, "prompt": prompt}))
        yield PromptBatch(items, scanned=len(items))


class Questions:
    """Asks a server for ``n_samples`` answers to each prompt, each with a seed of its own."""

    def __init__(self, client: OpenAIClient, sampling: SamplingParams, n_samples: int, seed: int) -> None:
        self._client, self._n_samples, self._seed = client, n_samples, seed
        self._body: dict[str, Any] = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.stop:
            self._body["stop"] = sampling.stop

    def all(self, pool: ThreadPoolExecutor, piece: PromptBatch, prompts: Sequence[int]) -> list[Answer | None]:
        """The answers to a piece, prompt by prompt."""
        wanted = [
            (item, prompt, sample)
            for item, prompt in zip(piece.items, prompts, strict=True)
            for sample in range(self._n_samples)
        ]
        return list(pool.map(lambda one: self._one(*one), wanted))

    def _one(self, item: PromptItem, prompt: int, sample: int) -> Answer:
        given = item.record["prompt"]
        messages = given if isinstance(given, list) else [{"role": "user", "content": given}]
        seed = derive_seed(self._seed, EVALUATION_STREAM, prompt, sample) % _SEEDS
        try:
            found = self._client.post("chat/completions", {**self._body, "messages": messages, "seed": seed})
            choice = found["choices"][0]
            text = str(choice["message"]["content"] or "")
            length = int((found.get("usage") or {}).get("completion_tokens") or 0)
        except (ServerError, LookupError, TypeError, AttributeError) as error:
            raise EngineError(f"--ckpt {self._client.url} does not answer prompt {prompt}: {error!s}") from error
        reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
        sequence = RolloutSequence([], [], reason, text)
        record = reward_record(item, prompt, sample, sequence)
        record.metadata["response_len"] = length
        return Answer(record, [], sequence)
