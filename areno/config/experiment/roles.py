"""Who does what in an experiment: the engine of each role, and where it runs."""

from areno.config.experiment.allocation import ModelAllocation
from areno.config.experiment.engine_sections import TrainEngineConfig
from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.settings import walk
from areno.config.rollout_options import SERVERS
from areno.errors import UsageError

CLUSTERS = ("ray", "slurm")
"""Schedulers that start processes on several machines."""


def engine_of(config: BaseExperimentConfig, role: str) -> TrainEngineConfig | None:
    """The section of a model that is trained or that scores, if the experiment has one."""
    engine = getattr(config, role, None)
    return engine if isinstance(engine, TrainEngineConfig) else None


def takes_turns(config: PPOConfig) -> bool:
    """Whether the actor's engine also generates, in turn with training."""
    strategies = config.rollout.scheduling_strategy, config.actor.scheduling_strategy
    return any(strategy.type == "colocation" and not strategy.fork for strategy in strategies)


def server_of(config: BaseExperimentConfig) -> str:
    """The product whose servers generate; empty where areno's own engine does, or nothing, or the backend is malformed."""
    if not isinstance(config, PPOConfig):
        return ""
    try:
        backend = ModelAllocation.from_str(config.rollout.backend).backend
    except UsageError:
        return ""
    return backend if backend in SERVERS else ""


def addresses_of(config: PPOConfig) -> tuple[str, ...]:
    """Servers that run already, as ``rollout.api_url`` lists them."""
    return tuple(
        address.strip().rstrip("/") for address in (config.rollout.api_url or "").split(",") if address.strip()
    )


def same_layout(config: PPOConfig) -> bool:
    """Whether rollout and actor divide a model in the same way."""
    rollout, actor = (ModelAllocation.from_str(each.backend).parallel for each in (config.rollout, config.actor))
    return rollout == actor


def roles(config: BaseExperimentConfig) -> dict[str, str]:
    """The ``backend`` of every engine of an experiment, by its section's path."""
    return {
        path.removesuffix(".backend"): value
        for path, _, value in walk(config)
        if path.endswith(".backend") and isinstance(value, str)
    }
