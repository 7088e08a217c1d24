"""``areno.Trainer``: the SDK's entry point for custom training loops.

A typical step generates responses in a rollout session, and scores the responses with auxiliary models (reference,
critic, reward model). The step then trains the critic and the policy, and saves a checkpoint.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from areno.api import arguments
from areno.api.backend.base import BackendType
from areno.api.datasets import iter_prompt_batches
from areno.api.evaluation import evaluate_prompts
from areno.api.sampler import Sampler, running_sequences
from areno.api.session import RolloutSession
from areno.errors import CheckpointError, RewardError, UsageError
from areno.observability.scalars import step_scalars
from areno.observability.tensorboard import EventWriter
from areno.rewards.worker import as_reward
from areno.types import ModelRole, PromptBatch, RewardParts, RewardRecord, SamplingParams, TrainSequence, parts_of


class Trainer(Sampler):
    """Generates responses in rollout sessions, trains with any loss, and saves checkpoints.

    The constructor only checks its arguments (TypeError, ValueError); :meth:`init` loads the model.

    Args:
        world_size: number of ranks (processes); on GPUs, each rank uses one GPU.
        model_path: checkpoint folder or Hugging Face repo id.
        backend_type: ``areno.Areno`` (the default), your own ``BackendType``, or the name of a registered backend.
        custom_config: the backend's configuration; by default ``areno.ArenoConfig()``.
        metrics_log_dir: folder for TensorBoard events of each :meth:`train` call; None writes no events.
    """

    def __init__(
        self,
        world_size: int,
        model_path: str,
        backend_type: BackendType | str | None = None,
        custom_config: Any = None,
        metrics_log_dir: str | None = None,
    ) -> None:
        super().__init__(world_size, model_path, backend_type, custom_config)
        self._metrics_log_dir = metrics_log_dir
        self._events: EventWriter | None = None
        self._steps = 0
        self._skipped = [0, 0]  # number of prompts that were too long: since the last step, and in total

    def init(self) -> None:
        """Load the tokenizer and the model. Call this method before all other methods.

        To use the trainer again after :meth:`close`, call this method again.
        """
        super().init()
        self._events = EventWriter(self._metrics_log_dir) if self._metrics_log_dir else None

    def load_prompt_batches(
        self,
        dataset: Sequence[dict[str, Any]],
        *,
        batch_size: int,
        max_prompt_tokens: int,
        prompt_key: str = "prompt",
        solutions_key: str = "solutions",
    ) -> Iterator[PromptBatch]:
        """Yield batches of a dataset's tokenized prompts; see :func:`areno.api.datasets.iter_prompt_batches`.

        Prompts that are too long are skipped; the TensorBoard events contain their number.
        """
        keywords: dict[str, Any] = {"prompt_key": prompt_key, "solutions_key": solutions_key}
        for name, value in (("batch_size", batch_size), ("max_prompt_tokens", max_prompt_tokens)):
            keywords[name] = arguments.integer(name, value)
        keywords["context_limit"] = self.model_context_len()
        rows = arguments.dataset(dataset)
        return self._count_skipped(iter_prompt_batches(rows, self.get_tokenizer(), **keywords))

    def _count_skipped(self, batches: Iterator[PromptBatch]) -> Iterator[PromptBatch]:
        for batch in batches:
            self._skipped = [count + batch.skipped_long for count in self._skipped]
            yield batch

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
        """Create a session for generation. Enter the session with ``async with`` or ``with``.

        Args:
            sampling_params: default sampling parameters.
            loss_mask_policy: selection of an agent's tokens to train on.
            max_running_prompts: maximum number of sequences (not prompts) decoded concurrently.
            timeout_s: timeout of each request of an agent, in seconds.
            proxy: whether to run an OpenAI-compatible server for agents. Pass the session to an agent as its ``ctx``.
            seed: seed of the agents' sampling; None derives a seed from ``sampling_params.seed`` or, if that is None, from
                the run's seed.
            disable_thinking: whether the chat template gets ``enable_thinking=False`` for requests of agents.
        """
        params = arguments.sampling(sampling_params)
        if loss_mask_policy is not None:
            from areno.rollouts.conversation.spans import LossMaskPolicy

            arguments.of_type("loss_mask_policy", loss_mask_policy, LossMaskPolicy)
        arguments.real("timeout_s", timeout_s, above=0)
        self._sampled_at.add(params.logprob_temperature)
        if seed is None:
            seed = self._seeds(1, params.seed)[0] if proxy else 0
        arguments.integer("seed", seed, -(2**63))
        running = running_sequences(max_running_prompts)
        return RolloutSession(self, params, running, proxy, loss_mask_policy, timeout_s, seed, disable_thinking)

    def train(
        self,
        batch_data: Sequence[TrainSequence],
        loss_fn: Callable[..., Any],
        mini_bs: int = 8,
        gradient_accumulation_steps: int | None = None,
    ) -> dict[str, float]:
        """Train the policy on rows.

        Args:
            batch_data: list of one or more rows.
            loss_fn: ``loss_fn(data_pack, logprobs) -> loss | (loss, metrics)``; see
                :mod:`areno.loss_fns.loss_interface`.
            mini_bs: number of rows per forward and backward pass.
            gradient_accumulation_steps: number of microbatches per optimizer step; None runs one step on all rows.

        Returns:
            Scalar statistics of the call.

        Raises:
            TypeError: an argument is of the wrong type.
            UsageError: a row is longer than the model's context or has an id outside the vocabulary. Also raised if a
                row has ``logprobs`` without a sampling temperature, and this trainer has sampled at a temperature
                other than 1.
            ValueError: there are no rows, or a per-token list, such as ``advantages``, is set in some rows but not in
                others. Also raised if a loss over pairs gets an odd number of rows or an odd ``mini_bs``.
        """
        arguments.function("loss_fn", loss_fn)
        rows = arguments.train_rows(batch_data)
        arguments.refuse_unknown_temperatures(rows, self._sampled_at)
        sizes = arguments.batch_sizes(mini_bs, gradient_accumulation_steps)
        with self.clock.training():
            stats = self.backend.train(rows, loss_fn, *sizes)
        times = self.clock.close_step(self.clock.trained_at)
        stats = {**stats, **times, "policy_train_wall_time_s": self.clock.trained_s}
        if self._events is not None:
            rewards = [row.reward for row in rows]
            timings = {"rollout": stats["step_rollout_time_s"], "train": stats["step_train_time_s"]}
            skipped = dict(zip(("skipped_long", "total_skipped_long"), self._skipped, strict=True))
            scalars = step_scalars(rows=rows, rewards=rewards, train_stats=stats, timings=timings, **skipped)
            self._events.log(self._steps, scalars)
            self._skipped[0] = 0
        self._steps += 1
        return stats

    def finish_step(self) -> dict[str, float]:
        """End a step that does not train the policy, such as a critic warmup step. Returns the step's times in seconds."""
        self._steps += 1
        return self.clock.close_step()

    def ensure_roles(self, roles: dict[str, ModelRole]) -> None:
        """Load auxiliary models that are not loaded yet: references, critics and reward models.

        Frozen roles of the same checkpoint and kind share weights. If a trainable critic's checkpoint has no scalar head,
        the head is initialized to zero. The checkpoint of a frozen critic or reward model must have a scalar head.

        Args:
            roles: configuration of each role, by the name of the role.

        Raises:
            EngineError: a different role with one of these names is already loaded.
            UsageError: a checkpoint is unsuitable for its role.
            TypeError, ValueError: an optimizer option is invalid.
        """
        arguments.of_type("roles", roles, dict)
        for name, role in roles.items():
            arguments.of_type(f"roles[{name!r}]", role, ModelRole)
            if role.name != name:
                raise UsageError(
                    f"ensure_roles: key {name!r} has ModelRole(name={role.name!r}); the key must be equal to the name"
                )
            if role.optimizer is not None:
                from areno.api.backend.local import check_optimizer  # slow import, rarely needed

                check_optimizer(f"ModelRole({name!r}).optimizer", role.optimizer)
        self.backend.ensure_roles(roles)

    def drop_role(self, role: str) -> None:
        """Unload an auxiliary role. Raises EngineError if no role has that name."""
        self.backend.drop_role(role)

    def score_values(self, role: str, token_rows: Sequence[Sequence[int]], *, micro_bs: int = 8) -> list[list[float]]:
        """Compute the values that a critic predicts for rows.

        Args:
            role: ``critic`` or another role of kind ``value``.
            token_rows: token ids of each row.
            micro_bs: number of rows per forward pass.

        Returns:
            For each row, one value per token. Entry i is the value after token i. The advantage of a response token i uses
            the value before this token, which is entry i - 1.

        Raises:
            EngineError: no loaded role has this name, or the role is a policy.
        """
        rows = arguments.token_rows(token_rows)
        return self.backend.score_values(role, rows, arguments.integer("micro_bs", micro_bs))

    def score_rewards(self, role: str, token_rows: Sequence[Sequence[int]], *, micro_bs: int = 8) -> list[float]:
        """Score rows with a reward model. The score of a row is the model's output at the last token.

        Args:
            role: name of a role of kind ``reward`` or ``value``; in reward-model training, also ``actor``.
            token_rows: token ids of prompt and response of each row.
            micro_bs: number of rows per forward pass.

        Returns:
            One unscaled score per row.

        Raises:
            EngineError: no loaded role has this name, or the role is a policy.
        """
        rows = arguments.token_rows(token_rows)
        return self.backend.score_rewards(role, rows, arguments.integer("micro_bs", micro_bs))

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
        """Train a critic on rows with ``values`` (old predictions) and ``returns`` (targets).

        Args:
            role: name of a trainable role of kind ``value``.
            batch_data: list of one or more rows. For a response token i, ``values[i]`` is the value before the token:
                ``values[i] = scores[i - 1]``, where ``scores`` is what :meth:`score_values` returns for the row.
            mini_bs: number of rows per forward and backward pass.
            gradient_accumulation_steps: number of microbatches per optimizer step; None runs one step on all rows.
            cliprange_value: clip range of the difference between new and old predictions.
            value_loss_coef: factor of the loss.

        Returns:
            Scalar statistics, without the step's times. The next call of :meth:`train` or :meth:`finish_step` ends the
            step, and returns the times of rollout and training.

        Raises:
            EngineError: no loaded role has this name, or the role is frozen.
            ValueError: there are no rows, or a row has no ``returns`` or ``values``.
        """
        from areno.loss_fns import value_loss_fn  # lazy: it imports torch

        rows = arguments.train_rows(batch_data)
        arguments.real("cliprange_value", cliprange_value, above=0)
        arguments.real("value_loss_coef", value_loss_coef, minimum=0)
        missing = [index for index, row in enumerate(rows) if not row.returns or not row.values]
        if missing:
            raise ValueError(f"train_values: row {missing[0]} lacks returns or values; set both lists in every row")
        loss_fn = partial(value_loss_fn, cliprange_value=cliprange_value, value_loss_coef=value_loss_coef)
        sizes = arguments.batch_sizes(mini_bs, gradient_accumulation_steps)
        with self.clock.training():
            return self.backend.train(rows, loss_fn, *sizes, role=role)

    def learning_rate(self, role: str = "actor") -> float:
        """Return the learning rate of a role's next optimizer step. Raises EngineError if the role is frozen or not loaded."""
        return self.backend.learning_rate(role)

    def set_learning_rate(self, value: float, role: str = "actor") -> None:
        """Replace the learning-rate schedule of a role by a constant rate, starting with the next optimizer step.

        Raises:
            EngineError: no loaded role has this name, or the role is frozen.
            ValueError: the rate is negative or not finite.
        """
        self.backend.set_learning_rate(role, arguments.real("the learning rate", value, minimum=0))

    def evaluate(
        self,
        dataset: Sequence[dict[str, Any]],
        reward_fn: Callable[[RewardRecord], Any],
        *,
        sampling_params: SamplingParams,
        n_samples: int = 1,
        max_prompt_tokens: int = 1024,
        max_running_prompts: int = 64,
    ) -> dict[str, float]:
        """Generate answers to held-out prompts and report their rewards. The random state of training does not change.

        Args:
            dataset: rows with a ``prompt``.
            reward_fn: function that runs in this process and scores one answer. It returns the reward as a number, or as
                a dictionary with the name and value of each part of the reward.
            sampling_params: sampling parameters, usually ``SamplingParams(greedy=True, ...)`` if ``n_samples`` is 1.
            n_samples: number of answers per prompt; ``pass@k`` is reported for k up to this number.
            max_prompt_tokens: maximum number of tokens of a prompt. Longer prompts are skipped and counted.
            max_running_prompts: maximum number of answers (not prompts) decoded concurrently.

        Returns:
            The metrics of :func:`areno.api.evaluation.evaluate_prompts`: ``rewards_mean``, ``accuracy``, ``pass@1``,
            ...

        Raises:
            RewardError: a reward is invalid, or lacks a part that other rewards have.
        """
        arguments.function("reward_fn", reward_fn)
        before, parts = set(self._sampled_at), RewardParts()
        seen: dict[tuple[str, ...], float] = {}  # a reward for each set of parts; a later reward may have more parts

        def score(records: list[RewardRecord], _: object) -> list[float]:
            rewards = [parts.weigh(as_reward(reward_fn(record))) for record in records]
            seen.update((tuple(parts_of(reward)), reward) for reward in rewards)
            if problem := next(filter(None, map(parts.problem, (*seen.values(), *rewards))), None):
                raise RewardError(f"reward_fn {problem}")
            return rewards

        try:
            return evaluate_prompts(
                self,
                arguments.dataset(dataset),
                score,
                sampling=arguments.sampling(sampling_params),
                n_samples=arguments.integer("n_samples", n_samples),
                max_prompt_tokens=arguments.integer("max_prompt_tokens", max_prompt_tokens),
                max_running=arguments.integer("max_running_prompts", max_running_prompts),
                seed=self.seed,
            )
        finally:
            self._sampled_at = before  # answers of an evaluation are not trained on

    def save_checkpoint(self, path: str) -> str:
        """Write weights, configuration and tokenizer in Hugging Face format, and return the path.

        Raises CheckpointError if the folder cannot be written.
        """
        arguments.of_type("path", path, str | os.PathLike)
        backend = self.backend
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
            backend.save_model(Path(path))
        except OSError as error:
            raise CheckpointError(f"cannot save a checkpoint to {path}: {error}; choose another folder") from error
        return str(path)

    def close(self) -> None:
        """Release the models and close the metrics writer.

        May be called while a rollout session is open, and more than once.
        """
        super().close()
        if self._events is not None:
            self._events.close()
            self._events = None
