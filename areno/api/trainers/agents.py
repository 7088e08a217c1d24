"""Runs the agent of a rollout, and drops and counts unusable samples.

A sample is unusable if the agent does not finish the sample, or if the conversation exceeds the context length. The run
stops if too many samples are unfinished.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from areno.api.agentic.collect import AgentRunner, CollectedSamples
from areno.api.agentic.data import AgentBatch
from areno.api.agentic.lint import lint_chat_template
from areno.api.agentic.samples import AgentSample, fill_context_logprobs
from areno.api.records import Sample
from areno.api.trainers.samples import too_many_failures
from areno.config.all_train_options import TrainOptions
from areno.config.hooks import AGENT_HOOK, load_hook
from areno.errors import AgentError
from areno.observability import log_lines
from areno.rollouts.conversation.spans import LossMaskPolicy
from areno.types import PromptBatch, SamplingParams

if TYPE_CHECKING:
    from areno.api.trainer import Trainer

_SHOWN_FILTERED = 5
_SHOWN_PROMPT = 120
_SHOWN_FAILED = 3


class AgentRollouts:
    """Runs the agent of ``--agent-fn``. Raises UsageError if the agent's file is invalid."""

    def __init__(self, config: TrainOptions, instance: Trainer, logger: logging.Logger) -> None:
        self._config, self._instance, self._logger = config, instance, logger
        self.policy = LossMaskPolicy(tool_results=config.train_tool_results)
        self._runner = AgentRunner(
            load_hook(str(config.agent_fn), AGENT_HOOK),
            self.policy,
            instance.get_tokenizer(),
            timeout_s=config.agent_timeout_s,
            retries=config.agent_retries,
        )
        for finding in lint_chat_template(instance.get_tokenizer(), disable_thinking=config.disable_thinking):
            logger.warning("%s", finding)

    def draw(
        self, batch: PromptBatch, n_samples: int, sampling: SamplingParams, seed: int, *, may_be_empty: bool = False
    ) -> tuple[list[Sample], dict[str, float]]:
        """Run the agent to get ``n_samples`` samples per prompt.

        Returns:
            The samples that neither failed nor exceed the context limit, and statistics.
        """
        config, agents = self._config, AgentBatch.from_prompt_batch(batch, n_samples)
        log_lines.agentic_rollout_batch(self._logger, len(batch.items), n_samples, config.running_sequences)
        session = self._instance.rollout_session(
            sampling_params=sampling,
            loss_mask_policy=self.policy,
            max_running_prompts=config.running_sequences,
            timeout_s=config.agent_timeout_s,
            seed=seed,
            disable_thinking=config.disable_thinking,
        )
        with session:
            collected = self._runner.collect(session.proxy, agents)
            limit = session.proxy.context_limit
        self._check_failures(collected, len(agents))
        usable = self._filter(collected.samples, limit)
        if not (usable or may_be_empty):
            raise AgentError(
                f"all {len(collected.samples)} trajectories of this step are longer than the context of {limit} tokens; "
                "raise --max-context-len if the model supports longer contexts, or shorten the agent's conversations"
            )
        fill_context_logprobs(self._instance, usable, config.score_micro_bs)
        self._log_batch(usable)
        return [_sample(sample, batch) for sample in usable], self._stats(collected, usable)

    def _check_failures(self, collected: CollectedSamples, total: int) -> None:
        errors = collected.errors
        if not errors:
            return
        shown = [f"prompt {p}, sample {s}: {error}" for (p, s), error in sorted(errors.items())[:_SHOWN_FAILED]]
        if problem := too_many_failures(len(errors), total, "samples", self._config.agent_max_failures):
            raise AgentError(f"--agent-fn {self._config.agent_fn} failed on {problem}:\n  " + "\n  ".join(shown))
        for text in shown:
            self._logger.warning("a sample of the agent was dropped: %s", text)
        if len(errors) > len(shown):
            self._logger.warning("%d samples of the agent were dropped in total", len(errors))

    def _filter(self, samples: list[AgentSample], limit: int | None) -> list[AgentSample]:
        long = [s for s in samples if s.context_full or (limit is not None and s.longest > limit)]
        if not long:
            return samples
        long.sort(key=lambda sample: -sample.longest)
        top = [_described(sample) for sample in long[:_SHOWN_FILTERED]]
        log_lines.agentic_filtered(self._logger, limit, len(samples), [sample.longest for sample in long], top)
        dropped = {id(sample) for sample in long}  # rows may hold arrays, which cannot be compared with ==
        return [sample for sample in samples if id(sample) not in dropped]

    def _log_batch(self, samples: list[AgentSample]) -> None:
        records = [sample.record for sample in samples]
        log_lines.agentic_train_batch(
            self._logger,
            len(samples),
            sum(len(row.tokens) for sample in samples for row in sample.rows),
            sum(len(record.messages) for record in records),
            sum(len(record.tool_calls) for record in records),
            sum(len(record.tool_results) for record in records),
        )

    def _stats(self, collected: CollectedSamples, usable: list[AgentSample]) -> dict[str, float]:
        forks = Counter(reason for sample in usable for reason in sample.forks)
        if forks:
            counts = ", ".join(f"{count} {reason}" for reason, count in forks.most_common())
            self._logger.info("training rows added because a conversation forked, counted by reason: %s", counts)
        return {
            "agent_failed": float(len(collected.errors)),
            "agent_rerun": float(collected.rerun),
            "agent_filtered_long": float(len(collected.samples) - len(usable)),
            "agent_forks": float(forks.total()),
            "agent_turns_mean": sum(len(sample.turns) for sample in usable) / max(len(usable), 1),
        }


def _sample(sample: AgentSample, batch: PromptBatch) -> Sample:
    item = batch.items[sample.item.prompt_index]
    tokens = sample.rows[-1].tokens if sample.rows else [*sample.item.input_tokens]
    return Sample(item, *sample.item.place, sample.sequence, sample.record, tokens, sample.rows, sample.turn_rewards)


def _described(sample: AgentSample) -> dict[str, Any]:
    record = sample.record
    return {
        "prompt_idx": sample.item.prompt_index,
        "sample_idx": sample.item.sample_index,
        "tokens": sample.longest,
        "messages": len(record.messages),
        "assistant_messages": sum(message.get("role") == "assistant" for message in record.messages),
        "tool_results": len(record.tool_results),
        "response_tokens": len(record.tokens),
        "trace_events": len(record.trace),
        "prompt": record.prompt[:_SHOWN_PROMPT],
    }
