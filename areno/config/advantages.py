"""The registry of advantage estimators. Built-in estimators are imported lazily: listing their names does not import torch.

An estimator is a function ``(rewards, groups) -> advantages``. For each sample of a step, ``rewards`` contains the
reward, and ``groups`` contains the index of the prompt.
"""

from collections.abc import Callable, Sequence

from areno.config.algorithms import resolve_reference

AdvantageFn = Callable[[Sequence[float], Sequence[int]], list[float]]

_REGISTRY: dict[str, AdvantageFn | str] = {
    "group": "areno.loss_fns.advantages:group_advantages",
    "group_mean": "areno.loss_fns.advantages:group_mean_advantages",
    "rloo": "areno.loss_fns.advantages:rloo_advantages",
    "batch": "areno.loss_fns.advantages:batch_advantages",
}


def register_advantage(name: str, fn: AdvantageFn, *, replace: bool = False) -> None:
    """Register an estimator for ``--advantage``. If the name is taken and ``replace`` is false, raise ValueError."""
    if name in _REGISTRY and not replace:
        raise ValueError(f"advantage {name!r} is already registered; choose another name, or pass replace=True")
    _REGISTRY[name] = fn


def get_advantage(name: str) -> AdvantageFn:
    """Return the estimator called ``name``. Raises ValueError if the name is not registered."""
    if name not in _REGISTRY:
        raise ValueError(f"advantage {name!r} is unknown; choose one of: {', '.join(list_advantages())}")
    return resolve_reference(_REGISTRY[name])  # type: ignore[no-any-return]


def list_advantages() -> list[str]:
    """Return the names of the registered estimators, sorted."""
    return sorted(_REGISTRY)
