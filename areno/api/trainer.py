"""``areno.Trainer``: the SDK's entry point for custom training loops.

A typical step generates inside a rollout session, scores rows with auxiliary roles (reference, critic, reward), trains the
critic and the policy, and saves a checkpoint.
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
    """Generates inside rollout sessions, trains with any loss, and saves checkpoints.

    The constructor only checks its arguments (TypeError, ValueError); :meth:`init` loads the model.

    Args:
        world_size: number of devices or worker ranks.
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
        """Load the tokenizer and the model. Call this once before other methods, and again after :meth:`close`."""
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
        """Tokenize a dataset in order; see :func:`areno.api.datasets.iter_prompt_batches`.

        Skipped prompts are counted in the TensorBoard events.
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
            sampling_params: default generation controls.
            loss_mask_policy: which of an agent's tokens are trained on.
            max_running_prompts: maximum number of sequences decoded concurrently.
            timeout_s: timeout of each request of an agent, in seconds.
            proxy: serve an OpenAI-compatible endpoint to agents; pass the session to an agent as its ``ctx``.
            seed: seed of the agents' sampling; None derives a seed deterministically.
            disable_thinking: pass ``enable_thinking=False`` to the chat template in agents' requests.
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
        """Train on rows.

        Args:
            batch_data: at least one row.
            loss_fn: ``loss_fn(data_pack, logprobs) -> loss | (loss, metrics)``; see
                :mod:`areno.loss_fns.loss_interface`.
            mini_bs: rows per forward and backward pass.
            gradient_accumulation_steps: microbatches per optimizer step; None makes a single step on all rows.

        Returns:
            Scalar statistics of the call.

        Raises:
            TypeError: an argument is of the wrong type.
            UsageError: a row is longer than the model's context or has an id outside the vocabulary. Also raised if
                log-probs have an unknown temperature and the trainer has sampled at other temperatures than 1.
            ValueError: there are no rows, or rows have different per-token lists. Also raised if a loss over pairs gets
                an odd number of rows or an odd ``mini_bs``.
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
        the head is initialized to zero. The checkpoint of a frozen critic or reward model must have a head.

        Args:
            roles: configurations by role name.

        Raises:
            EngineError: a different role with this name is loaded.
            UsageError: a checkpoint is unsuitable for its role.
            TypeError, ValueError: an optimizer option is invalid.
        """
        arguments.of_type("roles", roles, dict)
        for name, role in roles.items():
            arguments.of_type(f"roles[{name!r}]", role, ModelRole)
            if role.name != name:
                raise UsageError(
                    f"ensure_roles: key {name!r} has ModelRole(name={role.name!r}); the names must be equal"
                )
            if role.optimizer is not None:
                from areno.api.backend.local import check_optimizer  # slow import, rarely needed

                check_optimizer(f"ModelRole({name!r}).optimizer", role.optimizer)
        self.backend.ensure_roles(roles)

    def drop_role(self, role: str) -> None:
        """Unload an auxiliary role. Raises EngineError if no role has that name."""
        self.backend.drop_role(role)

    def score_values(self, role: str, token_rows: Sequence[Sequence[int]], *, micro_bs: int = 8) -> list[list[float]]:
        """Compute the values of rows under a critic.

        Args:
            role: ``critic`` or another role of kind ``value``.
            token_rows: token ids.
            micro_bs: rows per forward pass.

        Returns:
            One value per token of each row. Entry i is the value after tokens 0 to i, so the baseline of token i is
            entry i - 1.

        Raises:
            EngineError: there is no such role, or it is a policy.
        """
        rows = arguments.token_rows(token_rows)
        return self.backend.score_values(role, rows, arguments.integer("micro_bs", micro_bs))

    def score_rewards(self, role: str, token_rows: Sequence[Sequence[int]], *, micro_bs: int = 8) -> list[float]:
        """Score rows with a reward model, at the last token of each row.

        Args:
            role: ``reward`` or another role of kind ``reward`` or ``value``; ``actor`` in reward-model training.
            token_rows: token ids of prompt and response.
            micro_bs: rows per forward pass.

        Returns:
            One raw score per row.

        Raises:
            EngineError: there is no such role, or it is a policy.
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
            role: a trainable role of kind ``value``.
            batch_data: at least one row. Lists are aligned with tokens. In ``values``, entry i is the value before
                token i, which is ``score_values(...)[i - 1]``.
            mini_bs: rows per forward and backward pass.
            gradient_accumulation_steps: microbatches per optimizer step; None makes a single step on all rows.
            cliprange_value: clip range of the difference between new and old predictions.
            value_loss_coef: factor on the loss.

        Returns:
            Scalar statistics. The step's times are returned by :meth:`train` or :meth:`finish_step`.

        Raises:
            EngineError: there is no such role, or it is frozen.
            ValueError: there are no rows, or a row has no ``returns`` or ``values``.
        """
        from areno.loss_fns import value_loss_fn  # lazy: it imports torch

        rows = arguments.train_rows(batch_data)
        arguments.real("cliprange_value", cliprange_value, above=0)
        arguments.real("value_loss_coef", value_loss_coef, minimum=0)
        missing = [index for index, row in enumerate(rows) if not row.returns or not row.values]
        if missing:
            raise ValueError(f"train_values: row {missing[0]} lacks returns or values; a critic needs both")
        loss_fn = partial(value_loss_fn, cliprange_value=cliprange_value, value_loss_coef=value_loss_coef)
        sizes = arguments.batch_sizes(mini_bs, gradient_accumulation_steps)
        with self.clock.training():
            return self.backend.train(rows, loss_fn, *sizes, role=role)

    def learning_rate(self, role: str = "actor") -> float:
        """Return the learning rate of a role's next optimizer step. Raises EngineError if the role is frozen or not loaded."""
        return self.backend.learning_rate(role)

    def set_learning_rate(self, value: float, role: str = "actor") -> None:
        """Replace the learning-rate schedule of a role by a constant rate, from its next optimizer step on.

        Raises:
            EngineError: there is no such role, or it is frozen.
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
            reward_fn: scores one answer with a number or a dictionary of named parts; called in this process.
            sampling_params: generation controls, usually ``SamplingParams(greedy=True, ...)`` for one sample.
            n_samples: answers per prompt; ``pass@k`` is reported for k up to this number.
            max_prompt_tokens: longer prompts are skipped and counted.
            max_running_prompts: maximum number of sequences decoded concurrently.

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
        """Write weights, configuration and tokenizer in Hugging Face format. Returns the path.

        Raises CheckpointError: the folder cannot be written.
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
        """Release the models and close the metrics writer. May be called inside a session, and more than once."""
        super().close()
        if self._events is not None:
            self._events.close()
            self._events = None
