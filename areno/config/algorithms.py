"""The registry of training algorithms. Specs in this file name their trainers and losses as text, so that looking up a spec
does not import torch.

Each file in ``areno/algorithms`` defines another algorithm; these files import torch. ``get_algorithm`` also accepts
``file.py:NAME`` (an `AlgorithmSpec` in a user's file) and the names of entry points in the group ``areno.algorithms``.
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

from areno.config.all_train_options import TrainOptions
from areno.config.hooks import import_user_file, split_spec
from areno.config.options import Option, nearest, options_of
from areno.errors import UsageError

ENTRY_POINT_GROUP = "areno.algorithms"

LossFn = Callable[..., Any]


POLICY_TRAINER = "areno.api.trainers.policy_only:PolicyOnlyTrainer"
"""Trainer of policy-gradient algorithms without a critic. Advantages are computed from the rewards of several samples."""

PAIR_TRAINER = "areno.api.trainers.supervised:PairTrainer"
"""Trainer for preference losses without a reference model, such as SimPO."""

_DPO_TRAINER = "areno.api.trainers.supervised:DPODatasetTrainer"
_REWARD_TRAINER = "areno.api.trainers.supervised:RewardModelTrainer"
_READ_BY_TRAINER = {
    PAIR_TRAINER: ("tree_training", "score_micro_bs"),
    POLICY_TRAINER: (
        *("advantage", "update_epochs", "update_minibatches", "tree_training", "score_micro_bs"),
        *("kl_reward_coef", "kl_reward_type", "ref_ckpt"),
    ),
}
"""Options that each trainer reads regardless of the loss."""


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """Declaration of an algorithm; see docs/algorithms.md#your-own.

    If a parameter of the loss function has the name of an option, the parameter receives the option's value. This applies to
    the options in the attributes ``options`` and ``uses`` (see below), and to areno's built-in options of this algorithm. If
    the name of a built-in option starts with the algorithm's name, the parameter's name omits this prefix: the parameter
    ``clip_eps`` of GRPO's loss receives ``grpo_clip_eps``.

    The attribute ``options`` is a dataclass. If the loss function has a parameter ``knobs``, this parameter receives an
    instance of this dataclass with the run's values.

    Attributes:
        name: registry name, lower-case.
        trainer: trainer class, or ``module:attribute`` for a lazy import.
        default_loss: loss function, or ``module:attribute``; None if ``loss_fn_factory`` or the trainer provides the loss.
        requires_rollout: whether the algorithm generates completions and needs a reward.
        loss_fn_factory: function (or ``module:attribute``) that receives the run's options and returns the loss function.
            Needed only if the loss cannot be configured through its function parameters.
        experimental: whether ``list_algorithms(include_experimental=False)`` omits the algorithm.
        options: dataclass of additional options, which become flags. Each field is declared with ``areno.config.option``, or
            annotated ``Section | None``, where ``Section`` is another dataclass. The options of ``Section`` are added with
            the field's name as prefix. If none of these options has a value, the field is None.
        uses: names of built-in options of other algorithms that this algorithm also reads, such as ``grpo_clip_eps``.
        trains: kind of the trained model: ``policy``, or ``reward`` (a sequence classifier with one score per sequence).
        min_samples: minimum ``--n-samples``; set it to 2 if the algorithm compares the samples of a prompt.
        presets: default values by option name, which replace the defaults in ``options``.
        renamed: maps the name of a loss parameter to the name of its built-in option, if these names differ.
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
        """Whether a training example is a pair of consecutive rows."""
        return not self._trainers.isdisjoint((PAIR_TRAINER, _DPO_TRAINER, _REWARD_TRAINER))

    @property
    def _trainers(self) -> set[str]:
        """Names (``module:attribute``) of the trainer and, if the trainer is a class, of its base classes."""
        if isinstance(self.trainer, str):
            return {self.trainer}
        return {f"{base.__module__}:{base.__qualname__}" for base in self.trainer.__mro__}

    def resolve_trainer_cls(self) -> type:
        """Import and return the trainer class."""
        return resolve_reference(self.trainer)  # type: ignore[no-any-return]

    def resolve_default_loss(self) -> LossFn | None:
        """Import and return the default loss function; None if the algorithm declares no default loss."""
        return resolve_reference(self.default_loss)  # type: ignore[no-any-return]

    def reads(self, entry: Option) -> bool:
        """Whether this algorithm reads ``entry``, a built-in option."""
        names = {*self.uses, *(name for trainer in self._trainers for name in _READ_BY_TRAINER.get(trainer, ()))}
        return not entry.info.algorithms or self.name in entry.info.algorithms or entry.name in names

    def own_options(self) -> tuple[Option, ...]:
        """Return the options that the algorithm declares, with the algorithm's presets as defaults."""
        if self.options is None:
            return ()
        declared = [replace(e, default=self.presets.get(e.name, e.default)) for e in options_of(self.options)]
        for name, section in _sections(self.options).items():
            presets = self.presets.get(name, {})
            for entry in options_of(section):
                info = replace(entry.info, unset=entry.default_text)
                declared.append(Option(f"{name}_{entry.name}", entry.kind, entry.many, presets.get(entry.name), info))
        return tuple(declared)

    def knobs(self, options: TrainOptions) -> Any:
        """Return the values of the algorithm's own options in a run, as an instance of the dataclass ``self.options``.

        Return None if the algorithm declares no options. Raises ValueError if the dataclass rejects a value.
        """
        if self.options is None:
            return None
        values = {entry.name: options.extra.get(entry.name, entry.default) for entry in self.own_options()}
        for name, section in _sections(self.options).items():
            section_values = {entry.name: values.pop(f"{name}_{entry.name}") for entry in options_of(section)}
            explicit = {key: value for key, value in section_values.items() if value is not None}
            values[name] = section(**explicit) if explicit else None
        return self.options(**values)

    def make_loss_fn(self, options: TrainOptions) -> LossFn | None:
        """Return the loss function with its parameters bound to the options of a run.

        If the trainer has its own loss, return None.
        """
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
        """Return the built-in options that the default loss receives, by parameter name."""
        loss = self.resolve_default_loss()
        names = inspect.signature(loss).parameters if loss is not None else {}
        declared = {entry.name: entry for entry in options_of(TrainOptions)}
        read = (e for e in declared.values() if self.name in e.info.algorithms or e.name in self.uses)
        spelled = {entry.name.removeprefix(f"{self.name}_"): entry for entry in read}
        spelled |= {name: declared[option] for name, option in self.renamed.items()}
        return {name: entry for name, entry in spelled.items() if name in names}

    @property
    def default_loss_name(self) -> str:
        """Name of the default loss function; if the algorithm has only a loss factory, the name of the factory.

        If the algorithm has neither, the name is ``none``. No module is imported to determine the name.
        """
        source = self.default_loss or self.loss_fn_factory
        if isinstance(source, str):
            return source.rpartition(":")[2]
        return "none" if source is None else getattr(source, "__name__", type(source).__name__)


def _sections(declaration: type) -> dict[str, type]:
    """Return the dataclasses of the optional sections of ``declaration``, by field name.

    A field is an optional section if its annotation is ``X | None``, where ``X`` is a dataclass.
    """
    hints = typing.get_type_hints(declaration)
    classes = {
        e.name: [cls for cls in typing.get_args(hints[e.name]) if is_dataclass(cls)] for e in fields(declaration)
    }
    return {name: typing.cast(type, members[0]) for name, members in classes.items() if members}


def resolve_reference(reference: Any) -> Any:
    """Import and return the object ``module:attribute``. A reference that is not a string is returned unchanged."""
    if not isinstance(reference, str):
        return reference
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


_REGISTRY: dict[str, AlgorithmSpec] = {}


def register_algorithm(spec: AlgorithmSpec, *, replace: bool = False) -> AlgorithmSpec:
    """Register an algorithm under its lower-case name, and return the algorithm.

    If the name is taken and ``replace`` is false, raise ValueError.
    """
    name = spec.name.lower()
    if name in (*_REGISTRY, *_files()) and not replace:
        raise ValueError(f"algorithm {name!r} is already registered; choose another name, or pass replace=True")
    _REGISTRY[name] = spec
    return spec


def list_algorithms(*, include_experimental: bool = True) -> list[str]:
    """Return the names of the registered algorithms, sorted."""
    names = {name for name, spec in _REGISTRY.items() if include_experimental or not spec.experimental}
    return sorted({*names, *_files()})


@functools.cache
def _files() -> tuple[str, ...]:
    """List the algorithms in ``areno/algorithms/<name>.py`` without importing them."""
    return tuple(module.name for module in pkgutil.iter_modules([str(Path(__file__).parents[1] / "algorithms")]))


def get_algorithm(name: str, *, option: str = "--algo") -> AlgorithmSpec:
    """Return the algorithm with this name (case-insensitive), or the algorithm in a user's file (``file.py:NAME``).

    Raises UsageError if the algorithm does not exist.
    """
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
        f"{option} {name!r} is unknown{nearest(name.lower(), known)}; choose an algorithm (registered: "
        f"{', '.join(known)}), or pass your own as file.py:NAME"
    )


def _from_file(text: str, option: str) -> AlgorithmSpec:
    path, name = split_spec(text, option=option, default_name="NAME")
    if ":" not in text[text.rindex(".py") :]:
        raise UsageError(
            f"{option} {text!r} names no algorithm; write {text}:NAME, where NAME is an AlgorithmSpec in this file"
        )
    if not Path(path).is_file():
        raise UsageError(f"{option} file does not exist: {path}; pass a file that defines the AlgorithmSpec {name}")
    module = import_user_file(path, option=option)
    if not hasattr(module, name):
        specs = [key for key, value in vars(module).items() if isinstance(value, AlgorithmSpec)]
        raise UsageError(
            f"{option} {path} defines no {name}; choose an AlgorithmSpec of this file (found: "
            f"{', '.join(specs) or 'none'})"
        )
    return _checked(getattr(module, name), f"{option} {text}")


def _from_entry_point(entry: importlib.metadata.EntryPoint, option: str) -> AlgorithmSpec:
    try:
        spec = entry.load()
    except Exception as error:
        raise UsageError(
            f"{option} {entry.name}: loading {entry.value} raised {type(error).__name__}: {error}; "
            "fix or uninstall the package that provides this algorithm"
        ) from error
    return _checked(spec, f"{option} {entry.name}")


def _checked(spec: Any, label: str) -> AlgorithmSpec:
    if not isinstance(spec, AlgorithmSpec):
        raise UsageError(f"{label} is a {type(spec).__name__}; pass an areno.config.AlgorithmSpec instead")
    return spec


for _spec in (
    AlgorithmSpec("sft", "areno.api.trainers.supervised:SFTDatasetTrainer", "areno.loss_fns:sft_loss_fn", False),
    AlgorithmSpec(
        "gspo", default_loss="areno.loss_fns:gspo_loss_fn", min_samples=2, renamed={"kl_type": "kl_loss_type"}
    ),
    AlgorithmSpec(
        "grpo",
        default_loss="areno.loss_fns:grpo_loss_fn",
        min_samples=2,
        renamed={"kl_type": "kl_loss_type", "max_tokens": "max_new_tokens"},
    ),
    AlgorithmSpec("ppo", "areno.api.trainers.ppo:PPODatasetTrainer", "areno.loss_fns:ppo_loss_fn"),
    AlgorithmSpec("dpo", _DPO_TRAINER, "areno.loss_fns:dpo_loss_fn", False),
    AlgorithmSpec("rm", _REWARD_TRAINER, "areno.loss_fns:reward_model_loss_fn", False, trains="reward"),
):
    register_algorithm(_spec)
