"""Plans the memory of an experiment's training engine and rollout replicas, without loading a model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoConfig

from areno.config.experiment.allocation import ModelAllocation
from areno.config.experiment.engine_sections import TrainEngineConfig
from areno.config.experiment.experiments import BaseExperimentConfig, DPOConfig, PPOConfig, RWConfig
from areno.config.experiment.loader import experiment_class, load_expr_config, settled
from areno.config.experiment.machine import devices_needed, resolve_for_machine
from areno.config.experiment.roles import CLUSTERS, shares_devices, takes_turns
from areno.config.paths import base_of
from areno.engine.engine_config import EngineConfig
from areno.engine.parallel.layout import Layout
from areno.engine.plan.advice import Change, halves, least_changes
from areno.engine.plan.layout_estimates import ModelSizes, Training, rank_bytes
from areno.engine.plan.memory_plan import MemoryPlan, plan_sizes
from areno.engine.plan.memory_probe import available_bytes
from areno.engine.plan.sizes import MAX_SCORED_TOKENS, HeldRole, Sizes, fill
from areno.engine.plan.table import plan_numbers, plan_table, verdict
from areno.experiments.trainers import engines
from areno.experiments.trainers.update import REF, roles_of
from areno.loss_fns.loss_interface import reads_entropy
from areno.loss_fns.policy_loss import policy_loss_fn
from areno.types import tightest

_MICROBATCH, _CONCURRENT = "actor.mb_spec.max_tokens_per_mb", "rollout.max_concurrent_rollouts"


class ExperimentSizes(Sizes):
    """The sizes that determine the memory of an engine in ``areno run``.

    The experiment configuration ``config`` must already be resolved by :func:`resolve_for_machine`.
    """

    def __init__(self, config: Any, engine: EngineConfig, layout: Layout, generates: bool) -> None:
        self.experiment, self.pairs = config, isinstance(config, RWConfig | DPOConfig)
        self.policy = isinstance(config, PPOConfig)
        actor: TrainEngineConfig = config.actor
        super().__init__(
            path=actor.path,
            option="actor.path",
            config=engine,
            layout=layout,
            entropy=self.policy and reads_entropy(policy_loss_fn),
            generates=generates,
            n_samples=config.gconfig.n_samples if self.policy else 1,
            prompt=self._prompt(),
        )

    def _prompt(self) -> int:
        if not self.policy:
            return 1
        gconfig = self.experiment.gconfig
        return self.experiment.train_dataset.max_length or max(gconfig.max_tokens - gconfig.max_new_tokens, 1)

    def roles(self) -> list[HeldRole]:
        """Return the models, other than the actor, that need memory for their weights.

        Frozen models with the same path share their weights, so only the first of them is returned. If the actor trains a
        LoRA adapter, a frozen model with the actor's path is omitted, because it shares the weights under the adapter.
        """
        config, held = self.experiment, []
        if not self.trains:
            return []
        scored = roles_of(config, None) if self.policy else {}
        if isinstance(config, DPOConfig) and not config.actor.algorithm:
            held.append(HeldRole(REF, config.ref.path, "policy", "ref.path"))
        for name, role in scored.items():
            section = getattr(config, name)
            optimizer = engines.optimizer_of(section) if role.trainable else None
            held.append(HeldRole(name, role.path, role.predicts, f"{name}.path", optimizer))
        base = {self.path} if self.config.adapter is not None else set()
        frozen = {role.path: role for role in reversed(held) if role.optimizer is None and role.path not in base}
        return [role for role in held if role.optimizer is not None or frozen.get(role.path) is role]

    def longest_row(self, context: int | None) -> int:
        """See :meth:`Sizes.longest_row`."""
        section, longest = self.experiment.train_dataset, None
        if self.policy:
            gconfig = self.experiment.gconfig
            longest = gconfig.max_tokens
            if section.max_length is not None and self._single_turn:
                longest = min(longest, section.max_length + gconfig.max_new_tokens)
        return tightest(longest or section.max_length, context) or 2048

    @property
    def _single_turn(self) -> bool:
        return bool(self.experiment.built_in_workflow == "rlvr")

    def microbatch(self, longest: int, role: str = "") -> tuple[list[int], int]:
        """See :meth:`Sizes.microbatch`."""
        config, section = self.experiment, getattr(self.experiment, role or "actor")
        together = 2 if self.pairs else 1
        rows = config.train_dataset.batch_size * self.n_samples * together
        if self.policy:
            rows = max(rows // section.ppo_n_minibatches, 1)
        batching = engines.micro_batching(section.mb_spec, together)
        rows = -(-rows // (batching.granularity * self.layout.dp_size)) * batching.granularity
        bins = replace(batching, tree=False).bins([range(longest)] * rows)  # the rows may have no common prefix
        largest, most = max(map(len, bins)), batching.max_tokens_per_mb
        if most is None:
            return [longest] * largest, len(bins)
        return fill(longest, rows, max(most, batching.granularity * longest)), len(bins)

    def scored(self, lengths: list[int]) -> list[int]:
        """See :meth:`Sizes.scored`."""
        most = self.experiment.gconfig.max_new_tokens if self.policy and self._single_turn else max(lengths)
        return [min(length - 1, most) for length in lengths]

    def scoring_batch(self, longest: int, role: str) -> list[int]:
        """See :meth:`Sizes.scoring_batch`."""
        section = getattr(self.experiment, role)
        spec = getattr(section, "mb_spec", self.experiment.actor.mb_spec)
        return fill(longest, engines.rows_at_once(spec, longest), max(MAX_SCORED_TOKENS, longest))


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """Memory plans of an experiment: ``actor`` for the training engine, and ``rollout`` for each rollout replica.

    ``rollout`` is None if there are no separate replicas.
    """

    actor: MemoryPlan
    rollout: MemoryPlan | None
    titles: tuple[str, str]  # titles of the two plans
    transfer: int  # size in bytes of the shared memory for weight transfers
    together: bool  # whether the two plans share one memory, and must fit into it together
    share: int = 0  # bytes on the fullest rank with FSDP or pipeline stages, which the plans ignore; else 0

    @property
    def needed(self) -> int:
        """Peak memory in bytes."""
        needs = [plan.needed for plan in (self.actor, self.rollout) if plan is not None]
        return sum(needs) + self.transfer if self.together else max(needs)

    @property
    def available(self) -> int:
        """Available memory in bytes."""
        return self.actor.available

    @property
    def fits(self) -> bool:
        """Whether the available memory suffices."""
        return self.needed <= self.available


def plan_experiment(config: BaseExperimentConfig, available: int | None = None) -> ExperimentPlan:
    """Plan the memory of an experiment. ``available`` is the available memory in bytes.

    If ``available`` is None, the plan uses the free memory of the GPU or, without a GPU, of this machine.
    """
    config = _resolved(config)
    actor: TrainEngineConfig = vars(config)["actor"]
    turns = isinstance(config, PPOConfig) and takes_turns(config)
    layout = engines.training_layout(actor)
    trained: Any = "reward" if isinstance(config, RWConfig) else "policy"
    more = _running(config, layout.dp_size) if isinstance(config, PPOConfig) and turns else {}
    engine = engines.engine_config(actor, trains=trained, **more)
    if available is None:
        available = available_bytes(engine.device)
    sizes = ExperimentSizes(config, engine, layout, turns)
    trains = plan_sizes(sizes, available)
    titles, share = (f"actor, {actor.backend}", ""), _share(sizes, trains.longest)
    if not isinstance(config, PPOConfig) or turns:
        return ExperimentPlan(trains, None, titles, 0, False, share)
    parallel = ModelAllocation.from_str(config.rollout.backend).parallel
    on_cpu = engine.device.type == "cpu"
    together = on_cpu or shares_devices(config)
    running = _running(config, parallel.data)
    engine = engines.engine_config(actor, trains="nothing", neighbors=parallel.data, shares_device=together, **running)
    left = available - trains.of_all(trains.phases[0]) if together else available
    generates = plan_sizes(ExperimentSizes(config, engine, Layout(1, parallel.tensor), generates=True), left)
    titles = (titles[0], f"one rollout replica, of {parallel.data} in total (rollout.backend {config.rollout.backend})")
    shared = on_cpu and actor.weight_update_mode != "disk"
    transfer = generates.trained * engine.dtype.itemsize if shared else 0
    return ExperimentPlan(trains, generates, titles, transfer, together, share)


def _share(sizes: ExperimentSizes, longest: int) -> int:
    """Return the peak memory in bytes of the training rank that needs the most memory.

    Only the memory of tensors is included. If the layout has neither FSDP nor pipeline stages, return 0.
    """
    layout, config = sizes.layout, sizes.config
    if not layout.fsdp and layout.pp_size == 1:
        return 0
    model = ModelSizes.of(AutoConfig.from_pretrained(base_of(sizes.path)))
    lengths, passes = sizes.microbatch(longest)
    moments = config.optimizer.moment_bytes(1 << 20) >> 20
    recomputes = config.activation_checkpointing is not False
    training = Training(sum(lengths), passes, config.dtype.itemsize, moments, recomputes)
    return rank_bytes(model, layout, training).total


def _resolved(config: BaseExperimentConfig) -> BaseExperimentConfig:
    """Return a copy of the configuration in which all machine-dependent settings are resolved."""
    config, machine = settled(config), engines.this_machine()
    if config.scheduler.type in CLUSTERS:  # the number of GPUs here says nothing about the cluster
        machine = replace(machine, gpus=machine.gpus and devices_needed(config), nodes=config.cluster.n_nodes)
    resolve_for_machine(config, machine)
    return config


def _running(config: PPOConfig, replicas: int) -> dict[str, Any]:
    running = (config.rollout.max_concurrent_rollouts or 1) * config.gconfig.n_samples
    return {"max_running": max(-(-running // replicas), 1)}


def _changes(config: Any, longest: int, on_gpu: bool) -> Iterator[Change]:
    """Yield changes of settings that reduce memory, starting with those that have the smallest effect on speed and results.

    ``longest`` is the length of the longest row.
    """
    actor = config.actor
    if not actor.gradient_checkpointing:
        yield {"actor.gradient_checkpointing": "true"}
    yield from ({_MICROBATCH: value} for value in halves(_largest_pass(config, longest), longest))
    if isinstance(config, PPOConfig):
        yield from ({_CONCURRENT: value} for value in halves(config.rollout.max_concurrent_rollouts or 1, 1))
    if actor.optimizer.type == "adam":
        yield {"actor.optimizer.type": "adam_8bit"}
    if on_gpu:
        yield {"actor.optimizer.offload": "true"}
        yield {"actor.offload_activations": "true"}
    if isinstance(config, PPOConfig):
        for value in halves(config.gconfig.max_new_tokens, 64):
            yield {"gconfig.max_new_tokens": value}


def _largest_pass(config: Any, longest: int) -> int:
    """Return the number of tokens in the largest microbatch of a data-parallel replica with the current settings."""
    layout = engines.training_layout(config.actor)
    return sum(
        ExperimentSizes(config, engines.engine_config(config.actor), layout, generates=False).microbatch(longest)[0]
    )


def tuned_sizes(config: Any, plan: ExperimentPlan, planned: Callable[[Change], ExperimentPlan]) -> Change:
    """Return the largest concurrency and microbatch size with which an experiment fits into memory.

    The result maps settings to values, and is empty if no sizes fit. The concurrency is the largest value at which the rollout
    cache holds all concurrent answers at maximum length. Microbatches get the remaining memory.

    This function changes ``config``: ``actor.mb_spec.max_tokens_per_mb`` becomes None, and ``n_mbs`` and ``n_mbs_divisor``
    become 1.
    """
    chosen: Change = {}
    if isinstance(config, PPOConfig):
        most = config.rollout.max_concurrent_rollouts or 1
        for value in (most, *halves(most, 1)):
            other = planned(chosen := {_CONCURRENT: value})
            generates = other.rollout or other.actor
            if generates.cache_tokens >= generates.cache_wanted:
                break
        else:
            return {}
    config.actor.mb_spec.max_tokens_per_mb = None
    config.actor.mb_spec.n_mbs = config.actor.mb_spec.n_mbs_divisor = 1
    longest = plan.actor.longest * (2 if isinstance(config, RWConfig | DPOConfig) else 1)
    most = _largest_pass(config, plan.actor.longest)
    sizes = (chosen | {_MICROBATCH: value} for value in (most, *halves(most, longest)))
    return next((change for change in sizes if planned(change).fits), {})


def plan_of_file(words: Sequence[str], as_data: bool, tune: bool = False) -> tuple[ExperimentPlan, Any]:
    """Plan the memory of an experiment that is given by its command line. Return the plan and its description.

    The description is a table or, with ``as_data``, a dict of numbers by name. With ``tune``, the description includes the
    largest concurrency and microbatch size that fit into memory.

    Raises:
        UsageError: the configuration is invalid, or a model cannot be read.
    """
    words = ["--config", *words]
    cls = experiment_class(words)

    def loaded(change: Change) -> BaseExperimentConfig:
        return load_expr_config([*words, *_spelled(change)], cls)[0]

    plan = plan_experiment(loaded({}))

    def planned(change: Change) -> ExperimentPlan:
        return plan_experiment(loaded(change), plan.available)

    def tried(change: Change) -> tuple[bool, int]:
        other = planned(change)
        return other.fits, other.needed

    config, change = _resolved(loaded({})), list[str]()
    if not plan.fits:
        changes = _changes(config, plan.actor.longest, on_gpu=bool(engines.this_machine().gpus))
        change = _spelled(least_changes(changes, tried, plan.needed))
    sizes = _spelled(tuned_sizes(config, plan, planned)) if tune else None
    return plan, (_as_data if as_data else _as_text)(plan, change, sizes)


def _as_data(plan: ExperimentPlan, change: Sequence[str], sizes: Sequence[str] | None) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "actor": plan_numbers(plan.actor),
        "rollout": plan.rollout and plan_numbers(plan.rollout),
        **{name: getattr(plan, name) for name in ("transfer", "needed", "available", "fits")},
        "change": change,
    }
    return numbers if sizes is None else {**numbers, "sizes": sizes}


def _as_text(plan: ExperimentPlan, change: Sequence[str], sizes: Sequence[str] | None) -> str:
    lines = [f"{plan.titles[0]}:", *plan_table(plan.actor)]
    if plan.rollout is not None:
        lines += [f"{plan.titles[1]}:", *plan_table(plan.rollout)]
    if plan.share:
        lines.append(
            "The memory in the actor's plan is an upper bound, because the plan assumes unsharded weights on each rank. With "
            f"the sharding of actor.backend, a rank needs at most about {plan.share / 2**20:,.1f} MiB, plus the memory of "
            "the process itself (docs/layouts.md)."
        )
    if plan.transfer:
        lines.append(f"Shared memory for weight transfers: {plan.transfer / 2**20:,.1f} MiB.")
    remedy = (
        "The experiment does not fit with any of the settings that were tried; use a smaller model, or a machine with more "
        "memory"
    )
    lines.append(verdict(plan.needed, plan.available, change, remedy))
    if sizes is not None:
        lines.append(f"Largest sizes that fit: {' '.join(sizes)}" if sizes else "No sizes fit.")
    return "\n".join(lines)


def _spelled(change: Change) -> list[str]:
    return [f"{name}={value}" for name, value in change.items()]
