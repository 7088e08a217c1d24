"""Finds the engine and the devices of each role of an experiment."""

from areno.config.experiment.allocation import ModelAllocation
from areno.config.experiment.engine_sections import TrainEngineConfig
from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.setting_declaration import walk
from areno.config.rollout_options import SERVERS
from areno.errors import UsageError

CLUSTERS = ("ray", "slurm")
"""Multi-machine schedulers."""


def engine_of(config: BaseExperimentConfig, role: str) -> TrainEngineConfig | None:
    """Return the configuration section of a model, such as ``actor`` or ``ref``; None if the experiment has no such section."""
    engine = getattr(config, role, None)
    return engine if isinstance(engine, TrainEngineConfig) else None


def takes_turns(config: PPOConfig) -> bool:
    """Whether rollout and training alternate on the actor's engine."""
    strategies = config.rollout.scheduling_strategy, config.actor.scheduling_strategy
    return any(strategy.type == "colocation" and not strategy.fork for strategy in strategies)


def shares_devices(config: PPOConfig) -> bool:
    """Whether rollout and training run on the same devices, concurrently or in turns."""
    return "colocation" in (config.rollout.scheduling_strategy.type, config.actor.scheduling_strategy.type)


def server_of(config: BaseExperimentConfig) -> str:
    """Return the inference servers' software, vllm or sglang; empty if ``rollout.backend`` is invalid or names neither."""
    if not isinstance(config, PPOConfig):
        return ""
    try:
        backend = ModelAllocation.from_str(config.rollout.backend).backend
    except UsageError:
        return ""
    return backend if backend in SERVERS else ""


def addresses_of(config: PPOConfig) -> tuple[str, ...]:
    """Return the server addresses in ``rollout.api_url``, which is a comma-separated list."""
    return tuple(
        address.strip().rstrip("/") for address in (config.rollout.api_url or "").split(",") if address.strip()
    )


def same_layout(config: PPOConfig) -> bool:
    """Whether rollout and actor have equal parallel sizes."""
    rollout, actor = (ModelAllocation.from_str(each.backend).parallel for each in (config.rollout, config.actor))
    return rollout == actor


def roles(config: BaseExperimentConfig) -> dict[str, str]:
    """Return a dictionary of section paths and backends, such as ``{"rollout": "areno:d1", "actor": "fsdp:d1"}``."""
    return {
        path.removesuffix(".backend"): value
        for path, _, value in walk(config)
        if path.endswith(".backend") and isinstance(value, str)
    }
