"""Generates samples (completions or workflow episodes) in this process or in rollout processes.

By default, a batch is generated when its step starts. With ``--rollout async``, separate processes generate while this
process trains. The weights that generate a sample may be up to ``--max-staleness`` versions old (see
:mod:`areno.rollouts.batches_ahead`). With ``--workflow``, a user-defined class runs the episodes, and sends its requests to
this process or to the rollout processes.
"""

import logging
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import fields, replace
from typing import Any

from areno.api.evaluation import EVALUATION_STREAM, evaluation_sampling
from areno.api.records import Sample, with_texts
from areno.api.trainer import Trainer
from areno.api.trainers.samples import too_many_failures, workflow_sample
from areno.config.all_train_options import TrainOptions
from areno.config.experiment.backend_sections import SGLangConfig, vLLMConfig
from areno.config.experiment.generation_sections import GenerationHyperparameters
from areno.config.experiment.server_arguments import server_arguments
from areno.config.hooks import named_object
from areno.engine.backend import Backend
from areno.engine.device import rank_devices
from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import AgentError
from areno.gpus import visible_gpus
from areno.rollouts.batches_ahead import BatchesAhead
from areno.rollouts.engine_client import EngineClient
from areno.rollouts.fleet.fleet import FleetOptions, RolloutFleet
from areno.rollouts.fleet.weight_transfer import Mode, WeightOptions
from areno.rollouts.servers.command_line import ServerOptions, command_of
from areno.rollouts.workflows.base import Episodes, GroupedRolloutWorkflow, SampleRows
from areno.rollouts.workflows.resolve import resolve_workflow
from areno.training.loop import PlannedStep
from areno.types import PromptBatch, PromptItem, Request, RolloutResult, RolloutSequence, SamplingParams

SECTIONS = {"vllm": vLLMConfig, "sglang": SGLangConfig}
"""Configuration classes with default server arguments, by inference server."""

_NO_LIMIT = 2**31


class SampleSource:
    """Generates the samples of each step. ``version`` is the number of completed steps. Call :meth:`close` at the end."""

    def __init__(
        self, config: TrainOptions, instance: Trainer, sampling: SamplingParams, version: int, logger: logging.Logger
    ) -> None:
        self._config, self._instance, self._sampling, self._logger = config, instance, sampling, logger
        self._engine: Backend = instance.backend
        self._fleet: RolloutFleet | None = None
        self._episodes: dict[bool, Episodes] = {}
        self._ahead = BatchesAhead(self._begin, config.most_behind)
        try:
            if config.workflow is not None:
                _workflow(config, sampling, self._engine.tokenizer)  # fails early if the workflow is invalid
            if config.uses_replicas:
                self._fleet = _fleet(config, self._engine)
                self.deliver(version)
        except BaseException:
            self.close()
            raise

    def steps(self, planned: Iterator[PlannedStep]) -> Iterator[PlannedStep]:
        """Yield the steps in ``planned``. With ``--rollout async``, generate the samples of later steps while a step trains."""
        return planned if self._fleet is None else self._ahead.steps(planned)

    def draw(self, batch: PromptBatch, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Return the samples of a step's batch, and statistics.

        Raises AgentError if the workflow failed on more prompts than ``--agent-max-failures`` allows, or rejected all samples.
        """
        config = self._config
        session = self._instance.rollout_session(
            sampling_params=self._sampling, max_running_prompts=config.running_sequences, proxy=False
        )
        with session:
            if self._fleet is None:
                self._ahead.begin(step, batch.items)
            futures = self._ahead.take(step)
            stats: dict[str, float] = {}
            if config.workflow is None:
                samples = self._completions(batch, futures)
            else:
                samples, stats = self._episode_samples(batch, futures)
        if self._fleet is not None:
            behind = [float(step - min(sample.sequence.versions, default=step)) for sample in samples]
            stats |= {"staleness_mean": sum(behind) / max(len(behind), 1), "staleness_max": max(behind, default=0.0)}
        return samples, stats

    def deliver(self, version: int) -> dict[str, float]:
        """Send new weights to the rollout processes.

        Returns the time of the update and the longest pause of a rollout process, in seconds; {} without rollout processes.
        """
        if self._fleet is None:
            return {}
        report = self._fleet.update_weights(self._engine, version)
        return {
            "weight_update_time_s": report.seconds,
            "rollout_pause_time_s": max(report.pauses_s.values(), default=0.0),
        }

    def complete(self, step: int) -> dict[str, float]:
        """Drop the samples of a trained step, and send the new weights to the rollout processes, if any.

        Returns the result of :meth:`deliver`.
        """
        self._ahead.complete(step)
        return self.deliver(step + 1)

    def _begin(self, step: int, items: dict[int, PromptItem]) -> Sequence[Future[Any]]:
        config = self._config
        if config.workflow is not None:
            start = self._running(evaluates=False).start
            return [
                start(step * config.batch_size + index, item.record, config.n_samples) for index, item in items.items()
            ]
        seeds = {
            index: [derive_seed(config.seed, step, index, sample) for sample in range(config.n_samples)]
            for index in items
        }
        requests = [Request(item.input_tokens, self._sampling, seeds[index]) for index, item in items.items()]
        return (self._fleet or self._engine).submit(requests)

    def _completions(self, batch: PromptBatch, futures: Sequence[Future[Any]]) -> list[Sample]:
        results: list[RolloutResult] = with_texts(
            [future.result() for future in futures], self._engine.tokenizer, self._sampling
        )
        return [
            Sample.of_completion(item, prompt, index, sequence)
            for prompt, (item, result) in enumerate(zip(batch.items, results, strict=True))
            for index, sequence in enumerate(result.sequences)
        ]

    def _running(self, *, evaluates: bool) -> Episodes:
        if evaluates not in self._episodes:
            config = self._config
            sampling = evaluation_sampling(config) if evaluates else self._sampling
            engine: Any = self._engine if evaluates or self._fleet is None else self._fleet
            client = EngineClient(engine, seed=config.seed)
            self._episodes[evaluates] = Episodes(_workflow(config, sampling, self._engine.tokenizer), client)
        return self._episodes[evaluates]

    def _episode_samples(
        self, batch: PromptBatch, futures: Sequence[Future[list[SampleRows]]]
    ) -> tuple[list[Sample], dict[str, float]]:
        groups = self._outcomes(futures)
        samples = [
            workflow_sample(self._engine.tokenizer, item, prompt, index, row)
            for prompt, (item, group) in enumerate(zip(batch.items, groups, strict=True))
            for index, rows in enumerate(group or [])
            for row in rows
        ]
        left_out = sum(not rows for group in groups for rows in group or [])
        if not samples:
            raise AgentError(
                f"--workflow {self._config.workflow} rejected all samples of this step; change the workflow so that "
                "it returns at least one trajectory per step"
            )
        return samples, {"workflow_failed": float(groups.count(None)), "workflow_left_out": float(left_out)}

    def _outcomes(self, futures: Sequence[Future[list[SampleRows]]]) -> list[list[SampleRows] | None]:
        """Return the samples of each prompt; None for a prompt if one of its episodes raised an error.

        Raises AgentError if too many prompts failed.
        """
        groups: list[list[SampleRows] | None] = []
        errors: list[Exception] = []
        for future in futures:
            try:
                groups.append(future.result())
            except Exception as error:  # a user's workflow may raise anything
                groups.append(None)
                errors.append(error)
                self._logger.warning(
                    "a prompt was dropped, because its workflow raised %s: %s", type(error).__name__, error
                )
        if problem := too_many_failures(len(errors), len(futures), "prompts", self._config.agent_max_failures):
            raise AgentError(
                f"--workflow {self._config.workflow} failed on {problem}; first error: {type(errors[0]).__name__}: {errors[0]}"
            ) from errors[0]
        return groups

    def answers(self, batch: PromptBatch, prompts: Sequence[int]) -> list[Sample | None]:
        """Return the workflow's answers to held-out prompts; see :data:`areno.api.evaluation.AnswerSource`."""
        config, tokenizer = self._config, self._engine.tokenizer
        session = self._instance.rollout_session(
            sampling_params=evaluation_sampling(config), max_running_prompts=config.running_sequences, proxy=False
        )
        with session:
            episodes = self._running(evaluates=True)
            futures = [
                episodes.start(EVALUATION_STREAM + number, item.record, config.eval_n_samples)
                for number, item in zip(prompts, batch.items, strict=True)
            ]
            groups = self._outcomes(futures)
        answers: list[Sample | None] = []
        for number, item, group in zip(prompts, batch.items, groups, strict=True):
            for index, rows in enumerate(group or [[]] * config.eval_n_samples):
                answers.append(workflow_sample(tokenizer, item, number, index, rows[-1]) if rows else None)
        return answers

    def export_state(self) -> Any:
        """Return the unused samples in the format of :mod:`areno.training.plain_objects`; None if there are none."""
        state = self._ahead.export_state()
        if self._config.workflow is None:
            state = {
                step: {index: [_plain(s) for s in result.sequences] for index, result in parts.items()}
                for step, parts in state.items()
            }
        return state or None

    def load_state(self, state: Any) -> None:
        """Restore the samples of :meth:`export_state`. Unfinished samples are generated again."""
        if state and self._config.workflow is None:
            state = {
                step: {index: RolloutResult([RolloutSequence(**s) for s in saved]) for index, saved in parts.items()}
                for step, parts in state.items()
            }
        self._ahead.load_state(state or {})

    def close(self) -> None:
        """Stop episodes and rollout processes. May be called more than once."""
        for episodes in self._episodes.values():
            episodes.close()
        self._episodes = {}
        if self._fleet is not None:
            self._fleet.close()


def _plain(sequence: RolloutSequence) -> dict[str, Any]:
    values = {field.name: getattr(sequence, field.name) for field in fields(sequence)}
    return values | {"resp_logprobs": list(sequence.resp_logprobs)}


def _fleet(config: TrainOptions, engine: Backend) -> RolloutFleet:
    """Start the rollout processes. If the trainer uses GPUs 0 and 1, the rollout processes use GPU 2 and the following GPUs.

    Each replica has the trainer's tensor-parallel size.
    """
    replicas, ranks = config.rollout_replicas, config.rollout_replicas * config.tp_size
    device = engine.config.device
    devices = rank_devices(device, config.world_size + ranks, visible_gpus())[config.world_size :]
    options = FleetOptions(
        replicas=replicas,
        tp_size=config.tp_size,
        log_folder=config.run_path,
        stall_s=config.stall_timeout,
        server=_servers(config, engine),
        scales=True,
    )
    mode: Mode = "xccl" if device.type == "cuda" and options.server is None else "shm"
    if options.server is not None and options.server.elsewhere:
        mode = "disk"
    weights = WeightOptions(mode=mode, folder=config.run_path / "weights" if mode == "disk" else None)
    engine_config = replace(engine.config, max_running=-(-config.running_sequences // replicas))
    fleet = RolloutFleet(str(config.ckpt), engine_config, options, weights, devices if device.type == "cuda" else None)
    fleet.share_cores()
    return fleet


def _servers(config: TrainOptions, engine: Backend) -> ServerOptions | None:
    if config.rollout_backend == "areno":
        return None
    product: Any = config.rollout_backend
    arguments = server_arguments(
        SECTIONS[product](),
        dtype=str(engine.config.dtype).removeprefix("torch."),
        context_length=engine.context_length,
        gpu=engine.config.device.type == "cuda",
        tensor=config.tp_size,
        adapter_rank=config.adapter_rank,
    )
    options = ServerOptions(
        product=product,
        arguments=(*arguments, *shlex.split(config.rollout_server_args or "")),
        command=tuple(shlex.split(config.rollout_server_command or "")),
        addresses=config.rollout_url,
        adapter="adapter" if config.uses_lora else "",
        gpu=engine.config.device.type == "cuda",
        request_timeout_s=config.stall_timeout,
    )
    if not options.addresses:
        command_of(options)
    return options


def _workflow(config: TrainOptions, sampling: SamplingParams, tokenizer: Any) -> Any:
    workflow = named_object(str(config.workflow), option="--workflow")
    gconfig = GenerationHyperparameters(
        n_samples=config.n_samples,
        max_new_tokens=sampling.max_new_tokens,
        max_tokens=sampling.max_context_len or _NO_LIMIT,
        greedy=sampling.greedy,
        top_p=sampling.top_p,
        top_k=_NO_LIMIT if sampling.top_k == -1 else sampling.top_k,
        temperature=sampling.temperature,
        stop_token_ids=list(sampling.stop_token_ids or ()),
        ignore_eos=sampling.ignore_eos,
        stop=sampling.stop,
    )
    grouped = resolve_workflow(workflow, gconfig, offered={"gconfig": gconfig, "tokenizer": tokenizer})
    assert isinstance(grouped, GroupedRolloutWorkflow)
    return grouped.workflow
