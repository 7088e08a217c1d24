"""Settings that one section has and another one decides: said, where they would have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areno.config.experiment.effect_table import HARMLESS
from areno.config.experiment.effects import words_of
from areno.config.experiment.engine_sections import TrainEngineConfig
from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.section_checks import idle, shown
from areno.config.experiment.settings import settings_of, walk

_OWN = {"experiment_name", "trial_name", "path", "model_type", "is_critic", "temperature", "backend"}
_OWN |= {"scheduling_strategy", "scheduling_spec", "mb_spec", "optimizer", "archon", "megatron"}
_TRAINED = ("critic", "ref")
LOADER = "loader"
"""Key of ``dataset_kwargs`` that names the user's own loader."""


def idle_settings(config: BaseExperimentConfig) -> Iterator[str]:
    """Say which settings nothing would read, because of what other sections say."""
    yield from _tokenizers(config)
    yield from _rows(config)
    yield from _environments(config)
    for role in _TRAINED:
        engine = getattr(config, role, None)
        if isinstance(engine, TrainEngineConfig):
            yield from _shared(role, engine, config)
    if isinstance(config, PPOConfig):
        yield from _teacher(config)
        if not config.actor.use_lora:
            because = "without an adapter; set actor.use_lora too"
            for name in ("gconfig", "eval_gconfig"):
                given = getattr(config, name)
                if given is not None:
                    yield from (f"{name}.{key} {text}" for key, text in idle(given, ("lora_name",), because))
    else:
        actor = vars(config)["actor"]  # each kind of experiment has one
        because = "in an experiment that samples nothing; leave it out"
        yield from (f"actor.{key} {text}" for key, text in idle(actor, ("temperature",), because))


def _tokenizers(config: BaseExperimentConfig) -> Iterator[str]:
    model = getattr(getattr(config, "actor", None), "path", "")
    found = {"tokenizer_path": config.tokenizer_path}
    if isinstance(config, PPOConfig):
        found["rollout.tokenizer_path"] = config.rollout.tokenizer_path
    for name, value in found.items():
        if value not in ("", model):
            yield f"{name} {value!r} differs from actor.path {model!r}: a model has its tokenizer in its folder; leave it out"


def _rows(config: BaseExperimentConfig) -> Iterator[str]:
    if config.valid_dataset is not None and not config.train_dataset.drop_last:
        because = "because an evaluation takes all rows together; leave it out"
        yield from (f"valid_dataset.{key} {text}" for key, text in idle(config.valid_dataset, ("drop_last",), because))


def _environments(config: BaseExperimentConfig) -> Iterator[str]:
    actor = getattr(config, "actor", None)
    if not isinstance(actor, TrainEngineConfig) or not actor.scheduling_spec:
        return
    for role in _TRAINED:
        engine = getattr(config, role, None)
        for spec in engine.scheduling_spec[:1] if isinstance(engine, TrainEngineConfig) else ():
            if spec.env_vars not in ({}, actor.scheduling_spec[0].env_vars):
                yield (
                    f"{role}.scheduling_spec.0.env_vars differs from the actor's, in whose processes {role} lives; write "
                    "them into actor.scheduling_spec.0.env_vars"
                )


def _shared(role: str, engine: TrainEngineConfig, config: Any) -> Iterator[str]:
    for name, entry in settings_of(TrainEngineConfig).items():
        value = getattr(engine, name)
        same = (settings_of(type(engine))[name].default, getattr(config.actor, name), entry.info.documented)
        if name not in _OWN and not words_of(entry, HARMLESS) and value not in same:
            words = f"{role}.{name} {shown(value)}".strip()
            yield f"{words} has no effect: {role} lives in the actor's engine, which decides it; leave it out"


def _teacher(config: PPOConfig) -> Iterator[str]:
    if config.teacher is None:
        return
    for name in ("rollout", "train"):
        section = getattr(config.teacher, name)
        for path, entry, value in walk(section) if section is not None else ():
            if entry.shape in ("section", "sections"):
                continue
            key = path.rpartition(".")[2]
            same = [entry.default, config.teacher.path, config.cluster.fileroot]
            same += [getattr(part, key, None) for part in (config, config.actor, config.rollout, config.gconfig)]
            if value not in same and key not in ("consumer_batch_size", "max_concurrent_rollouts", "temperature"):
                yield (
                    f"teacher.{name}.{path} {shown(value)} has no effect: the actor's engine scores for the teacher; leave "
                    "it out"
                )
