"""The registry of training algorithms. Trainers and losses are named as text, so that looking one up imports no torch.

Besides the built-in names, ``get_algorithm`` takes ``file.py:NAME``, an `AlgorithmSpec` in a user's file, and names
that installed packages publish in the entry-point group ``areno.algorithms``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areno.config.hooks import import_user_file, split_spec
from areno.config.options import nearest
from areno.config.train_options import TrainOptions
from areno.errors import UsageError

ENTRY_POINT_GROUP = "areno.algorithms"

LossFn = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """What makes an algorithm.

    Attributes:
        name: registry name, lower-case.
        trainer: trainer class, or ``module:attribute`` to import it from when it is needed.
        default_loss: loss function, likewise; None if the trainer brings its own.
        requires_rollout: generates completions and needs a reward.
        loss_fn_factory: makes the loss function from the run's options, likewise.
        experimental: left out of `list_algorithms` on request.
        options: dataclass of further options (declared with ``areno.config.option``); they become flags of the run.
        uses: options of built-in algorithms that this one reads as well, such as ``grpo_clip_eps``.
        trains: ``policy``, or ``reward`` for a sequence classifier with one score per sequence.
        min_samples: least ``--n-samples`` from which it can learn; 2 if it compares the samples of a prompt.
    """

    name: str
    trainer: type | str
    default_loss: LossFn | str | None
    requires_rollout: bool
    loss_fn_factory: Callable[[TrainOptions], LossFn] | str | None = None
    experimental: bool = False
    options: type | None = None
    uses: tuple[str, ...] = ()
    min_samples: int = 1
    trains: Literal["policy", "reward"] = "policy"

    def resolve_trainer_cls(self) -> type:
        """Import and return the trainer class."""
        return resolve_reference(self.trainer)  # type: ignore[no-any-return]

    def resolve_default_loss(self) -> LossFn | None:
        """Import and return the default loss function; None if there is none."""
        return resolve_reference(self.default_loss)  # type: ignore[no-any-return]

    def make_loss_fn(self, options: TrainOptions) -> LossFn | None:
        """Return the loss function of a run: from the factory if there is one, else the default."""
        factory = resolve_reference(self.loss_fn_factory)
        return factory(options) if factory is not None else self.resolve_default_loss()

    @property
    def default_loss_name(self) -> str:
        """Name of the default loss, or of what makes it; found without importing it."""
        source = self.default_loss or self.loss_fn_factory
        if source is None:
            return "none"
        if isinstance(source, str):
            return source.rpartition(":")[2]
        return getattr(source, "__name__", type(source).__name__)


def resolve_reference(reference: Any) -> Any:
    """Import ``module:attribute``; anything that is not text is returned as it is."""
    if not isinstance(reference, str):
        return reference
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


_REGISTRY: dict[str, AlgorithmSpec] = {}


def register_algorithm(spec: AlgorithmSpec, *, replace: bool = False) -> AlgorithmSpec:
    """Add an algorithm under its name in lower case.

    Args:
        spec: the algorithm.
        replace: allow a name that is taken.

    Returns:
        The spec, so that a module can register and keep it in one statement.

    Raises:
        ValueError: the name is taken.
    """
    name = spec.name.lower()
    if name in _REGISTRY and not replace:
        raise ValueError(f"algorithm {name!r} is already registered; choose another name, or pass replace=True")
    _REGISTRY[name] = spec
    return spec


def list_algorithms(*, include_experimental: bool = True) -> list[str]:
    """Return the registered names, sorted."""
    return sorted(name for name, spec in _REGISTRY.items() if include_experimental or not spec.experimental)


def get_algorithm(name: str) -> AlgorithmSpec:
    """Find an algorithm by registered name (any case), by entry point, or as ``file.py:NAME``.

    Raises:
        UsageError: there is no such algorithm, or what was found is not an `AlgorithmSpec`.
    """
    if name.lower() in _REGISTRY:
        return _REGISTRY[name.lower()]
    if ".py" in name:
        return _from_file(name)
    published = {entry.name.lower(): entry for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    if name.lower() in published:
        return _from_entry_point(published[name.lower()])
    known = sorted({*list_algorithms(), *published})
    raise UsageError(
        f"--algo {name!r} is unknown{nearest(name.lower(), known)}; registered: {', '.join(known)}; "
        "or give your own as file.py:NAME"
    )


def _from_file(text: str) -> AlgorithmSpec:
    path, name = split_spec(text, option="--algo", default_name="NAME")
    if ":" not in text[text.rindex(".py") :]:
        raise UsageError(f"--algo {text!r} names no object; write it as {text}:NAME, NAME being an AlgorithmSpec in it")
    if not Path(path).is_file():
        raise UsageError(f"--algo file does not exist: {path}; expected an AlgorithmSpec named {name} in it")
    module = import_user_file(path, option="--algo")
    if not hasattr(module, name):
        specs = [key for key, value in vars(module).items() if isinstance(value, AlgorithmSpec)]
        raise UsageError(f"--algo {path} defines no {name}; it has the specs: {', '.join(specs) or 'none'}")
    return _checked(getattr(module, name), f"--algo {text}")


def _from_entry_point(entry: importlib.metadata.EntryPoint) -> AlgorithmSpec:
    try:
        found = entry.load()
    except Exception as error:
        raise UsageError(
            f"--algo {entry.name}: loading {entry.value} raised {type(error).__name__}: {error}; "
            "repair or uninstall the package that provides it"
        ) from error
    return _checked(found, f"--algo {entry.name}")


def _checked(found: Any, where: str) -> AlgorithmSpec:
    if not isinstance(found, AlgorithmSpec):
        raise UsageError(f"{where} is a {type(found).__name__}; make it an areno.config.AlgorithmSpec")
    return found


_POLICY_TRAINER = "areno.api.trainers.policy_only:PolicyOnlyTrainer"

for _spec in (
    AlgorithmSpec("sft", "areno.api.trainers.sft:SFTTrainer", "areno.loss_fns:sft_loss_fn", False),
    AlgorithmSpec(
        "gspo",
        _POLICY_TRAINER,
        "areno.loss_fns:gspo_loss_fn",
        True,
        loss_fn_factory="areno.api.losses:gspo_loss",
        min_samples=2,
    ),
    AlgorithmSpec(
        "grpo",
        _POLICY_TRAINER,
        "areno.loss_fns:grpo_loss_fn",
        True,
        loss_fn_factory="areno.api.losses:grpo_loss",
        min_samples=2,
    ),
    AlgorithmSpec(
        "ppo",
        "areno.api.trainers.ppo:PPOTrainer",
        "areno.loss_fns:ppo_loss_fn",
        True,
        loss_fn_factory="areno.api.losses:ppo_loss",
    ),
    AlgorithmSpec(
        "dpo",
        "areno.api.trainers.dpo:DPOTrainer",
        "areno.loss_fns:dpo_loss_fn",
        False,
        loss_fn_factory="areno.api.losses:dpo_loss",
    ),
    AlgorithmSpec(
        "rm",
        "areno.api.trainers.reward_model:RewardModelTrainer",
        "areno.loss_fns:reward_model_loss_fn",
        False,
        trains="reward",
    ),
):
    register_algorithm(_spec)
