"""The notice about settings that are accepted but have no effect.

If the backend of the actor is archon or megatron, areno's own engine replaces this backend. The notice then also lists the
settings of ``actor.archon`` or ``actor.megatron`` that this engine applies.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from areno.config.experiment.allocation import ModelAllocation
from areno.config.experiment.backend_sections import UNUSED_BACKEND
from areno.config.experiment.backends import shards_weights
from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.roles import engine_of, server_of
from areno.config.experiment.run_sections import RewardConfig
from areno.config.experiment.setting_declaration import changed, settings_of, walk
from areno.config.experiment.worker_sections import READ_BY

_SCORING = ("n_mbs", "granularity", "n_mbs_divisor", "packing_algorithm")
_REPLACED_BACKENDS = ("archon", "megatron")  # areno's engine replaces them
_LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_OWN_MOMENTS = {"sgd": "sgd has no moments", "adam_8bit": "adam_8bit has 8-bit moments"}
_SERVER_MODELS = {"vllm": "model", "sglang": "model_path"}


def notice(config: BaseExperimentConfig) -> str:
    """Return a text that lists the settings without effect, grouped by the reason; empty if there is nothing to list.

    Settings with default values are not listed. If the actor's backend is archon or megatron, the text also lists the
    settings of this backend that do have an effect.
    """
    sections: dict[str, dict[str, dict[str, None]]] = {}
    for path, reason in changes_nothing(config):
        section, _, name = path.rpartition(".")
        sections.setdefault(reason, {}).setdefault(section, {})[name] = None
    lines = [f"  {_join_names(names)}: {reason}" for reason, names in sections.items()]
    if lines:
        lines.insert(0, "settings that are accepted but have no effect in this run:")
    if applied := [f"  {path}: {effect}" for path, effect in _mapped(config)]:
        lines += [
            f"areno's engine trains instead of {backend_of(config)}, and applies these settings of {backend_of(config)}:",
            *applied,
        ]
    return "\n".join(lines)


def _mapped(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    backend, actor = backend_of(config), engine_of(config, "actor")
    if actor is not None and backend in _REPLACED_BACKENDS:
        effects = getattr(actor, backend).mapped(shards_weights(config))
        yield from ((f"actor.{backend}.{name}", effect) for name, effect in effects)


def backend_of(config: BaseExperimentConfig) -> str:
    """Return the name of the actor's backend; empty if the experiment has no section ``actor``."""
    actor = engine_of(config, "actor")
    return actor.backend.partition(":")[0].partition("[")[0].partition("(")[0].strip() if actor is not None else ""


def _join_names(names_by_section: dict[str, dict[str, None]]) -> str:
    """Join paths of settings. Names that sections share are listed once, as in ``lr, eps of A.optimizer and B.optimizer``."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for section, section_names in names_by_section.items():
        grouped.setdefault(tuple(section_names), []).append(section)
    parts = []
    for names, sections in grouped.items():
        if len(names) == 1 or sections == [""]:
            parts += [f"{section}.{name}".lstrip(".") for section in sections for name in names]
        else:
            parts.append(f"{', '.join(names)} of {' and '.join(sections)}")
    return ", ".join(parts)


def changes_nothing(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting or section that differs from its default but has no effect, and the reason."""
    backend, unused = backend_of(config), set()
    for path, entry, value in walk(config):
        reason = entry.info.no_effect
        if entry.name in _REPLACED_BACKENDS and entry.name != backend and entry.is_section:
            unused.add(path)
            if value != type(value)():
                yield path, UNUSED_BACKEND
        if any(path.startswith(f"{section}.") for section in unused):
            continue
        if config.scheduler.type in READ_BY.get(reason, ()):
            continue
        if reason and value != entry.default and not (entry.is_section and value is None):
            yield (path.rpartition(".")[0] if reason == UNUSED_BACKEND else path), reason
    yield from _servers(config)
    yield from _pipeline(config)
    yield from _sharding(config)
    yield from _optimizers(config)
    yield from _cluster(config)
    yield from _tracing(config)
    yield from _evaluation(config)
    yield from _actor_roles(config)
    if isinstance(config, PPOConfig):
        yield from _policy(config)


def _optimizers(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    for role in ("actor", "critic"):
        engine = engine_of(config, role)
        if engine is None or engine.optimizer is None:
            continue
        if engine.optimizer.type in _OWN_MOMENTS:
            yield from _changed(role, engine, ("optimizer_dtype",), _OWN_MOMENTS[engine.optimizer.type])
        if engine.dtype != "float16":
            because = "only read with dtype float16; training in bfloat16 or float32 uses no loss scale"
            yield from _changed(f"{role}.optimizer", engine.optimizer, _LOSS_SCALE, because)


def _pipeline(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    actor, backend = engine_of(config, "actor"), backend_of(config)
    if actor is not None and backend in _REPLACED_BACKENDS:
        stages = ModelAllocation.from_str(actor.backend).parallel.pipeline
        unused = getattr(actor, backend).unused(stages, shards_weights(config))
        yield from ((f"actor.{backend}.{name}", why) for name, why in unused)


def _sharding(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    actor = engine_of(config, "actor")
    if actor is None:
        return
    if not shards_weights(config):
        because = f"with actor.backend {actor.backend}, the weights are not sharded in this run"
        yield from _changed("actor.fsdp", actor.fsdp, ("wrap_policy", "memory_efficient_load"), because)
    elif actor.fsdp.shard_weights is False:
        yield (
            "actor.fsdp.shard_weights",
            f"actor.backend {actor.backend} has context or expert parallelism, which always shards weights",
        )


def _changed(where: str, section: Any, names: Iterable[str], reason: str) -> Iterator[tuple[str, str]]:
    return ((f"{where}.{name}", reason) for name in changed(section, names))


def _servers(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    product, actor = server_of(config), engine_of(config, "actor")
    for name, model in _SERVER_MODELS.items():
        section = getattr(config, name)
        if name != product:
            yield from [(name, UNUSED_BACKEND)] if section != type(section)() else []
        elif actor is not None and getattr(section, model) not in ("", actor.path):
            yield f"{name}.{model}", "servers load the actor's model, which actor.path specifies"


def _cluster(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    gpus = config.cluster.n_gpus_per_node
    documented = settings_of(type(config.cluster))["n_gpus_per_node"].info.documented
    if config.scheduler.type == "ray" and gpus not in (None, 0, documented):
        yield "cluster.n_gpus_per_node", "Ray detects the GPUs of its nodes; only the value 0 (no GPUs) has an effect"


def _tracing(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    if config.perf_tracer is not None and not config.perf_tracer.enabled:
        because = "perf_tracer.enabled is false, so no trace is written"
        yield from _changed("perf_tracer", config.perf_tracer, ("save_interval", "profile_steps"), because)


def _evaluation(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    if config.valid_dataset is None:
        return
    if not config.evaluator.eval_before_train and not config.evaluator.has_frequency:
        yield "valid_dataset", "no interval such as evaluator.freq_steps is set, so nothing is evaluated"
    because = "an evaluation uses all rows in file order"
    yield from _changed("valid_dataset", config.valid_dataset, ("batch_size", "shuffle", "drop_last"), because)


def _actor_roles(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    for role in ("ref", "critic"):
        engine, because = engine_of(config, role), f"{role} runs in the actor's processes"
        if engine is None:
            continue
        strategy = engine.scheduling_strategy
        yield from _changed(f"{role}.scheduling_strategy", strategy, ("type", "target", "fork"), because)
        for index, spec in enumerate(engine.scheduling_spec):
            yield from _changed(f"{role}.scheduling_spec.{index}", spec, ("cpu", "env_vars"), because)
        if role == "ref":
            yield from _changed("ref", engine, ("optimizer",), "a reference is not trained")
            because = "for a reference, only max_tokens_per_mb matters, because it limits memory use"
            yield from _changed("ref.mb_spec", engine.mb_spec, _SCORING, because)


def _policy(config: PPOConfig) -> Iterator[tuple[str, str]]:
    if config.async_training is not None:
        yield "async_training", "rollout.max_head_offpolicyness controls how far the rollout is ahead of training"
    if not config.actor.log_agent_stats_keys:
        yield from _changed("actor", config.actor, ("log_agent_stats",), "log_agent_stats_keys is empty")
    if config.actor.use_sapo_loss:
        yield from _changed("actor", config.actor, ("eps_clip",), "SAPO does not clip")
    if config.teacher is not None:
        yield from _changed(
            "teacher", config.teacher, ("engine_type",), "areno starts no separate engine for the teacher"
        )
    agent, reward = config.rollout.agent, config.reward
    if isinstance(reward, RewardConfig) and not config.built_in_workflow:
        because = (
            "only read by the workflows rlvr and multi_turn; other workflows and agents compute rewards themselves"
        )
        yield from _changed("reward", reward, ("fn", "timeout_seconds", "max_retries", "max_workers"), because)
    if config.built_in_workflow:
        names = [path for path, entry, _ in walk(agent) if "." not in path and entry.shape == "scalar"]
        because = f"only read by agents; this run uses the workflow {config.built_in_workflow}"
        yield from _changed("rollout.agent", agent, names, because)
    elif agent.chat_template_type != "hf":
        yield (
            "rollout.agent.chat_template_type",
            "hf and concat do the same: a request reuses the recorded tokens of its conversation whenever possible",
        )
