"""The setting ``actor.algorithm``, which selects an algorithm by name, as ``areno train --algo`` does."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from areno.config.algorithms import PAIR_TRAINER, POLICY_TRAINER, AlgorithmSpec, get_algorithm
from areno.config.all_train_options import TrainOptions
from areno.config.experiment.engine_sections import DPOEngineConfig, PPOActorConfig
from areno.config.experiment.setting_declaration import changed
from areno.config.parser import Problems, build_options, convert_values
from areno.config.policy_loss_options import PolicyLossOptions
from areno.errors import UsageError

_SETTINGS = {"max_new_tokens": "max_new_tokens", "kl_coef": "kl_loss_coef", "kl_loss_type": "kl_loss_type"}
"""Maps an option of an algorithm to the ``actor`` setting that determines the option's value."""


def named_algorithm(actor: PPOActorConfig | DPOEngineConfig) -> tuple[AlgorithmSpec, TrainOptions]:
    """Return the algorithm of ``actor.algorithm``, and its options from ``actor.algorithm_options`` and defaults.

    Raises UsageError: the algorithm is unknown or needs a different trainer, or an option is invalid.
    """
    spec = get_algorithm(actor.algorithm, option="actor.algorithm")
    trainer, example = (POLICY_TRAINER, "gspo") if isinstance(actor, PPOActorConfig) else (PAIR_TRAINER, "simpo")
    if spec.trainer != trainer or not (spec.default_loss or spec.loss_fn_factory):
        raise UsageError(
            f"actor.algorithm {actor.algorithm} needs a different trainer than this experiment uses; choose an algorithm such "
            f"as {example}"
        )
    # Options of the policy loss are settings of `actor`.
    declared = () if is_family(spec) else (*spec.own_options(), *spec.built_in_knobs().values())
    entries = {entry.name: entry for entry in declared if entry.name not in _SETTINGS}
    problems = Problems()
    label = "actor.algorithm_options.{}".format
    values = convert_values(actor.algorithm_options, entries, label, problems)
    for name, value in values.items():
        problems.add(entries[name].value_problem(value, label(name)))
    problems.raise_if_any()
    inherited = {name: getattr(actor, setting) for name, setting in _SETTINGS.items() if hasattr(actor, setting)}
    options = build_options({**values, **inherited}, spec, explicit=frozenset(values))
    try:
        spec.knobs(options)
    except ValueError as error:
        raise UsageError(f"actor.algorithm_options: {error}") from error
    return spec, options


def with_presets(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the untyped configuration ``tree`` in which ``actor`` also contains the presets of ``actor.algorithm``.

    Settings that ``actor`` already contains take precedence over presets. If no algorithm is set, or if the loss of the
    algorithm is not a variant of areno's policy loss, ``tree`` is returned unchanged.

    Raises UsageError: the algorithm is unknown.
    """
    actor = tree.get("actor")
    name = actor.get("algorithm") if isinstance(actor, dict) else None
    if not isinstance(actor, dict) or not name or not isinstance(name, str) or "${" in name:
        return tree
    spec = get_algorithm(name, option="actor.algorithm")
    return {**tree, "actor": {**spec.presets, **actor}} if is_family(spec) else tree


def check_algorithm(actor: PPOActorConfig | DPOEngineConfig, has_teacher: bool = False) -> Iterator[str]:
    """Yield problems with ``actor.algorithm``, with its options, and with settings that the algorithm does not use."""
    if not actor.algorithm:
        if actor.algorithm_options:
            yield "actor.algorithm_options has no effect without an algorithm; set actor.algorithm too"
        return
    try:
        spec, _ = named_algorithm(actor)
    except UsageError as error:
        yield str(error)
        return
    if is_family(spec):
        return
    names: tuple[str, ...] = ("beta", "loss_type", "label_smoothing")
    if isinstance(actor, PPOActorConfig):
        names = (*(entry.name for entry in fields(PolicyLossOptions)), "rejection_sampling")
        if actor.kl_loss_coef > 0 and "kl_coef" not in {entry.name for entry in spec.built_in_knobs().values()}:
            with_algorithm = f"with actor.algorithm {actor.algorithm}"
            yield f"actor.kl_loss_coef has no effect {with_algorithm}, whose loss has no KL term; remove the setting"
    because = f"has no effect with actor.algorithm {actor.algorithm}, which has its own loss"
    yield from (f"actor.{name} {because}; remove the setting" for name in changed(actor, names))
    if has_teacher:
        yield f"teacher {because}; remove one of the two settings"


def is_family(spec: AlgorithmSpec) -> bool:
    """Whether an algorithm's loss is a variant of areno's policy loss."""
    return spec.options is not None and issubclass(spec.options, PolicyLossOptions)
