"""Names and values of a run's options, to advise which one to change."""

from typing import Any

from areno.config.setting_names import SETTINGS, in_settings
from areno.reports.run_data import RunData
from areno.reports.svg import short


class OptionAdvice:
    """Speaks of options by their name in ``areno train``, and writes them as the run's front end does."""

    def __init__(self, run: RunData) -> None:
        self._config, self._is_experiment = run.config, run.is_experiment

    def value(self, option: str) -> Any:
        """The value of an option in the run; None if it is unset or unknown."""
        if not self._is_experiment:
            return self._config.get(option.removeprefix("--").replace("-", "_"))
        value: Any = self._config
        for key in SETTINGS[option].split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def number(self, option: str) -> float | None:
        """The value of an option if it is a number."""
        value = self.value(option)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def text(self, text: str) -> str:
        """Write the options in a text as the front end does."""
        return in_settings(text) if self._is_experiment else text

    def assign(self, option: str, value: object) -> str:
        """Write an option with a value."""
        return f"{self.text(option)}{'=' if self._is_experiment else ' '}{value}"

    def scaled(self, option: str, factor: float) -> str:
        """Write an option with its value times ``factor``, for example ``--lr 0.0003 (now 0.001)``."""
        value = self.number(option)
        if not value:
            return self.text(option)
        changed = value * factor
        whole = isinstance(self.value(option), int)
        return f"{self.assign(option, round(changed) if whole else f'{changed:.1g}')} (now {short(value)})"

    @property
    def kl(self) -> str:
        """A KL term against the initial model that the algorithm has."""
        if self._is_experiment:
            return "actor.kl_loss_coef=0.01"
        options = ("--kl-coef", "--kl-loss-coef", "--kl-reward-coef")
        return next((f"{option} 0.01" for option in options if self.value(option) is not None), "a KL term")
