"""Checks of a whole configuration: combinations, and what is not there yet."""

from __future__ import annotations

from areno.config.experiment.experiments import BaseExperimentConfig
from areno.config.parser import Problems


def check_config(config: BaseExperimentConfig) -> None:
    """Check that the settings make an experiment that can work.

    Raises:
        UsageError: every problem, with its setting, value and remedy; numbered if there are several.
    """
    problems = Problems()
    problems.raise_if_any()
