"""Conversion of a configuration of TRL or verl to an ``areno train`` command, for ``areno convert``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from areno.config.conversion_tables import (
    ACTOR,
    DPO_LOSSES,
    OF_GRPO,
    TRL,
    VERL,
    Rule,
    Settings,
    algorithm_of,
    count_of,
    estimator_of,
    is_on,
    reading,
    text_of,
)

Words = list[str]


@dataclass(frozen=True, slots=True)
class Conversion:
    """An ``areno train`` command, and notes on the TRL or verl settings that were not converted."""

    words: Words
    notes: list[str]

    @property
    def command(self) -> str:
        """The ``areno train`` command as text, with one option per line."""
        lines, line = [], "areno train"
        for word in self.words:
            if word.startswith("--"):
                lines.append(line)
                line = f"  {word}"
            else:
                line += f" {shlex.quote(word)}"
        return " \\\n".join([*lines, line])


def convert(tool: str, settings: Settings, kind: str = "grpo", devices: int = 1) -> Conversion:
    """Return the ``areno train`` command that corresponds to a TRL or verl configuration.

    Args:
        tool: ``trl`` or ``verl``.
        settings: values by name; verl's names include the section, as in ``data.train_batch_size``.
        kind: kind of TRL training: ``grpo``, ``sft`` or ``dpo``.
        devices: number of devices of the TRL run; TRL's batch sizes are per device.

    Raises UsageError if the value of a numeric setting is invalid.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    rules = VERL if tool == "verl" else TRL | OF_GRPO if kind == "grpo" else TRL
    algorithm, words = _of_trl(settings, kind, devices) if tool == "trl" else _of_verl(settings)
    notes = []
    for name, value in settings.items():
        rule = rules.get(name)
        if rule is None:
            notes.append(f"{name}={value}: no equivalent")
            continue
        for item in value if rule.many and isinstance(value, list) else [value]:
            added, note = _converted(name, item, rule, settings)
            words += added
            notes += [f"{name}={item}: {note}"] if note else []
    return Conversion(["--algo", algorithm, *words], notes)


def _converted(name: str, value: Any, rule: Rule, settings: Settings) -> tuple[Words, str]:
    """Return the command-line arguments for a setting, and a note if the setting or its value is not converted."""
    if rule.known and text_of(value).lower() not in rule.known:
        return [], f"not converted ({rule.note})" if rule.note else "not converted"
    if not rule.option:
        return [], "" if rule.together else rule.note
    with reading(name, value):
        wanted = rule.value(value, settings)
    if wanted is None:
        return [], rule.note or "no equivalent"
    return [] if wanted == "" else [rule.option] if wanted is True else [rule.option, str(wanted)], ""


def _of_trl(settings: Settings, kind: str, devices: int) -> tuple[str, Words]:
    rows = count_of(settings, "per_device_train_batch_size", 8) * devices
    of_step = rows * count_of(settings, "gradient_accumulation_steps", 1)
    algorithm, words = kind, ["--mini-bs", str(2 * rows if kind == "dpo" else rows)]
    if kind == "grpo":
        algorithm = "gspo" if settings.get("importance_sampling_level") == "sequence" else "grpo"
        of_step = max(of_step // count_of(settings, "num_generations", 8), 1)
        mean = {"grpo": "sequence", "dr_grpo": "dr_grpo"}.get(text_of(settings.get("loss_type", "dapo")), "token")
        words += ["--grpo-loss-mean", mean] if algorithm == "grpo" and mean != "token" else []
        if "epsilon" in settings:
            words += [f"--{algorithm}-clip-eps", str(settings["epsilon"])]
        with reading("beta", beta := settings.get("beta", 0)):
            words += ["--kl-coef", str(beta)] if float(beta) else []
    elif kind == "dpo":
        words += ["--dpo-beta", str(settings.get("beta", 0.1))]
        loss = text_of(settings.get("loss_type", "sigmoid"))
        words += ["--dpo-loss-type", loss] if loss in DPO_LOSSES[1:] else []
    words += ["--world-size", str(devices)] if devices > 1 else []
    return algorithm, ["--batch-size", str(of_step), *words]


def _of_verl(settings: Settings) -> tuple[str, Words]:
    algorithm = algorithm_of(settings)
    words = ["--advantage", "rloo"] if estimator_of(settings) == "rloo" else []
    clip = settings.get(f"{ACTOR}.clip_ratio_low", settings.get(f"{ACTOR}.clip_ratio"))
    if clip is not None:
        words += ["--clip-eps" if algorithm == "ppo" else f"--{algorithm}-clip-eps", str(clip)]
    if is_on(settings.get(f"{ACTOR}.use_kl_loss", False)):
        with reading(name := f"{ACTOR}.kl_loss_coef", coefficient := settings.get(name, 0.001)):
            float(coefficient)
        words += ["--kl-loss-coef" if algorithm == "ppo" else "--kl-coef", str(coefficient)]
    elif algorithm == "ppo":
        words += ["--no-use-kl-loss"]
    if {batch := "data.train_batch_size", part := f"{ACTOR}.ppo_mini_batch_size"} <= settings.keys():
        parts = count_of(settings, batch, 1) // count_of(settings, part, 1)
        words += ["--update-minibatches", str(parts)] if parts > 1 else []
    if (rows := f"{ACTOR}.ppo_micro_batch_size_per_gpu") in settings:
        words += ["--mini-bs", str(count_of(settings, rows, 1) * count_of(settings, "trainer.n_gpus_per_node", 1))]
    return algorithm, words
