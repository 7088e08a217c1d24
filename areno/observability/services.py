"""Experiment tracking services: TensorBoard, Weights & Biases, SwanLab and Trackio, each behind the same three methods.

Special here: a service's package is imported when a run uses it and not before, and one that is missing is said with the
command that installs it. A service that keeps its own history continues it: what a resumed run does again is shown after
what it did before the crash, because none of these services can take a point back.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from areno.errors import UsageError
from areno.observability.tensorboard import EventWriter

if TYPE_CHECKING:
    from areno.config.experiment.run_sections import SwanlabConfig, TrackioConfig, WandBConfig

_log = logging.getLogger(__name__)


class Service(Protocol):
    """Somewhere that statistics are sent to."""

    name: str

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of one step; a service whose history is longer moves the step behind it."""

    def close(self) -> None:
        """Send what is left."""


@dataclass(frozen=True, slots=True)
class RunName:
    """What services call a run.

    Args:
        config: the run's resolved configuration, as plain data and without secrets.
    """

    experiment: str  # name of the experiment
    trial: str  # name of the trial
    config: Mapping[str, Any] = field(default_factory=dict)

    def run_id(self, suffix: str | None) -> str:
        """``{experiment}_{trial}_{suffix}``, in characters that services accept: the same after each restart."""
        parts = [self.experiment, self.trial, *([suffix] if suffix else [])]
        return plain("_".join(parts))


def plain(name: str) -> str:
    """A name in the characters that every service accepts."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def open_services(
    run: RunName,
    folder: Path,
    *,
    wandb: Mapping[str, Any] | None = None,
    swanlab: Mapping[str, Any] | None = None,
    tensorboard: Mapping[str, Any] | None = None,
    trackio: Mapping[str, Any] | None = None,
) -> list[Service]:
    """Open the services that are not disabled.

    Args:
        folder: the run's folder; a service that keeps files and is given no place keeps them below it.

    Raises:
        UsageError: an unknown mode, a package that is not installed, or a service that refuses.
    """
    services: list[Service] = []
    if tensorboard and tensorboard.get("path"):
        services.append(TensorboardService(tensorboard["path"]))
    if not (wandb or swanlab or trackio):
        return services
    from areno.config.experiment.run_sections import SwanlabConfig, TrackioConfig, WandBConfig  # loads OmegaConf

    makers: list[tuple[str, Callable[..., Service], Any, tuple[str, ...]]] = [
        ("wandb", WandbService, WandBConfig(**wandb or {}), ("online", "offline", "shared")),
        ("swanlab", SwanlabService, SwanlabConfig(**swanlab or {}), ("cloud", "local", "offline")),
        ("trackio", TrackioService, TrackioConfig(**trackio or {}), ("online", "local")),
    ]
    try:
        for name, make, section, modes in makers:
            mode = _mode(name, section.mode, modes)
            if mode != "disabled":
                services.append(make(run, folder, mode, section))
    except BaseException:
        for service in services:
            service.close()
        raise
    return services


class ServiceGroup:
    """Services that all get the same numbers; one that fails is left out, because training must not depend on it.

    Args:
        kept_in: file that has all values whatever happens, for messages.
    """

    def __init__(self, services: Iterable[Service], kept_in: Path) -> None:
        self._services, self._kept_in = list(services), kept_in

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of one step."""
        for service in list(self._services):
            try:
                service.log(step, numbers)
            except Exception as error:  # a service's own failure, of whatever type
                self._services.remove(service)
                _log.error("%s is left out from now on: %s; %s has all values", service.name, error, self._kept_in)

    def close(self) -> None:
        """Close all; a second call does nothing."""
        services, self._services = self._services, []
        for service in services:
            try:
                service.close()
            except Exception as error:  # a service's own failure, of whatever type
                _log.error("%s did not end properly: %s; %s has all values", service.name, error, self._kept_in)


def _mode(section: str, value: Any, modes: tuple[str, ...]) -> str:
    """The mode by name; of on and off the first one and ``disabled``."""
    named = {True: modes[0], False: "disabled", None: "disabled"}.get(value, value)
    if named not in (*modes, "disabled"):
        raise UsageError(f"{section}.mode={value!r} is not a mode; use one of {', '.join((*modes, 'disabled'))}")
    return str(named)


def _package(section: str, package: str, pip_name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UsageError(
            f"{section}.mode needs the package {package}, which cannot be imported ({error}); "
            f"pip install {pip_name!r}, or set {section}.mode=disabled"
        ) from error


def _opened(section: str, opening: Callable[[], Any]) -> Any:
    """What a service's ``init`` returns; its refusals are the user's to solve."""
    try:
        return opening()
    except Exception as error:
        raise UsageError(
            f"{section} cannot be started: {error}; check its login and address, or set {section}.mode=disabled"
        ) from error


class TensorboardService:
    """Event files in a folder."""

    name = "TensorBoard"

    def __init__(self, path: str | Path) -> None:
        self._writer = EventWriter(Path(path).expanduser(), option="tensorboard.path")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue one step."""
        self._writer.write(step, numbers, time.time())

    def close(self) -> None:
        """Write what is queued."""
        self._writer.close()


class WandbService:
    """A Weights & Biases run, resumed under its name after a restart. Raises UsageError: W&B is not installed, or refuses."""

    name = "W&B"

    def __init__(self, run: RunName, folder: Path, mode: str, section: WandBConfig) -> None:
        wandb = _package("wandb", "wandb", "wandb")
        settings = {"console": "off", "silent": True}  # it would take the terminal's output for itself
        settings |= {"api_key": section.wandb_api_key} if section.wandb_api_key else {}
        settings |= {"base_url": section.wandb_base_url} if section.wandb_base_url else {}
        folder.mkdir(parents=True, exist_ok=True)
        self._run = _opened(
            "wandb",
            lambda: wandb.init(
                dir=str(folder),
                mode=mode,
                id=run.run_id(section.id_suffix),
                resume="allow" if mode != "offline" else None,
                entity=section.entity,
                project=section.project or run.experiment,
                name=section.name or run.trial,
                job_type=section.job_type,
                group=section.group or f"{run.experiment}_{run.trial}",
                notes=section.notes,
                tags=section.tags,
                config=dict(run.config if section.config is None else section.config),
                settings=wandb.Settings(**settings),
            ),
        )
        _log.info("W&B (%s): %s", mode, self._run.url or self._run.dir)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send one step."""
        self._run.log(dict(numbers), step=max(step, self._run.step), commit=True)

    def close(self) -> None:
        """Send what is left and end the run."""
        self._run.finish()


class SwanlabService:
    """A SwanLab run. Raises UsageError: SwanLab is not installed, or refuses."""

    name = "SwanLab"

    def __init__(self, run: RunName, folder: Path, mode: str, section: SwanlabConfig) -> None:
        swanlab = _package("swanlab", "swanlab", "swanlab")
        if mode == "local":
            _package("swanlab", "swanboard", "swanlab[dashboard]")
        if mode == "cloud" and section.api_key:
            _opened("swanlab", lambda: swanlab.login(api_key=section.api_key))
        # Only its cloud can continue a run; on this machine a restart is a run of its own, of the same name.
        resumed = {"id": run.run_id(None), "resume": "allow"} if mode == "cloud" else {}
        self._last = -1
        self._run = _opened(
            "swanlab",
            lambda: swanlab.init(
                project=section.project or plain(run.experiment),
                name=section.name or run.trial,
                config=dict(run.config if section.config is None else section.config),
                log_dir=str(Path(section.logdir).expanduser() if section.logdir else folder / "swanlab"),
                mode="online" if mode == "cloud" else mode,
                **resumed,
            ),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send one step; SwanLab draws finite numbers only."""
        self._last = max(step, self._last + 1)
        self._run.log({name: value for name, value in numbers.items() if math.isfinite(value)}, step=self._last)

    def close(self) -> None:
        """Send what is left and end the run."""
        self._run.finish()


class TrackioService:
    """A Trackio run: a local data base, or a Hugging Face Space.

    Raises:
        UsageError: Trackio is not installed, or mode and ``space_id`` do not go together.
    """

    name = "Trackio"

    def __init__(self, run: RunName, folder: Path, mode: str, section: TrackioConfig) -> None:
        if (mode == "online") != bool(section.space_id):
            remedy = "give trackio.space_id=user/space" if mode == "online" else "use trackio.mode=online"
            raise UsageError(f"trackio.mode={mode} with trackio.space_id={section.space_id!r}: {remedy}")
        trackio = _package("trackio", "trackio", "trackio")
        self._last: int | None = None
        self._run = _opened(
            "trackio",
            lambda: trackio.init(
                section.project or run.experiment,
                name=section.name or run.trial,
                space_id=section.space_id,
                config=dict(run.config),
                resume="allow",
                embed=False,
            ),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send one step."""
        # The run knows how far its history goes, and says so only by what it gives a step without a number.
        start = getattr(self._run, "_next_step", 0) if self._last is None else self._last + 1
        self._last = max(step, start)
        self._run.log(dict(numbers), step=self._last)

    def close(self) -> None:
        """Send what is left and end the run."""
        self._run.finish()
