"""Formats options for advice on a run, such as ``--lr 0.0003 (now 0.001)``."""

from contextlib import suppress
from typing import Any

from areno.config.reward_weights import part_weights
from areno.config.setting_names import SETTINGS, in_settings
from areno.errors import UsageError
from areno.reports.run_data import RunData
from areno.reports.svg import short


class OptionAdvice:
    """Formats options in the syntax of the command that started the run.

    The parameter ``option`` is always the name of an ``areno train`` option, such as ``--lr``. If ``areno run`` started the
    run, the result has the corresponding setting, such as ``actor.optimizer.lr``.
    """

    def __init__(self, run: RunData) -> None:
        self._config, self._is_experiment = run.config, run.is_experiment

    def value(self, option: str) -> Any:
        """Return the value of an option in the run; None if the run did not record the option."""
        if not self._is_experiment:
            return self._config.get(option.removeprefix("--").replace("-", "_"))
        value: Any = self._config
        for key in SETTINGS[option].split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def number(self, option: str) -> float | None:
        """Return the value of an option as a float; None if the value is not a number."""
        value = self.value(option)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def text(self, text: str) -> str:
        """If ``areno run`` started the run, replace ``areno train`` options in ``text`` with the corresponding settings."""
        return in_settings(text) if self._is_experiment else text

    def assign(self, option: str, value: object) -> str:
        """Return an option with a value, such as ``--lr 0.0003``."""
        return f"{self.text(option)}{'=' if self._is_experiment else ' '}{value}"

    def scaled(self, option: str, factor: float) -> str:
        """Return an option with its value in the run multiplied by ``factor``.

        Example for factor 0.3: ``--lr 0.0003 (now 0.001)``. If the value in the run is 0 or unknown, return only the option.
        """
        value = self.number(option)
        if not value:
            return self.text(option)
        return self.changed(option, round(value * factor) if isinstance(self.value(option), int) else value * factor)

    def changed(self, option: str, value: float) -> str:
        """Return an option with a new value, followed by the value that the run used, if this is known."""
        present = self.number(option)
        written = self.assign(option, value if isinstance(value, int) else f"{value:.1g}")
        return written if present is None else f"{written} (now {short(present)})"

    def weight(self, part: str) -> float:
        """Return the weight of a part of the reward."""
        with suppress(UsageError):
            return part_weights(self.value("--reward-weights")).get(part, 1.0)
        return 1.0

    @property
    def kl(self) -> str:
        """An option and its value, such as ``--kl-coef 0.01``. The option adds a KL penalty relative to the initial model.

        If the configuration of the run has no value for such an option, the text is ``a KL term``.
        """
        if self._is_experiment:
            return "actor.kl_loss_coef=0.01"
        options = ("--kl-coef", "--kl-loss-coef", "--kl-reward-coef")
        return next((f"{option} 0.01" for option in options if self.value(option) is not None), "a KL term")
