"""The part of :class:`areno.Trainer` that generates responses in rollout sessions."""

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from areno.api import arguments
from areno.api.backend.base import Areno, ArenoConfig, BackendType, get_backend
from areno.api.records import with_texts
from areno.engine.backend import Backend
from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import EngineError
from areno.observability import log_lines
from areno.text.chat import encode_generation_prompt
from areno.types import Request, RolloutResult, SamplingParams
from areno.types.routing import RoutingRecord

logger = logging.getLogger("areno.api.backend.areno.backend")  # the documented name

Self = TypeVar("Self", bound="Sampler")


class StepClock:
    """Measures the rollout, training and total time of a step, in seconds.

    ``trained_s`` is the duration of the last training call. ``trained_at`` is the end time of the last training call
    (``time.perf_counter``).
    """

    def __init__(self) -> None:
        self.trained_s = self.trained_at = 0.0
        self._rollout_s = self._train_s = 0.0
        self._rollout_start: float | None = None
        self._step_start: float | None = None

    def begin_rollout(self) -> None:
        """Start timing a rollout."""
        self._rollout_start = time.perf_counter()
        self._step_start = self._step_start or self._rollout_start

    def end_rollout(self) -> None:
        """Stop timing a rollout."""
        if self._rollout_start is not None:
            self._rollout_s += time.perf_counter() - self._rollout_start
            self._rollout_start = None

    @contextmanager
    def training(self) -> Iterator[None]:
        """Measure the time of the training call inside the ``with`` block."""
        start = time.perf_counter()
        self._step_start = self._step_start or start
        yield
        self.trained_at = time.perf_counter()
        self.trained_s = self.trained_at - start
        self._train_s += self.trained_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock during the ``with`` block, so that rollouts in the block do not count towards the step's times."""
        rollout, starts, paused_at = self._rollout_s, (self._rollout_start, self._step_start), time.perf_counter()
        self._rollout_start = self._step_start = None
        try:
            yield
        finally:
            pause = time.perf_counter() - paused_at
            self._rollout_s = rollout
            self._rollout_start, self._step_start = (None if start is None else start + pause for start in starts)

    def close_step(self, ended: float | None = None) -> dict[str, float]:
        """End the step, reset the clock, and log and return the times of the step.

        The step ends at ``ended`` or, by default, now. The training time is the sum over all trained models.
        """
        ended = ended or time.perf_counter()
        rollout, train, total = self._rollout_s, self._train_s, ended - (self._step_start or ended)
        self._rollout_s, self._train_s, self._step_start = 0.0, 0.0, None
        log_lines.backend_time(logger, rollout, train, total)
        return {"step_rollout_time_s": rollout, "step_train_time_s": train, "step_e2e_time_s": total}


class Sampler:
    """Generates responses in rollout sessions. See :class:`areno.Trainer` for the arguments."""

    def __init__(
        self, world_size: int, model_path: str, backend_type: BackendType | str | None = None, custom_config: Any = None
    ) -> None:
        arguments.integer("world_size", world_size)
        arguments.of_type("model_path", model_path, str | os.PathLike)
        kind = get_backend(backend_type) if isinstance(backend_type, str) else backend_type or Areno
        config = ArenoConfig() if custom_config is None and kind is Areno else custom_config
        self.world_size, self.model_path, self.seed = world_size, model_path, 0
        self.clock = StepClock()
        self._load = kind.create(model_path, world_size, config)
        self._backend: Backend | None = None
        self._depth = 0
        self._closed = False
        self._requests = 0
        self._sampled_at: set[float] = set()  # temperatures

    @property
    def backend(self) -> Backend:
        """The backend, which holds the models. Raises EngineError before :meth:`init` and after :meth:`close`."""
        if self._backend is None:
            raise EngineError("the trainer is not initialized, or was closed; call trainer.init() first")
        return self._backend

    def init(self) -> None:
        """Load the tokenizer and the model. Call this method before all other methods.

        Raises EngineError if the model is already loaded. To load the model again, call :meth:`close` first.
        """
        if self._backend is not None:
            raise EngineError(
                "the trainer is already initialized, and loading the model again would discard its training; "
                "call close() first, or create a new Trainer"
            )
        self._backend = self._load()
        self._closed = False

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the models. May be called while a rollout session is open, and more than once."""
        self._closed, self._depth = True, 0
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self.backend.tokenizer

    def dp_size(self) -> int:
        """Return the data-parallel size, ``world_size`` divided by the tensor-parallel size."""
        return self.backend.dp_size

    def model_context_len(self) -> int | None:
        """Return the model's maximum sequence length in tokens; None if the model has no limit."""
        return self.backend.context_length

    def begin_rollout_session(self, max_running_prompts: int | None = None) -> None:
        """Open a rollout session without a context manager. Each call needs a matching :meth:`end_rollout_session`."""
        if self._depth == 0:
            from areno.engine.libc_tuning import release_workers  # lazy: it imports torch

            backend, running = self.backend, running_sequences(max_running_prompts)
            release_workers()  # an agent may send requests from other threads while this thread waits
            self.clock.begin_rollout()
            backend.set_max_running(running)
        self._depth += 1

    def end_rollout_session(self) -> None:
        """Close the rollout session that was opened last.

        Sessions can be nested. If no other session is open, generation ends, and pending requests are aborted. Has no effect
        after :meth:`close`.
        """
        if self._closed:
            return
        if self._depth == 0:
            raise EngineError(
                "end_rollout_session() was called, but no rollout session is open; call begin_rollout_session() first"
            )
        self._depth -= 1
        if self._depth == 0:
            self.backend.end_rollout()
            self.clock.end_rollout()

    def rollout_batch(
        self, prompts: Sequence[str], n_samples: int, sampling_params: SamplingParams
    ) -> list[RolloutResult]:
        """Apply the tokenizer's chat template, if any, to texts, and generate responses. See :meth:`rollout_token_batch`."""
        return self.rollout_token_batch(self._encode(prompts), n_samples, sampling_params)

    async def rollout_batch_async(
        self, prompts: Sequence[str], n_samples: int, sampling_params: SamplingParams
    ) -> list[RolloutResult]:
        """Run :meth:`rollout_batch` without blocking the event loop."""
        return await self.rollout_token_batch_async(self._encode(prompts), n_samples, sampling_params)

    def _encode(self, prompts: Sequence[str]) -> list[list[int]]:
        tokenizer = self.get_tokenizer()
        return [encode_generation_prompt(tokenizer, prompt) for prompt in arguments.texts(prompts)]

    def rollout_token_batch(
        self,
        prompt_tokens: Sequence[Any],
        n_samples: int,
        sampling_params: SamplingParams,
        *,
        seeds: Sequence[Sequence[int]] | None = None,
    ) -> list[RolloutResult]:
        """Generate responses to prompts that are token ids.

        Args:
            prompt_tokens: for each prompt, a list of token ids, or an object with ``ids`` or ``input_ids``.
            n_samples: number of responses per prompt.
            sampling_params: sampling parameters.
            seeds: for each prompt, a list of ``n_samples`` seeds; None derives the seeds from ``sampling_params.seed`` or, if
                that is None, from the run's seed.

        Returns:
            One result per prompt, with ``n_samples`` sequences.

        Raises:
            EngineError: called outside a rollout session.
            TypeError: an argument is of the wrong type.
            UsageError: a prompt is empty, is longer than ``sampling_params.max_prompt_len``, leaves no room for a response,
                or has an id outside the vocabulary.
            ValueError: ``n_samples`` is below 1, or ``seeds`` has the wrong shape.
        """
        futures = self._submit(prompt_tokens, n_samples, sampling_params, seeds)
        return with_texts([future.result() for future in futures], self.get_tokenizer(), sampling_params)

    async def rollout_token_batch_async(
        self, prompt_tokens: Sequence[Any], n_samples: int, sampling_params: SamplingParams
    ) -> list[RolloutResult]:
        """Run :meth:`rollout_token_batch` without blocking the event loop."""
        futures = self._submit(prompt_tokens, n_samples, sampling_params, None)
        results = await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        return with_texts(list(results), self.get_tokenizer(), sampling_params)

    def _submit(
        self,
        prompt_tokens: Sequence[Any],
        n_samples: int,
        sampling: SamplingParams,
        seeds: Sequence[Sequence[int]] | None,
    ) -> list[Any]:
        if self._depth == 0:
            raise EngineError(
                "a rollout was requested outside a session; wrap the call in "
                "`async with trainer.rollout_session(sampling_params=..., proxy=False):`"
            )
        arguments.integer("n_samples", n_samples)
        context, vocabulary = self.model_context_len(), self.backend.vocab_size
        self._sampled_at.add(arguments.sampling(sampling).logprob_temperature)
        prompts = arguments.prompts(prompt_tokens, sampling, context=context, vocabulary=vocabulary)
        if seeds is None:
            seeds = [self._seeds(n_samples, sampling.seed) for _ in prompts]
        else:
            seeds = arguments.seed_table(seeds, len(prompts), n_samples)
        return self.backend.submit(
            [Request(prompt, sampling, list(row)) for prompt, row in zip(prompts, seeds, strict=True)]
        )

    def _seeds(self, n_samples: int, base: int | None) -> list[int]:
        if base is not None:
            return [derive_seed(base, index) for index in range(n_samples)]
        self._requests += 1
        return [derive_seed(self.seed, self._requests, index) for index in range(n_samples)]

    def score_logprobs(
        self,
        role: str,
        token_rows: Sequence[Sequence[int]],
        *,
        temperatures: float | Sequence[float] = 1.0,
        micro_bs: int = 8,
        routed_experts: Sequence[RoutingRecord | None] | None = None,
    ) -> list[list[float]]:
        """Compute the log-probs of rows under the model of a role.

        Args:
            role: ``actor`` (the trained policy), ``ref``, or another role of kind ``policy``.
            token_rows: token ids of each row; rows may differ in length.
            temperatures: softmax temperature of all rows, or a list with the temperature of each row.
            micro_bs: number of rows per forward pass. The number does not change the result.
            routed_experts: for each row, the experts of its tokens, as in ``TrainSequence.routed_experts``. Only for the
                actor, and only if ``return_routed_experts`` is set.

        Returns:
            For each row, one natural log-prob per token. Entry i is log p(token i | tokens before i); entry 0 is 0.0.

        Raises:
            EngineError: no loaded role has this name, or the role is not a policy.
        """
        rows, values = arguments.token_rows(token_rows), arguments.temperatures(temperatures)
        routed: dict[str, Any] = {} if routed_experts is None else {"routed": routed_experts}
        return self.backend.score_logprobs(role, rows, values, arguments.integer("micro_bs", micro_bs), **routed)


def running_sequences(sequences: int | None) -> int | None:
    """Check that ``sequences``, a maximum number of concurrent sequences, is a positive integer, and return it.

    None stands for the configured maximum, and is returned unchanged.
    """
    return None if sequences is None else arguments.integer("max_running_prompts", sequences)
