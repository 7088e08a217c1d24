"""The registry of training algorithms. Trainers and losses are named as text, so that looking one up imports no torch.

Further ones are a file each in ``areno/algorithms``. Besides these names, ``get_algorithm`` takes ``file.py:NAME``, an
`AlgorithmSpec` in a user's file, and names that installed packages publish in the entry-point group ``areno.algorithms``.
"""

import functools
import importlib
import importlib.metadata
import inspect
import pkgutil
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from areno.config.hooks import import_user_file, split_spec
from areno.config.options import Option, nearest, options_of
from areno.config.train_options import TrainOptions
from areno.errors import UsageError

ENTRY_POINT_GROUP = "areno.algorithms"

LossFn = Callable[..., Any]


POLICY_TRAINER = "areno.api.trainers.policy_only:PolicyOnlyTrainer"
"""Samples, rewards, advantages by comparison, policy steps."""

PAIR_TRAINER = "areno.api.trainers.supervised:PairTrainer"
"""Pairs of a chosen and a rejected answer, without a reference."""

_DPO_TRAINER = "areno.api.trainers.supervised:DPOTrainer"
_REWARD_TRAINER = "areno.api.trainers.supervised:RewardModelTrainer"
_READ_BY_TRAINER = {
    PAIR_TRAINER: ("tree_training", "score_micro_bs"),
    POLICY_TRAINER: (
        *("advantage", "update_epochs", "update_minibatches", "tree_training", "score_micro_bs"),
        *("kl_reward_coef", "kl_reward_type", "ref_ckpt"),
    ),
}
"""Options that a trainer reads whatever its loss is."""


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """What makes an algorithm. Written in one file, with its knobs and its loss: docs/algorithms.md#your-own.

    A loss with a parameter ``knobs`` gets the algorithm's ``options`` as their dataclass. Any other keyword parameter that has
    the name of an option that the algorithm reads, with or without ``<name>_`` in front, gets that option.

    Attributes:
        name: registry name, lower-case.
        trainer: trainer class, or ``module:attribute`` to import it from when it is needed.
        default_loss: loss function, likewise; None if the trainer brings its own.
        requires_rollout: generates completions and needs a reward.
        loss_fn_factory: makes the loss function from the run's options, likewise; for what names cannot say.
        experimental: left out of `list_algorithms` on request.
        options: dataclass of further options (declared with ``areno.config.option``); they become flags of the run. Those of a
            dataclass in a field that may be None have the field's name in front, and make it as soon as one is given.
        uses: options of built-in algorithms that this one reads as well, such as ``grpo_clip_eps``.
        trains: ``policy``, or ``reward`` for a sequence classifier with one score per sequence.
        min_samples: least ``--n-samples`` from which it can learn; 2 if it compares the samples of a prompt.
        presets: defaults of ``options`` that are others than declared.
        renamed: parameters of the loss whose built-in option has another name, with that name.
    """

    name: str
    trainer: type | str = POLICY_TRAINER
    default_loss: LossFn | str | None = None
    requires_rollout: bool = True
    loss_fn_factory: Callable[[TrainOptions], LossFn] | str | None = None
    experimental: bool = False
    options: type | None = None
    uses: tuple[str, ...] = ()
    min_samples: int = 1
    trains: Literal["policy", "reward"] = "policy"
    presets: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def learns_from_pairs(self) -> bool:
        """Whether two neighbouring rows are an example."""
        return self.trainer in (PAIR_TRAINER, _DPO_TRAINER, _REWARD_TRAINER)

    def resolve_trainer_cls(self) -> type:
        """Import and return the trainer class."""
        return resolve_reference(self.trainer)  # type: ignore[no-any-return]

    def resolve_default_loss(self) -> LossFn | None:
        """Import and return the default loss function; None if there is none."""
        return resolve_reference(self.default_loss)  # type: ignore[no-any-return]

    def reads(self, entry: Option) -> bool:
        """Whether a run of this algorithm reads a built-in option."""
        names = (*self.uses, *(_READ_BY_TRAINER.get(self.trainer, ()) if isinstance(self.trainer, str) else ()))
        return not entry.info.algorithms or self.name in entry.info.algorithms or entry.name in names

    def own_options(self) -> tuple[Option, ...]:
        """The options that it declares, with its presets as defaults."""
        if self.options is None:
            return ()
        own = [replace(e, default=self.presets.get(e.name, e.default)) for e in options_of(self.options)]
        for name, section in _sections(self.options).items():
            presets = self.presets.get(name, {})
            for entry in options_of(section):
                info = replace(entry.info, unset=entry.default_text)
                own.append(Option(f"{name}_{entry.name}", entry.kind, entry.many, presets.get(entry.name), info))
        return tuple(own)

    def knobs(self, options: TrainOptions) -> Any:
        """Its ``options`` with the values of a run, or the `ValueError` of their dataclass; None if it declares none."""
        if self.options is None:
            return None
        values = {entry.name: options.extra.get(entry.name, entry.default) for entry in self.own_options()}
        for name, section in _sections(self.options).items():
            found = {entry.name: values.pop(f"{name}_{entry.name}") for entry in options_of(section)}
            chosen = {key: value for key, value in found.items() if value is not None}
            values[name] = section(**chosen) if chosen else None
        return self.options(**values)

    def make_loss_fn(self, options: TrainOptions) -> LossFn | None:
        """Return the loss function of a run, its parameters bound as the class says; None if the trainer has its own."""
        factory = resolve_reference(self.loss_fn_factory)
        if factory is not None:
            return factory(options)  # type: ignore[no-any-return]
        loss = self.resolve_default_loss()
        bound = {name: getattr(options, entry.name) for name, entry in self.built_in_knobs().items()}
        parameters = inspect.signature(loss).parameters if loss is not None else {}
        bound |= {name: value for name, value in options.extra.items() if name in parameters}
        if "knobs" in parameters:
            bound["knobs"] = self.knobs(options)
        return functools.partial(loss, **bound) if loss is not None and bound else loss

    def built_in_knobs(self) -> dict[str, Option]:
        """Built-in options that the default loss takes, by the names of its parameters."""
        loss = self.resolve_default_loss()
        names = inspect.signature(loss).parameters if loss is not None else {}
        declared = {entry.name: entry for entry in options_of(TrainOptions)}
        read = (e for e in declared.values() if self.name in e.info.algorithms or e.name in self.uses)
        spelled = {entry.name.removeprefix(f"{self.name}_"): entry for entry in read}
        spelled |= {name: declared[option] for name, option in self.renamed.items()}
        return {name: entry for name, entry in spelled.items() if name in names}

    @property
    def default_loss_name(self) -> str:
        """Name of the default loss, or of what makes it; found without importing it."""
        source = self.default_loss or self.loss_fn_factory
        if isinstance(source, str):
            return source.rpartition(":")[2]
        return "none" if source is None else getattr(source, "__name__", type(source).__name__)


def _sections(declaration: type) -> dict[str, type]:
    """Fields that hold a dataclass of further options, or None, with its class."""
    hints = typing.get_type_hints(declaration)
    classes = {
        e.name: [one for one in typing.get_args(hints[e.name]) if is_dataclass(one)] for e in fields(declaration)
    }
    return {name: typing.cast(type, found[0]) for name, found in classes.items() if found}


def resolve_reference(reference: Any) -> Any:
    """Import ``module:attribute``; anything that is not text is returned as it is."""
    if not isinstance(reference, str):
        return reference
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


_REGISTRY: dict[str, AlgorithmSpec] = {}


def register_algorithm(spec: AlgorithmSpec, *, replace: bool = False) -> AlgorithmSpec:
    """Add an algorithm under its name in lower case, and return it; a taken name needs ``replace``, or is a `ValueError`."""
    name = spec.name.lower()
    if name in (*_REGISTRY, *_files()) and not replace:
        raise ValueError(f"algorithm {name!r} is already registered; choose another name, or pass replace=True")
    _REGISTRY[name] = spec
    return spec


def list_algorithms(*, include_experimental: bool = True) -> list[str]:
    """Return the registered names, sorted."""
    names = {name for name, spec in _REGISTRY.items() if include_experimental or not spec.experimental}
    return sorted({*names, *_files()})


@functools.cache
def _files() -> tuple[str, ...]:
    """Names of the algorithms that are one file each, found without importing any: ``areno/algorithms/<name>.py``."""
    return tuple(module.name for module in pkgutil.iter_modules([str(Path(__file__).parents[1] / "algorithms")]))


def get_algorithm(name: str, *, option: str = "--algo") -> AlgorithmSpec:
    """Find an algorithm by registered name (any case), by entry point, or as ``file.py:NAME``. One of a file loads torch."""
    if name.lower() in _REGISTRY:
        return _REGISTRY[name.lower()]
    if name.lower() in _files():
        return importlib.import_module(f"areno.algorithms.{name.lower()}").SPEC  # type: ignore[no-any-return]
    if ".py" in name:
        return _from_file(name, option)
    published = {entry.name.lower(): entry for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    if name.lower() in published:
        return _from_entry_point(published[name.lower()], option)
    known = sorted({*list_algorithms(), *published})
    raise UsageError(
        f"{option} {name!r} is unknown{nearest(name.lower(), known)}; registered: {', '.join(known)}; "
        "or give your own as file.py:NAME"
    )


def _from_file(text: str, option: str) -> AlgorithmSpec:
    path, name = split_spec(text, option=option, default_name="NAME")
    if ":" not in text[text.rindex(".py") :]:
        raise UsageError(
            f"{option} {text!r} names no object; write it as {text}:NAME, NAME being an AlgorithmSpec in it"
        )
    if not Path(path).is_file():
        raise UsageError(f"{option} file does not exist: {path}; expected an AlgorithmSpec named {name} in it")
    module = import_user_file(path, option=option)
    if not hasattr(module, name):
        specs = [key for key, value in vars(module).items() if isinstance(value, AlgorithmSpec)]
        raise UsageError(f"{option} {path} defines no {name}; it has the specs: {', '.join(specs) or 'none'}")
    return _checked(getattr(module, name), f"{option} {text}")


def _from_entry_point(entry: importlib.metadata.EntryPoint, option: str) -> AlgorithmSpec:
    try:
        found = entry.load()
    except Exception as error:
        raise UsageError(
            f"{option} {entry.name}: loading {entry.value} raised {type(error).__name__}: {error}; "
            "repair or uninstall the package that provides it"
        ) from error
    return _checked(found, f"{option} {entry.name}")


def _checked(found: Any, where: str) -> AlgorithmSpec:
    if not isinstance(found, AlgorithmSpec):
        raise UsageError(f"{where} is a {type(found).__name__}; make it an areno.config.AlgorithmSpec")
    return found


for _spec in (
    AlgorithmSpec("sft", "areno.api.trainers.supervised:SFTTrainer", "areno.loss_fns:sft_loss_fn", False),
    AlgorithmSpec(
        "gspo", default_loss="areno.loss_fns:gspo_loss_fn", min_samples=2, renamed={"kl_type": "kl_loss_type"}
    ),
    AlgorithmSpec(
        "grpo",
        default_loss="areno.loss_fns:grpo_loss_fn",
        min_samples=2,
        renamed={"kl_type": "kl_loss_type", "max_tokens": "max_new_tokens"},
    ),
    AlgorithmSpec("ppo", "areno.api.trainers.ppo:PPOTrainer", "areno.loss_fns:ppo_loss_fn"),
    AlgorithmSpec("dpo", _DPO_TRAINER, "areno.loss_fns:dpo_loss_fn", False),
    AlgorithmSpec("rm", _REWARD_TRAINER, "areno.loss_fns:reward_model_loss_fn", False, trains="reward"),
):
    register_algorithm(_spec)
