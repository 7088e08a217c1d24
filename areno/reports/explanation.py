"""Finds a metric by its full or short name, for ``areno explain`` and for pages that show metrics.

The module covers the metrics of ``areno train`` and of ``areno run``. Both commands use the same short names for the metrics of
an optimizer update. For example, ``train/entropy`` (``areno train``) and ``ppo_actor/update/entropy`` (``areno run``) have the
short name ``entropy`` and the same explanation.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from areno.observability import experiment_metrics, train_metrics
from areno.observability.metric_advice import Advice, advice_for
from areno.reports.run_data import KEYS

_PREFIXES = ("rollout/", "train/", "eval/", "time/")
_SCOPES = ("train/", "ppo_actor/update/", "ppo_critic/update/", "sft/", "dpo/", "rw/")
"""Prefixes of the metrics of an update. A metric has the same meaning under each prefix."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a metric.

    Attributes:
        name: full name of the metric, without a final ``/avg``, ``/min`` or ``/max``.
        unit: unit of the values; empty if the metric has no unit, or if ``meaning`` states the unit.
        section: title of the section that lists the metric.
        advice: normal values and a remedy; None if the metric has no advice.
    """

    name: str
    unit: str
    meaning: str
    section: str
    is_experiment: bool
    advice: Advice | None

    @property
    def front_end(self) -> str:
        """The command whose runs record the metric."""
        return "areno run" if self.is_experiment else "areno train"


@cache
def explanations() -> tuple[Explanation, ...]:
    """Return all documented metrics: first those of ``areno train``, then the statistics of experiments."""
    return tuple(_documented())


def explain(query: str) -> list[Explanation]:
    """Return the metrics that a query names; [] if no metric matches.

    The query is a full name such as ``train/entropy``, a short name such as ``entropy``, or a key of
    :data:`~areno.reports.run_data.KEYS` such as ``reward``.
    """
    exact = _by_full_name(query)
    if exact is not None:
        return [exact]
    name = _without_number(query)
    full_names = [*KEYS.get(name, ()), *(prefix + name for prefix in _PREFIXES)]
    full_names += [one.name for one in explanations() if one.name.endswith(f"/{name}")]
    full_names += [full for alias, full in experiment_metrics.SHORT_NAMES.items() if alias.endswith(f"/{name}")]
    explained = (_by_full_name(full) for full in full_names)
    return list(dict.fromkeys(one for one in explained if one is not None))


def known_names() -> list[str]:
    """Return the names that :func:`explain` accepts. Short names come first."""
    names = [one.name for one in explanations()]
    return list(
        dict.fromkeys([*KEYS, *(name.rpartition("/")[2] for name in names), *names, *experiment_metrics.SHORT_NAMES])
    )


def _documented() -> Iterator[Explanation]:
    for section, metric in train_metrics.documented():
        advice = advice_for(metric.name)
        yield Explanation(metric.name, metric.unit, _plain(metric.meaning), section, False, advice)
    for section, statistic in experiment_metrics.documented():
        name = statistic.name
        advice = advice_for(name, experiment=True)
        if advice is None and name.startswith(_SCOPES):
            advice = advice_for(f"train/{name.rpartition('/')[2]}", experiment=True)
        yield Explanation(name, "", _plain(statistic.meaning), section, True, advice)


def _by_full_name(query: str) -> Explanation | None:
    """Return the explanation of the metric with this full name; None if there is no explanation.

    Some metrics are documented with only one of the prefixes in ``_SCOPES``, for example ``train/``. Their explanation also
    applies to the other prefixes.
    """
    plain = _without_number(query)
    for name in (query, plain, experiment_metrics.SHORT_NAMES.get(plain)):
        for one in explanations() if name else ():
            if name is not None and train_metrics.matches(one.name, name):
                return replace(one, name=name)
    scope = next((scope for scope in _SCOPES if plain.startswith(scope)), None)
    if scope is None:
        return None
    twins = [other + plain.removeprefix(scope) for other in _SCOPES if other != scope]
    for one in explanations():
        if one.name in twins:
            is_experiment = scope != "train/"
            advice = advice_for(one.name, experiment=is_experiment)
            return replace(one, name=plain, is_experiment=is_experiment, advice=advice)
    return None


def _without_number(name: str) -> str:
    return re.sub("/(avg|min|max)$", "", name)


def _plain(text: str) -> str:
    return re.sub(r"\[([^]]*)\]\(([^)]*)\)", r"\1 (docs/\2)", text).replace("`", "")
