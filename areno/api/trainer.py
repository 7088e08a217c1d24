"""``areno.Trainer``: the SDK's entry point for custom training loops.

One step, in the order of the methods: prompts are generated from inside a rollout session, rows are scored by auxiliary
roles (reference, critic, reward), the critic trains, the policy trains, a checkpoint is saved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from areno.api.backend.base import Areno, ArenoConfig, Backend, BackendType, get_backend
from areno.api.datasets import iter_prompt_batches
from areno.api.metrics import MetricsRecorder
from areno.api.session import RolloutSession
from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import EngineError, UsageError
from areno.text.chat import encode_generation_prompt
from areno.types import ModelRole, PromptBatch, Request, RewardRecord, RolloutResult, SamplingParams, TrainSequence


class Trainer:
    """Owns a backend: generates inside rollout sessions, trains with any loss, saves checkpoints.

    The constructor is cheap; :meth:`init` loads the model.

    Args:
        world_size: number of devices or worker ranks.
        model_path: checkpoint folder or Hugging Face repo id.
        backend_type: ``areno.Areno`` (the default), a name, or a registered backend of your own.
        custom_config: the backend's configuration; ``areno.ArenoConfig()`` when omitted.
        metrics_log_dir: folder for TensorBoard events of every :meth:`train` call; None writes none.

    Raises:
        TypeError: ``custom_config`` is not of the backend's class.
        UsageError: the configuration cannot work.
    """

    def __init__(
        self,
        world_size: int,
        model_path: str,
        backend_type: BackendType | str | None = None,
        custom_config: Any = None,
        metrics_log_dir: str | None = None,
    ) -> None:
        kind = get_backend(backend_type) if isinstance(backend_type, str) else backend_type or Areno
        config = ArenoConfig() if custom_config is None and kind is Areno else custom_config
        self.world_size, self.model_path = world_size, model_path
        self.backend: Backend = kind.create(model_path, world_size, config)
        self._recorder = MetricsRecorder(metrics_log_dir) if metrics_log_dir else None
        self._depth = 0
        self._closed = False
        self._requests = 0
        self._steps = 0
        self.seed = 0

    def init(self) -> None:
        """Load tokenizer and model. Call it once, before anything else; after :meth:`close` it opens the trainer anew.

        Raises:
            EngineError: it was called before.
            UsageError: there is no usable checkpoint.
        """
        self.backend.initialize()
        self._closed = False

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.backend.tokenizer()

    def dp_size(self) -> int:
        """Number of model replicas that share the work: ``world_size`` divided by the tensor-parallel size."""
        return self.backend.dp_size()

    def model_context_len(self) -> int | None:
        """Most tokens of one sequence, where the model states a limit."""
        return self.backend.context_length()

    def load_prompt_batches(
        self,
        dataset: Sequence[dict[str, Any]],
        *,
        batch_size: int,
        max_prompt_tokens: int,
        prompt_key: str = "prompt",
        solutions_key: str = "solutions",
    ) -> Iterator[PromptBatch]:
        """Tokenize a data set in order; see :func:`areno.api.datasets.iter_prompt_batches`."""
        return iter_prompt_batches(
            dataset,
            self.get_tokenizer(),
            batch_size=batch_size,
            max_prompt_tokens=max_prompt_tokens,
            prompt_key=prompt_key,
            solutions_key=solutions_key,
        )

    def rollout_session(
        self,
        *,
        sampling_params: SamplingParams,
        loss_mask_policy: Any = None,
        max_running_prompts: int | None = None,
        timeout_s: float = 300.0,
        proxy: bool = True,
        seed: int | None = None,
        disable_thinking: bool = False,
    ) -> RolloutSession:
        """The boundary of generation: ``async with trainer.rollout_session(..., proxy=False)``, or ``with``.

        Args:
            sampling_params: default generation controls.
            loss_mask_policy: :class:`areno.api.agentic.LossMaskPolicy`, which of an agent's tokens are trained on.
            max_running_prompts: most sequences decoded at once.
            timeout_s: deadline of an agent, and of each of its requests.
            proxy: serve agents an OpenAI-compatible endpoint; the session is their ``ctx``.
            seed: what the draws of agents derive from; None derives one, so that a repeated program repeats them.
            disable_thinking: pass ``enable_thinking=False`` to the chat template in agents' requests.
        """
        options: dict[str, Any] = {"proxy": proxy, "loss_mask_policy": loss_mask_policy, "timeout_s": timeout_s}
        seed = self._seeds(1, sampling_params.seed)[0] if proxy and seed is None else seed or 0
        options |= {"seed": seed, "disable_thinking": disable_thinking}
        return RolloutSession(self, sampling_params, max_running_prompts, **options)

    def begin_rollout_session(self, max_running_prompts: int | None = None) -> None:
        """Enter a session by hand; each call needs its :meth:`end_rollout_session`."""
        if self._depth == 0:
            self.backend.begin_rollout(max_running_prompts)
        self._depth += 1

    def end_rollout_session(self) -> None:
        """Leave a session by hand; the outermost one aborts what is still pending. After :meth:`close` it does nothing.

        Raises:
            EngineError: no session is open.
        """
        if self._closed:
            return
        if self._depth == 0:
            raise EngineError("no rollout session is open: each end_rollout_session() needs a begin_rollout_session()")
        self._depth -= 1
        if self._depth == 0:
            self.backend.end_rollout()

    def rollout_batch(
        self, prompts: Sequence[str], n_samples: int, sampling_params: SamplingParams
    ) -> list[RolloutResult]:
        """Generate ``n_samples`` completions of each text prompt, through the chat template where there is one.

        Arguments, result and errors are those of :meth:`rollout_token_batch`, with text in place of token ids.
        """
        return self.rollout_token_batch(self._encode(prompts), n_samples, sampling_params)

    async def rollout_batch_async(
        self, prompts: Sequence[str], n_samples: int, sampling_params: SamplingParams
    ) -> list[RolloutResult]:
        """:meth:`rollout_batch` without blocking the event loop."""
        return await self.rollout_token_batch_async(self._encode(prompts), n_samples, sampling_params)

    def _encode(self, prompts: Sequence[str]) -> list[list[int]]:
        tokenizer = self.get_tokenizer()
        return [encode_generation_prompt(tokenizer, prompt) for prompt in prompts]

    def rollout_token_batch(
        self,
        prompt_tokens: Sequence[Any],
        n_samples: int,
        sampling_params: SamplingParams,
        *,
        seeds: Sequence[Sequence[int]] | None = None,
    ) -> list[RolloutResult]:
        """Generate from token ids.

        Args:
            prompt_tokens: one list of ids per prompt, or objects with ``ids`` or ``input_ids``.
            n_samples: completions per prompt.
            sampling_params: generation controls.
            seeds: ``n_samples`` seeds per prompt; None derives them, so that a repeated program repeats its samples.

        Returns:
            One result per prompt, with ``n_samples`` sequences.

        Raises:
            EngineError: called outside a rollout session.
            UsageError: a prompt is longer than ``sampling_params.max_prompt_len``.
        """
        futures = self._submit(prompt_tokens, n_samples, sampling_params, seeds)
        return self._with_text([future.result() for future in futures], sampling_params)

    async def rollout_token_batch_async(
        self, prompt_tokens: Sequence[Any], n_samples: int, sampling_params: SamplingParams
    ) -> list[RolloutResult]:
        """:meth:`rollout_token_batch` without blocking the event loop."""
        futures = self._submit(prompt_tokens, n_samples, sampling_params, None)
        results = await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        return self._with_text(list(results), sampling_params)

    def _submit(
        self,
        prompt_tokens: Sequence[Any],
        n_samples: int,
        sampling: SamplingParams,
        seeds: Sequence[Sequence[int]] | None,
    ) -> list[Any]:
        if self._depth == 0:
            raise EngineError(
                "rollout outside a session: wrap the call in `async with trainer.rollout_session(sampling_params=..., "
                "proxy=False):`"
            )
        prompts = [_token_ids(prompt) for prompt in prompt_tokens]
        limit = sampling.max_prompt_len
        for index, prompt in enumerate(prompts):
            if limit is not None and len(prompt) > limit:
                raise UsageError(f"prompt {index} has {len(prompt)} tokens, more than max_prompt_len={limit}")
        seeds = seeds or [self._seeds(n_samples, sampling.seed) for _ in prompts]
        return self.backend.submit(
            [Request(prompt, sampling, list(own)) for prompt, own in zip(prompts, seeds, strict=True)]
        )

    def _seeds(self, n_samples: int, base: int | None) -> list[int]:
        if base is not None:
            return [derive_seed(base, index) for index in range(n_samples)]
        self._requests += 1
        return [derive_seed(self.seed, self._requests, index) for index in range(n_samples)]

    def _with_text(self, results: list[RolloutResult], sampling: SamplingParams) -> list[RolloutResult]:
        """Decode the responses; those of requests with stop strings come decoded, cut before the stop string."""
        sequences = [sequence for result in results for sequence in result.sequences]
        if sampling.stop or not sequences:
            return results
        texts = self.get_tokenizer().batch_decode(
            [sequence.resp_tokens for sequence in sequences], skip_special_tokens=sampling.skip_special_tokens
        )
        for sequence, text in zip(sequences, texts, strict=True):
            sequence.text = text
        return results

    def train(
        self,
        batch_data: Sequence[TrainSequence],
        loss_fn: Callable[..., Any],
        mini_bs: int = 8,
        gradient_accumulation_steps: int | None = None,
    ) -> dict[str, float]:
        """Train on rows.

        Args:
            batch_data: at least one row.
            loss_fn: ``loss_fn(data_pack, logprobs) -> loss | (loss, metrics)``; see :mod:`areno.loss_fns.pack`.
            mini_bs: rows of one forward and backward pass; it does not change the result.
            gradient_accumulation_steps: microbatches per optimizer step; None makes one step of all rows.

        Returns:
            Scalar statistics of the call.

        Raises:
            TypeError: ``loss_fn`` is not callable.
            ValueError: no rows, or sizes that do not fit the loss.
        """
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be callable, got {type(loss_fn).__name__}")
        mini_bs = _positive("mini_bs", mini_bs)
        stats = self.backend.train(batch_data, loss_fn, mini_bs, gradient_accumulation_steps)
        if self._recorder is not None:
            rewards = [row.reward for row in batch_data]
            timings = {"rollout": stats["step_rollout_time_s"], "train": stats["step_train_time_s"]}
            self._recorder.record_step(
                self._steps, rows=batch_data, train_stats=stats, timings=timings, rewards=rewards
            )
        self._steps += 1
        return stats

    def finish_step(self) -> dict[str, float]:
        """Close a step that trains no policy, such as a critic's warm-up; returns its times in seconds."""
        self._steps += 1
        return self.backend.finish_step()

    # -- auxiliary roles -------------------------------------------------------------------------------------------

    def ensure_roles(self, roles: dict[str, ModelRole]) -> None:
        """Load auxiliary models: references, critics, reward models. A role that is there already is kept.

        Frozen roles of the same checkpoint share their weights. A critic takes the scalar head of its checkpoint, or
        starts with one of zeros; a reward model that is not trained needs a head.

        Args:
            roles: role name to its configuration.

        Raises:
            EngineError: a role of that name is loaded from another checkpoint.
            UsageError: a checkpoint cannot serve as its role.
        """
        for name, role in roles.items():
            if role.name != name:
                raise UsageError(f"ensure_roles: key {name!r} holds ModelRole(name={role.name!r}); the two must agree")
        self.backend.ensure_roles(roles)

    def drop_role(self, role: str) -> None:
        """Free an auxiliary role.

        Raises:
            EngineError: there is no such role.
        """
        self.backend.drop_role(role)

    def score_logprobs(
        self,
        role: str,
        token_rows: Sequence[Sequence[int]],
        *,
        temperatures: float | Sequence[float] = 1.0,
        micro_bs: int = 8,
    ) -> list[list[float]]:
        """Log-probs of fixed rows under a role; ``actor`` is the policy that is trained.

        Args:
            role: ``actor``, ``ref`` or another role of kind ``policy``.
            token_rows: token ids; rows need not be of one length.
            temperatures: softmax temperature of all rows, or one per row.
            micro_bs: rows of one forward pass; it does not change the result.

        Returns:
            Per row one natural log-prob per token: entry i is log p(token i | tokens before i), entry 0 is 0.0.

        Raises:
            EngineError: there is no such role, or it predicts something else.
        """
        return self.backend.score_logprobs(role, token_rows, temperatures, _positive("micro_bs", micro_bs))

    def score_values(self, role: str, token_rows: Sequence[Sequence[int]], *, micro_bs: int = 8) -> list[list[float]]:
        """Values of fixed rows under a critic.

        Args:
            role: ``critic`` or another role of kind ``value``.
            token_rows: token ids.
            micro_bs: rows of one forward pass.

        Returns:
            Per row one value per token: entry i is the value after reading tokens 0 to i. The value before response
            token i, its baseline, is therefore entry i - 1.

        Raises:
            EngineError: there is no such role, or it predicts something else.
        """
        return self.backend.score_values(role, token_rows, _positive("micro_bs", micro_bs))

    def score_rewards(self, role: str, token_rows: Sequence[Sequence[int]], *, micro_bs: int = 8) -> list[float]:
        """Scores of whole rows under a reward model, read at the last token of each row.

        Args:
            role: ``reward`` or another role of kind ``reward`` or ``value``; ``actor`` in reward-model training.
            token_rows: token ids of prompt and response.
            micro_bs: rows of one forward pass.

        Returns:
            One score per row, as the model gives it: not squashed, not centred.

        Raises:
            EngineError: there is no such role, or it predicts something else.
        """
        return self.backend.score_rewards(role, token_rows, _positive("micro_bs", micro_bs))

    def train_values(
        self,
        role: str,
        batch_data: Sequence[TrainSequence],
        mini_bs: int,
        gradient_accumulation_steps: int | None = None,
        *,
        cliprange_value: float = 0.5,
        value_loss_coef: float = 0.5,
    ) -> dict[str, float]:
        """Train a critic on rows that carry ``values`` (old predictions) and ``returns`` (targets).

        Args:
            role: a trainable role of kind ``value``.
            batch_data: at least one row; lists align with tokens, so the entry of response token i is the value before
                it, ``score_values(...)[i - 1]``.
            mini_bs: rows of one forward and backward pass.
            gradient_accumulation_steps: microbatches per optimizer step; None makes one step of all rows.
            cliprange_value: how far a prediction may count to have moved.
            value_loss_coef: factor on the loss.

        Returns:
            Scalar statistics; the step's times come from :meth:`train` or :meth:`finish_step`.

        Raises:
            EngineError: there is no such role, or it is frozen.
            ValueError: no rows, or rows without ``returns``.
        """
        from areno.loss_fns import value_loss_fn  # here, so that importing the SDK imports no torch

        missing = [index for index, row in enumerate(batch_data) if not row.returns or not row.values]
        if missing:
            raise ValueError(f"train_values: row {missing[0]} has no returns or no values; a critic learns from both")
        loss_fn = partial(value_loss_fn, cliprange_value=cliprange_value, value_loss_coef=value_loss_coef)
        mini_bs = _positive("mini_bs", mini_bs)
        return self.backend.train_role(role, batch_data, loss_fn, mini_bs, gradient_accumulation_steps)

    def learning_rate(self, role: str = "actor") -> float:
        """Learning rate of a role's next optimizer step.

        Raises:
            EngineError: there is no such role, or it is frozen.
        """
        return self.backend.learning_rate(role)

    def set_learning_rate(self, value: float, role: str = "actor") -> None:
        """Replace a role's schedule by a constant rate, from its next optimizer step on.

        Raises:
            EngineError: there is no such role, or it is frozen.
            ValueError: the rate is negative or not finite.
        """
        if not 0 <= value < float("inf"):
            raise ValueError(f"the learning rate must be finite and not negative, got {value}")
        self.backend.set_learning_rate(role, value)

    # -- the end ---------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        dataset: Sequence[dict[str, Any]],
        reward_fn: Callable[[RewardRecord], float],
        *,
        sampling_params: SamplingParams,
        n_samples: int = 1,
        max_prompt_tokens: int = 1024,
        max_running_prompts: int = 64,
    ) -> dict[str, float]:
        """Generate answers to held-out prompts and report their rewards; nothing that training draws from is touched.

        Args:
            dataset: rows with a ``prompt``.
            reward_fn: scores one answer; called here, in this process.
            sampling_params: generation controls, usually ``SamplingParams(greedy=True, ...)`` for one sample.
            n_samples: answers per prompt; ``pass@k`` is reported up to this k.
            max_prompt_tokens: longer prompts are passed over and counted.
            max_running_prompts: most sequences decoded at once.

        Returns:
            The metrics of :func:`areno.api.evaluation.evaluate_prompts`: ``rewards_mean``, ``accuracy``, ``pass@1``, ...
        """
        from areno.api.evaluation import evaluate_prompts

        return evaluate_prompts(
            self,
            dataset,
            lambda records, _: [float(reward_fn(record)) for record in records],
            sampling=sampling_params,
            n_samples=n_samples,
            max_prompt_tokens=max_prompt_tokens,
            max_running=max_running_prompts,
            seed=self.seed,
        )

    def save_checkpoint(self, path: str) -> str:
        """Write weights, configuration and tokenizer in Hugging Face format; returns the path."""
        Path(path).mkdir(parents=True, exist_ok=True)
        self.backend.save_model(Path(path))
        return str(path)

    def close(self) -> None:
        """Release the models and the metric writer, also inside a session; a second call does nothing."""
        self._closed, self._depth = True, 0
        self.backend.close()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def _token_ids(prompt: Any) -> list[int]:
    for name in ("input_ids", "ids"):
        if hasattr(prompt, name):
            return list(getattr(prompt, name))
    return list(prompt)
