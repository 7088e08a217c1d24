"""Evaluates a model that runs on an OpenAI-compatible server. A reward function scores the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from areno.api.datasets import first_rows, load_training_dataset
from areno.api.evaluation import EVALUATION_STREAM, OnScored, eval_batch_size, evaluation_sampling, measure
from areno.api.records import Sample
from areno.api.rewards import reward_runner
from areno.config.all_train_options import TrainOptions
from areno.config.splits import TEST
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
_SEEDS = 2**31  # some servers accept 32-bit seeds only


def evaluate_server(
    url: str,
    model: str | None,
    options: TrainOptions,
    *,
    loader_fn: Callable[..., Any] | None = None,
    on_start: Callable[[int], None] | None = None,
    on_scored: OnScored | None = None,
) -> dict[str, float]:
    """Evaluate a model that a server runs.

    Args:
        url: base URL of the server, including the API version, such as ``http://HOST:8000/v1``.
        model: model name on the server; None uses the first model that the server lists.
        options: options of the evaluation, as in :func:`areno.api.run_training.run_evaluation`. A prompt that is a
            string becomes a user message.

    Returns:
        The metrics of :func:`areno.api.evaluation.evaluate_prompts`.

    Raises:
        UsageError: the server does not answer.
        EngineError: the server rejects a prompt, or stops answering.
    """
    rows = first_rows(load_training_dataset(str(options.dataset_path), loader_fn, split=TEST), options.eval_max_rows)
    client = OpenAIClient(url, _TIMEOUT_S, model)
    client.check(f"--ckpt {url}")
    if on_start is not None:
        on_start(len(rows))
    runner = reward_runner(options)

    def rewards(records: list[RewardRecord], _: list[list[int]]) -> list[float | None]:
        return [outcome.value for outcome in runner.run(records)]

    n_samples, concurrency = options.eval_n_samples, options.running_sequences
    server = _ServerAnswers(client, evaluation_sampling(options), n_samples, options.seed)
    try:
        runner.start()
        with ThreadPoolExecutor(concurrency, thread_name_prefix="areno-eval") as pool:
            batches = _batches(rows, eval_batch_size(concurrency, n_samples), str(options.dataset_path))
            return measure(batches, partial(server.answers, pool), rewards, n_samples, on_scored)
    finally:
        runner.close()


def _batches(rows: Sequence[Mapping[str, Any]], size: int, source: str) -> Iterator[PromptBatch]:
    """Yield batches of prompts. The prompts have no tokens, because the server tokenizes them."""
    for start in range(0, len(rows), size):
        items = []
        for index in range(start, min(start + size, len(rows))):
            row = dict(rows[index])
            prompt = text_or_messages(row, "prompt", source, index)
            text = prompt if isinstance(prompt, str) else "\n".join(str(message.get("content")) for message in prompt)
            items.append(PromptItem(text, row.get("solutions"), [], {**row, "prompt": prompt}))
        yield PromptBatch(items, scanned=len(items))


class _ServerAnswers:
    """Requests ``n_samples`` answers from a server for each prompt. Each answer has its own seed."""

    def __init__(self, client: OpenAIClient, sampling: SamplingParams, n_samples: int, seed: int) -> None:
        self._client, self._n_samples, self._seed = client, n_samples, seed
        self._body: dict[str, Any] = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
        }
        if sampling.stop:
            self._body["stop"] = sampling.stop

    def answers(self, pool: ThreadPoolExecutor, batch: PromptBatch, prompts: Sequence[int]) -> list[Sample | None]:
        requests = [
            (item, prompt, sample)
            for item, prompt in zip(batch.items, prompts, strict=True)
            for sample in range(self._n_samples)
        ]
        return list(pool.map(lambda request: self._answer(*request), requests))

    def _answer(self, item: PromptItem, prompt: int, sample: int) -> Sample:
        content = item.record["prompt"]
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        seed = derive_seed(self._seed, EVALUATION_STREAM, prompt, sample) % _SEEDS
        try:
            response = self._client.post("chat/completions", {**self._body, "messages": messages, "seed": seed})
            choice = response["choices"][0]
            text = str(choice["message"]["content"] or "")
            length = (response.get("usage") or {}).get("completion_tokens")  # None if the server does not report it
        except (ServerError, LookupError, TypeError, AttributeError) as error:
            raise EngineError(
                f"--ckpt {self._client.url}: the server did not answer prompt {prompt}: {error!s}"
            ) from error
        reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
        answer = Sample.of_completion(item, prompt, sample, RolloutSequence([], [], reason, text))
        answer.record.metadata["response_len"] = length
        return answer
