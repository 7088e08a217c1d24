"""The one notice of an experiment: what was given, is accepted, and changes nothing."""

from collections.abc import Iterable, Iterator
from typing import Any

from areno.config.experiment.allocation import ModelAllocation
from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.foreign_sections import UNUSED_BACKEND
from areno.config.experiment.roles import engine_of, server_of
from areno.config.experiment.settings import changed, walk
from areno.config.experiment.worker_sections import READ_BY
from areno.config.rollout_options import SERVERS

_SCORING = ("n_mbs", "granularity", "n_mbs_divisor", "packing_algorithm")
_FOREIGN = ("archon", "megatron")  # sections of engines in whose place areno's trains
_LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_NO_AGENT = ("rlvr", "multi_turn")


def notice(config: BaseExperimentConfig) -> str:
    """Text of the notice, one line per reason; empty where there is nothing to say.

    Settings at areno's own defaults are not listed: a file that spells them out and one that does not are the same.
    """
    sections: dict[str, dict[str, dict[str, None]]] = {}
    for path, reason in changes_nothing(config):
        section, _, name = path.rpartition(".")
        sections.setdefault(reason, {}).setdefault(section, {})[name] = None
    lines = [f"  {_listed(places)}: {reason}" for reason, places in sections.items()]
    if lines:
        lines.insert(0, "settings that are accepted and change nothing here:")
    if taken := [f"  {path}: {what}" for path, what in _mapped(config)]:
        lines += [f"settings of {backend_of(config)} that act on areno's engine, which trains in its place:", *taken]
    return "\n".join(lines)


def _mapped(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    """Settings of another backend's section, and what they do here."""
    backend, actor = backend_of(config), engine_of(config, "actor")
    if actor is not None and backend in _FOREIGN:
        yield from ((f"actor.{backend}.{name}", what) for name, what in getattr(actor, backend).mapped())


def backend_of(config: BaseExperimentConfig) -> str:
    """The backend in whose name the actor trains; empty where it is malformed."""
    actor = engine_of(config, "actor")
    return actor.backend.partition(":")[0].partition("[")[0].partition("(")[0].strip() if actor is not None else ""


def _listed(places: dict[str, dict[str, None]]) -> str:
    """Names by section; sections that have the same names stand together."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for section, its_names in places.items():
        alike.setdefault(tuple(its_names), []).append(section)
    parts = []
    for names, sections in alike.items():
        if len(names) == 1 or sections == [""]:
            parts += [f"{section}.{name}".lstrip(".") for section in sections for name in names]
        else:
            parts.append(f"{', '.join(names)} of {' and '.join(sections)}")
    return ", ".join(parts)


def changes_nothing(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    """Give each setting, or whole section, that has a value of its own and changes nothing, with the reason."""
    backend, unused = backend_of(config), set()
    for path, entry, value in walk(config):
        reason = entry.info.no_effect
        if entry.name in _FOREIGN and entry.name != backend and entry.is_section:
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
    yield from _of_the_backend(config)
    yield from _loss_scale(config)
    yield from _evaluation(config)
    yield from _of_the_actor(config)
    if isinstance(config, PPOConfig):
        yield from _policy(config)


def _loss_scale(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    """Settings of fp16 training, without it."""
    for role in ("actor", "critic"):
        engine = engine_of(config, role)
        if engine is not None and engine.optimizer is not None and engine.dtype != "float16":
            because = "read with dtype float16 only; bfloat16 and float32 have no loss scale"
            yield from _changed(f"{role}.optimizer", engine.optimizer, _LOSS_SCALE, because)


def _of_the_backend(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    actor, backend = engine_of(config, "actor"), backend_of(config)
    if actor is not None and backend in _FOREIGN:
        stages = ModelAllocation.from_str(actor.backend).parallel.pipeline
        yield from ((f"actor.{backend}.{name}", why) for name, why in getattr(actor, backend).unused(stages))


def _changed(where: str, section: Any, names: Iterable[str], reason: str) -> Iterator[tuple[str, str]]:
    return ((f"{where}.{name}", reason) for name in changed(section, names))


def _servers(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    """Sections of servers that the rollout does not have."""
    product = server_of(config)
    for name in SERVERS:
        section = getattr(config, name)
        if name != product and section != type(section)():
            yield name, UNUSED_BACKEND


def _evaluation(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    if config.valid_dataset is None:
        return
    if not config.evaluator.eval_before_train and not config.evaluator.has_frequency:
        yield "valid_dataset", "the evaluator has no frequency, so nothing is evaluated"
    because = "an evaluation takes all rows, in the order of the file"
    yield from _changed("valid_dataset", config.valid_dataset, ("batch_size", "shuffle"), because)


def _of_the_actor(config: BaseExperimentConfig) -> Iterator[tuple[str, str]]:
    """Settings of roles that live in the actor's processes."""
    for role in ("ref", "critic"):
        engine, because = engine_of(config, role), f"{role} lives in the actor's processes"
        if engine is None:
            continue
        strategy = engine.scheduling_strategy
        yield from _changed(f"{role}.scheduling_strategy", strategy, ("type", "target", "fork"), because)
        for index, spec in enumerate(engine.scheduling_spec):
            yield from _changed(f"{role}.scheduling_spec.{index}", spec, ("cpu", "env_vars"), because)
        if role == "ref":
            yield from _changed("ref", engine, ("optimizer",), "a reference is not trained")
            because = "a reference scores within max_tokens_per_mb; how it is cut changes no number"
            yield from _changed("ref.mb_spec", engine.mb_spec, _SCORING, because)


def _policy(config: PPOConfig) -> Iterator[tuple[str, str]]:
    if config.async_training is not None:
        yield "async_training", "rollout.max_head_offpolicyness says how far rollout runs ahead"
    if config.actor.use_sapo_loss:
        yield from _changed("actor", config.actor, ("eps_clip",), "SAPO does not clip")
    if config.teacher is not None:
        yield from _changed("teacher", config.teacher, ("engine_type",), "the actor's engine scores for the teacher")
    agent = config.rollout.agent
    if not agent.agent_cls_path and config.workflow.path in _NO_AGENT:
        names = [path for path, entry, _ in walk(agent) if "." not in path and entry.shape == "scalar"]
        because = f"read by agents, and workflow.path is {config.workflow.path}"
        yield from _changed("rollout.agent", agent, names, because)
    elif agent.chat_template_type != "hf":
        yield "rollout.agent.chat_template_type", "conversations go on by their own tokens in any case"
